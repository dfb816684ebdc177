"""Solved games to learn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Final, Protocol, cast

from quintet.envs.seeds import Split, split_seed
from quintet.envs.world import Unsolved, World
from quintet.errors import ConfigError
from quintet.records import Observation

__all__ = ["DemonstratedTurn", "Demonstration", "Expert", "demonstrate"]


PATIENCE: Final = 50
"""Games tried for each that is won, before the world is held to be too hard."""


class Expert(World, Protocol):
    """A world that can say what to do."""

    def expert_action(self) -> str:
        """A best action in the present state.

        Raises:
            Unsolved: the expert finds none that leads to success.
        """
        ...

    def expert_thought(self) -> str:
        """What there is to see, in a few words."""
        ...


@dataclass(frozen=True, slots=True)
class DemonstratedTurn:
    """What the expert saw, thought and did."""

    observation: str
    actions: tuple[str, ...]
    thought: str


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A game that the expert won."""

    seed: int
    turns: tuple[DemonstratedTurn, ...]


def demonstrate(
    make_world: Callable[[], World],
    games: int,
    *,
    split: Split = Split.DEMONSTRATION,
    max_turns: int,
    max_actions_per_turn: int = 1,
) -> list[Demonstration]:
    """`games` won games of the split. The expert doesn't know how the ice will slip: it loses some
    games, and those are left out.

    Raises:
        ConfigError: the world has no expert, or hardly a game can be won within `max_turns`.
    """
    world = make_world()
    if not hasattr(world, "expert_action"):
        raise ConfigError("this world has no expert to learn from", key="warm_start", hint="set warm_start=null")
    won, tries, fault = _won(cast("Expert", world), split, games, max_turns, max_actions_per_turn)
    if len(won) < games:
        cause = f"; the world failed: {type(fault).__name__}: {fault}" if fault else ""
        raise ConfigError(
            f"the expert won {len(won)} games in {tries} tries{cause}",
            key="rollout.max_turns",
            value=max_turns,
            hint="raise rollout.max_turns or make the world easier",
        )
    return won


def _won(
    expert: Expert, split: Split, games: int, max_turns: int, max_actions: int
) -> tuple[list[Demonstration], int, Exception | None]:
    """The won games, how many were tried and what the world last failed of; gives up once fewer than one in `PATIENCE`
    is won."""
    won: list[Demonstration] = []
    fault: Exception | None = None
    for tries in count():
        if len(won) == games or tries >= PATIENCE * (len(won) + 2):
            return won, tries, fault
        game = _tried(expert, split_seed(split, tries), max_turns, max_actions)
        if isinstance(game, Demonstration):
            won.append(game)
        fault = game if isinstance(game, Exception) else fault
    raise AssertionError("count() ends")


def _tried(world: Expert, seed: int, max_turns: int, max_actions: int) -> Demonstration | Exception | None:
    """See `_play`; what the world raised, where it did."""
    try:
        return _play(world, seed, max_turns, max_actions)
    except Exception as error:  # noqa: BLE001 - a world of the user's own may raise anything
        return error


def _play(world: Expert, seed: int, max_turns: int, max_actions: int) -> Demonstration | None:
    """One game by the expert, None where it isn't won or the expert finds no solution."""
    observation, done, won = world.reset(seed), False, False
    turns: list[DemonstratedTurn] = []
    while not done and len(turns) < max_turns:
        try:
            turn, observation, done, won = _turn(world, observation, max_actions)
        except Unsolved:
            return None
        turns.append(turn)
    return Demonstration(seed, tuple(turns)) if won else None


def _turn(world: Expert, observation: Observation, limit: int) -> tuple[DemonstratedTurn, Observation, bool, bool]:
    """One reply of up to `limit` actions; gives `(turn, next observation, done, won)`."""
    seen, thought = observation.text, world.expert_thought()
    actions: list[str] = []
    done = won = False
    while not done and len(actions) < limit:
        actions.append(world.expert_action())
        step = world.step(actions[-1])
        observation, done, won = step.observation, step.terminated or step.truncated, bool(step.info.get("success"))
    return DemonstratedTurn(seen, tuple(actions), thought), observation, done, won
