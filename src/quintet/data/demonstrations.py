"""Solved games to learn from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Protocol, cast

from quintet.envs.seeds import Split, split_seed
from quintet.envs.world import World
from quintet.errors import ConfigError
from quintet.records import Observation

__all__ = ["DemonstratedTurn", "Demonstration", "Expert", "demonstrate"]


class Expert(World, Protocol):
    """A world that can say what to do."""

    def expert_action(self) -> str:
        """A best action in the present state."""
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
    expert = cast("Expert", world)
    played = (_play(expert, split_seed(split, index), max_turns, max_actions_per_turn) for index in count())
    won = list(islice(_won(played, tries=50 * games + 100), games))
    if len(won) < games:
        raise ConfigError(
            f"the expert won {len(won)} games in {50 * games + 100} tries",
            key="rollout.max_turns",
            value=max_turns,
            hint="raise rollout.max_turns or make the world easier",
        )
    return won


def _won(played: Iterator[Demonstration | None], tries: int) -> Iterator[Demonstration]:
    return (game for game in islice(played, tries) if game is not None)


def _play(world: Expert, seed: int, max_turns: int, max_actions: int) -> Demonstration | None:
    """One game by the expert, None where it isn't won."""
    observation, done, won = world.reset(seed), False, False
    turns: list[DemonstratedTurn] = []
    while not done and len(turns) < max_turns:
        turn, observation, done, won = _turn(world, observation, max_actions)
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
