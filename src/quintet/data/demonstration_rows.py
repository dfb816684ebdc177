"""Demonstrations as rows for supervised fine-tuning, one row per action, like RAGEN's SFT data.

Differences from RAGEN's `sft.data_generation`: the layouts of these environments do not occur in any run
(`Split.DEMONSTRATION`), no validation episode starts like a training episode, episodes in which the expert fails on
slippery ice are skipped, and responses name the action in all formats, where RAGEN's text formats contain its number.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast

from pydantic import TypeAdapter

from quintet.config.native.envs import ENVS, EnvConfig
from quintet.config.native.section import Section
from quintet.config.native.training import SolvedEpisodesConfig
from quintet.data.demonstrations import DemonstratedTurn, Expert, run_episode
from quintet.data.tasks.generation import SPLITS, check_directory, write_rows
from quintet.data.tasks.task import parse_options
from quintet.data.worker_pool import WorkerPool
from quintet.envs.env import IMAGE
from quintet.envs.factory import build_env
from quintet.envs.service.png import encode_png
from quintet.envs.start_states import Split, split_seed
from quintet.errors import ConfigError, did_you_mean

MAX_TRIES_PER_EPISODE: Final = 50
"""Tried episodes per solved one, after which the environment is considered too hard."""
EPISODES_PER_REQUEST: Final = 8
"""Episodes per request to a worker."""
RowFormat = Literal["message", "qwen-instruct", "base"]
Turns = list[tuple[str, str, str, list[str]]]
"""Observation, thought, action and images per turn; images are PNG files in base64."""
IMAGE_COLUMN: Final = "images"
"""Column of the images of a row."""


def parse_env_config(name: str, options: Mapping[str, Any]) -> EnvConfig:
    """Return the configuration of an environment from its name and options.

    Raises:
        ConfigError: the environment has no expert, or an option is unknown or invalid.
    """
    solvable = {entry.name: entry.config for entry in ENVS if getattr(entry.config, "has_expert", False)}
    if name not in solvable:
        hint = f"{did_you_mean(name, solvable, '{}')} environments with an expert: {', '.join(solvable)}".lstrip()
        raise ConfigError(f"the environment {name} has no expert", key="env", value=name, hint=hint)
    return cast("EnvConfig", parse_options(cast("type[Section]", solvable[name]), options, name))


def write_demonstration_rows(
    env: EnvConfig, episodes: SolvedEpisodesConfig, directory: Path, *, think: bool = True, overwrite: bool = False
) -> dict[str, Path]:
    """Solve episodes and write `train.parquet` and `validation.parquet`.

    `think` adds the expert's thought before each action. The result does not depend on `episodes.processes`.

    Raises:
        ConfigError: the environment has no expert, or too few episodes are solvable in `episodes.max_depth` moves.
        MachineError: a file exists already, or cannot be written.
    """
    sizes = {"train": episodes.episodes, "validation": episodes.validation_episodes}
    check_directory(directory, sizes, overwrite=overwrite)
    if not hasattr(build_env(env), "expert_action"):
        raise ConfigError(f"env.name = {env.name}: the environment has no expert", key="env.name", value=env.name)
    instruction = build_env(env).instruction()
    rows: dict[str, list[Mapping[str, Any]]] = {split: [] for split in SPLITS}
    for index, (seed, turns) in enumerate(_iter_distinct_episodes(env, episodes)):
        split = "train" if index < episodes.episodes else "validation"
        rows[split] += _build_rows(env.name, split, seed, turns, instruction, episodes.form, think=think)
    return write_rows(directory, rows)


def _iter_distinct_episodes(env: EnvConfig, episodes: SolvedEpisodesConfig) -> Iterator[tuple[int, Turns]]:
    """Yield seeds and turns of solved episodes with different first observations, training episodes first."""
    num_episodes = episodes.episodes + episodes.validation_episodes
    first_observations = set[tuple[str, ...]]()
    num_tries = 0
    num_solved = 0
    for seed, turns in _iter_episodes(env, episodes):
        num_tries += 1
        num_solved += bool(turns)
        observation = (turns[0][0], *turns[0][3]) if turns else ()
        if turns and observation not in first_observations:
            first_observations.add(observation)
            yield seed, turns
        if len(first_observations) == num_episodes:
            return
        if num_tries >= MAX_TRIES_PER_EPISODE * (len(first_observations) + 2):
            break
    raise ConfigError(
        f"{env.name}: only {len(first_observations)} of {num_episodes} episodes with different first observations were"
        f" solved in {num_tries} tries",
        key="max_depth",
        value=episodes.max_depth,
        hint="request fewer episodes, or enlarge the environment: its layouts repeat"
        if num_solved > num_tries // 2
        else "increase max_depth, or make the environment easier",
    )


def _iter_episodes(env: EnvConfig, episodes: SolvedEpisodesConfig) -> Iterator[tuple[int, Turns | None]]:
    """Yield seeds and turns of episodes without end; None for unsolved episodes."""
    setup = {"env": env.model_dump(mode="json"), "max_depth": episodes.max_depth}
    if episodes.processes < 2:
        handle, number = _create_handler(setup), episodes.seed
        while True:
            yield from zip(_block_seeds(number), handle({"first": number}), strict=True)
            number += EPISODES_PER_REQUEST
    with WorkerPool(_create_handler, setup, episodes.processes) as workers:
        requests = ({"first": number} for number in _iter_block_starts(episodes.seed))
        for number, episodes_of_block in zip(_iter_block_starts(episodes.seed), workers.map(requests), strict=False):
            yield from zip(_block_seeds(number), episodes_of_block, strict=True)


def _iter_block_starts(number: int) -> Iterator[int]:
    while True:
        yield number
        number += EPISODES_PER_REQUEST


def _block_seeds(first: int) -> list[int]:
    """Return the seeds of a block of episodes of the demonstration split."""
    return [split_seed(Split.DEMONSTRATION, number) for number in range(first, first + EPISODES_PER_REQUEST)]


def _solve(env: Expert, seed: int, max_depth: int) -> Turns | None:
    """Return the turns of the expert's episode, or None if it does not succeed in `max_depth` moves."""
    episode = run_episode(env, seed, max_depth)
    return None if episode is None else [_as_texts(turn) for turn in episode.turns]


def _as_texts(turn: DemonstratedTurn) -> tuple[str, str, str, list[str]]:
    """Return a turn of `Turns`, whose observation has a placeholder for each image."""
    missing = len(turn.images) - turn.observation.count(IMAGE)
    images = [b64encode(encode_png(image)).decode() for image in turn.images]
    return f"{IMAGE * missing}{turn.observation}", turn.thought, turn.actions[0], images


def _build_rows(
    env: str, split: str, seed: int, turns: Turns, instruction: str, form: RowFormat, *, think: bool
) -> Iterator[Mapping[str, Any]]:
    """Yield a row per move: the conversation so far and the response."""
    messages = [{"role": "system", "content": instruction}]
    images: list[dict[str, bytes]] = []
    for number, (observation, thought, action, shown) in enumerate(turns):
        images = [*images, *({"bytes": b64decode(image)} for image in shown)]
        messages = [*messages, {"role": "user", "content": observation}]
        thought_text = f" {thought} " if think else ""
        reply = f"<think>{thought_text}</think><answer> {action} </answer>"
        response = reply if think else f"<answer> {action} </answer>"
        yield {
            "data_source": env,
            "prompt": messages if form == "message" else _render_prompt(messages, form),
            "response": response if form == "message" else reply.removeprefix("<think>"),
            "ability": "bfs",
            "reward_model": {"style": "rule", "ground_truth": action},
            "extra_info": {"split": split, "index": seed, "turn": number},
            **({IMAGE_COLUMN: images} if images else {}),
        }
        messages = [*messages, {"role": "assistant", "content": response if form == "message" else reply}]


def _render_prompt(messages: list[dict[str, str]], form: RowFormat) -> str:
    """Render a conversation up to the beginning of a thought, in Qwen's chat format or as plain text."""
    if form == "qwen-instruct":
        text = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
        return f"{text}<|im_start|>assistant\n<think>"
    names = {"system": "", "user": "User: ", "assistant": "Assistant: "}
    text = "".join(f"{names[message['role']]}{message['content']}\n" for message in messages)
    return f"{text}Assistant: <think>"


def _create_handler(setup: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    config: EnvConfig = TypeAdapter(EnvConfig).validate_python(setup["env"])
    expert, max_depth = cast("Expert", build_env(config)), setup["max_depth"]

    def handle(request: Mapping[str, Any]) -> list[Turns | None]:
        return [_solve(expert, seed, max_depth) for seed in _block_seeds(request["first"])]

    return handle
