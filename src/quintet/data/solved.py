"""Solved games as examples for supervised fine-tuning, a row for each action: RAGEN's SFT data.

As RAGEN's `sft.data_generation` makes them, but for this: worlds of fine-tuning have layouts that no run plays
(`envs.seeds`), no validation game begins as a training game does, an expert on slippery ice doesn't know how
it will slip (games it loses are left out), and answers name the action in all forms, where RAGEN's text forms
give its number, which our worlds don't read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from pydantic import TypeAdapter

from quintet.config.native.section import Section
from quintet.config.native.training import SolvedGamesConfig
from quintet.config.native.worlds import FrozenLakeConfig, SokobanConfig, WorldConfig
from quintet.data.demonstrations import Expert
from quintet.data.making import SPLITS, check_directory, write_rows
from quintet.data.processes import Processes, serve
from quintet.data.tasks import options_of
from quintet.envs.catalogue import make_world
from quintet.envs.seeds import Split, split_seed
from quintet.envs.world import Unsolved
from quintet.errors import ConfigError, nearest

if TYPE_CHECKING:
    from quintet.records import Observation

__all__ = ["make_solved", "world_of"]

MODULE: Final = "quintet.data.solved"
PATIENCE: Final = 50
"""Games tried for each that is solved, before the world is held to be too hard."""
BLOCK: Final = 8
"""Games that a process is asked for at a time."""
SOLVABLE: Final[Mapping[str, type[Section]]] = {"frozenlake": FrozenLakeConfig, "sokoban": SokobanConfig}
Form = Literal["message", "qwen-instruct", "base"]
Turns = list[tuple[str, str, str]]
"""What the expert saw, thought and did."""


def world_of(name: str, options: Mapping[str, Any]) -> WorldConfig:
    """A world's configuration from its name and the options of its section.

    Raises:
        ConfigError: no such world has an expert, or an option is unknown or illegal.
    """
    if name not in SOLVABLE:
        close = nearest(name, SOLVABLE)
        hint = (f"did you mean {close}? " if close else "") + f"there are {', '.join(SOLVABLE)}"
        raise ConfigError(f"no expert plays the world {name}", key="world", value=name, hint=hint)
    return cast("WorldConfig", options_of(SOLVABLE[name], options, name))


def make_solved(
    world: WorldConfig, games: SolvedGamesConfig, directory: Path, *, think: bool = True, overwrite: bool = False
) -> dict[str, Path]:
    """Write `train.parquet` and `validation.parquet` of `games.games` and `games.validation_games` solved games.

    `think` puts what the expert sees in a few words before its answer. `games.processes` changes nothing but the
    time.

    Raises:
        ConfigError: the world has no expert, or hardly a game can be solved in `games.max_depth` moves.
        MachineError: a file is there already, or can't be written.
    """
    sizes = {"train": games.games, "validation": games.validation_games}
    check_directory(directory, sizes, overwrite=overwrite)
    if not hasattr(make_world(world), "expert_action"):
        raise ConfigError("this world has no expert to learn from", key="world.name", value=world.name)
    instruction = make_world(world).instruction()
    rows: dict[str, list[Mapping[str, Any]]] = {split: [] for split in SPLITS}
    for index, (seed, turns) in enumerate(_different(world, games)):
        split = "train" if index < games.games else "validation"
        rows[split] += _rows(world.name, split, seed, turns, instruction, games.form, think=think)
    return write_rows(directory, rows)


def _different(world: WorldConfig, games: SolvedGamesConfig) -> Iterator[tuple[int, Turns]]:
    """Seeds and moves of solved games, those for training first; no two begin alike."""
    wanted = games.games + games.validation_games
    begun, tries = set[str](), 0
    for seed, turns in _played(world, games):
        tries += 1
        if turns and turns[0][0] not in begun:
            begun.add(turns[0][0])
            yield seed, turns
        if len(begun) == wanted:
            return
        if tries >= PATIENCE * (len(begun) + 2):
            break
    raise ConfigError(
        f"{world.name}: {len(begun)} games that begin differently were solved in {tries} tries, not {wanted}",
        key="max_depth",
        value=games.max_depth,
        hint="ask for fewer, raise max_depth, or change the world's size",
    )


def _played(world: WorldConfig, games: SolvedGamesConfig) -> Iterator[tuple[int, Turns | None]]:
    """Game after game from the first seed on, without end; None where it isn't solved."""
    setup = {"world": world.model_dump(mode="json"), "max_depth": games.max_depth}
    if games.processes < 2:
        solve, number = _prepare(setup), games.seed
        while True:
            yield from zip(_seeds(number), solve({"first": number}), strict=True)
            number += BLOCK
    with Processes(MODULE, setup, games.processes) as workers:
        requests = ({"first": number} for number in _firsts(games.seed))
        for number, block in zip(_firsts(games.seed), workers.map(requests), strict=False):
            yield from zip(_seeds(number), block, strict=True)


def _firsts(number: int) -> Iterator[int]:
    while True:
        yield number
        number += BLOCK


def _seeds(first: int) -> list[int]:
    """Of the games from that number on, in the worlds that are for demonstrations alone."""
    return [split_seed(Split.DEMONSTRATION, number) for number in range(first, first + BLOCK)]


def _solution(world: Expert, seed: int, max_depth: int) -> Turns | None:
    """The expert's game; None where it isn't won in so many moves."""
    observation: Observation = world.reset(seed)
    turns: Turns = []
    while len(turns) < max_depth:
        try:
            turns.append((observation.text, world.expert_thought(), world.expert_action()))
        except Unsolved:
            return None
        step = world.step(turns[-1][2])
        observation = step.observation
        if step.terminated or step.truncated:
            return turns if step.info.get("success") else None
    return None


def _rows(
    world: str, split: str, seed: int, turns: Turns, instruction: str, form: Form, *, think: bool
) -> Iterator[Mapping[str, Any]]:
    """One for each move: the conversation so far, and the reply."""
    messages = [{"role": "system", "content": instruction}]
    for number, (seen, thought, action) in enumerate(turns):
        messages = [*messages, {"role": "user", "content": seen}]
        inner = f" {thought} " if think else ""
        reply = f"<think>{inner}</think><answer> {action} </answer>"
        spoken = reply if think else f"<answer> {action} </answer>"
        yield {
            "data_source": world,
            "prompt": messages if form == "message" else _as_text(messages, form),
            "response": spoken if form == "message" else reply.removeprefix("<think>"),
            "ability": "bfs",
            "reward_model": {"style": "rule", "ground_truth": action},
            "extra_info": {"split": split, "index": seed, "turn": number},
        }
        messages = [*messages, {"role": "assistant", "content": spoken if form == "message" else reply}]


def _as_text(messages: list[dict[str, str]], form: Form) -> str:
    """A conversation up to where a thought begins, in Qwen's chat format or as a base model may read it."""
    if form == "qwen-instruct":
        told = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
        return f"{told}<|im_start|>assistant\n<think>"
    names = {"system": "", "user": "User: ", "assistant": "Assistant: "}
    told = "".join(f"{names[one['role']]}{one['content']}\n" for one in messages)
    return f"{told}Assistant: <think>"


def _prepare(setup: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    config: WorldConfig = TypeAdapter(WorldConfig).validate_python(setup["world"])
    expert, max_depth = cast("Expert", make_world(config)), setup["max_depth"]

    def block(request: Mapping[str, Any]) -> list[Turns | None]:
        return [_solution(expert, seed, max_depth) for seed in _seeds(request["first"])]

    return block


if __name__ == "__main__":
    serve(_prepare)
