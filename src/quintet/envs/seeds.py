"""Who may see which seed, and which map: training, validation and demonstrations never overlap."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any, Protocol

__all__ = [
    "Split",
    "Starts",
    "WorldStarts",
    "layout_split",
    "seed_of",
    "split_of",
    "split_seed",
    "start_in",
    "start_state",
    "world_of",
]


TRIALS_FROM = 10**9
"""Number of the first training game that decides about the end of a warm start."""
SEEDS_OF_A_WORLD = 1 << 48
"""Where games begin is one number, also where several worlds are played: the world's, times so many, plus the seed."""


class Split(StrEnum):
    """What a seed is for."""

    TRAIN = "train"
    VALIDATION = "validation"
    DEMONSTRATION = "demonstration"


_ORDER = tuple(Split)


def split_seed(split: Split, index: int) -> int:
    """The seed of the `index`-th game of a split: every third number belongs to each."""
    return index * len(_ORDER) + _ORDER.index(split)


def start_state(number: int, states: int | None, seed: int) -> int:
    """Which start state the `number`-th group of a run plays, where there are so many of them: once all were
    played they come again, in an order of their own for each pass. None has one for each number."""
    if states is None:
        return number
    passed, place = divmod(number, states)
    return _order(states, seed, passed)[place]


def start_in(world: int, seed: int) -> int:
    """Where the game of that seed begins in the run's `world`-th world; in the first, that is the seed."""
    return world * SEEDS_OF_A_WORLD + seed


def world_of(start: int) -> int:
    """Which of the run's worlds a game is of that begins there."""
    return start // SEEDS_OF_A_WORLD


def seed_of(start: int) -> int:
    """The seed of a game that begins there, in its own world."""
    return start % SEEDS_OF_A_WORLD


@lru_cache(maxsize=64)
def _order(states: int, seed: int, passed: int) -> tuple[int, ...]:
    order = list(range(states))
    random.Random(f"{seed}/{passed}").shuffle(order)  # noqa: S311 - a schedule, no secret
    return tuple(order)


def split_of(seed: int) -> Split:
    """The split a seed belongs to."""
    return _ORDER[seed % len(_ORDER)]


def layout_split(layout: str) -> Split:
    """The split a map belongs to, by what it looks like.

    Generators draw again until the map's split is the seed's: two seeds of different splits can
    never give the same map, however few maps there are.
    """
    return _ORDER[zlib.crc32(layout.encode()) % len(_ORDER)]


class Starts(Protocol):
    """Where games begin: seeds of a world, or rows of a data file. What was drawn isn't drawn again."""

    def take(self, count: int) -> list[int]:
        """The next start states for training."""
        ...

    def held_out(self) -> list[int]:
        """Those of validation, always the same."""
        ...

    def trials(self, count: int) -> list[int]:
        """Some that a warm start is tried on, not those of validation."""
        ...

    def state(self) -> dict[str, Any]:
        """How far it was drawn, for JSON."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        ...


class WorldStarts:
    """Seeds of a world that makes a game of each."""

    def __init__(self, states: int | None, seed: int, held_out: int) -> None:
        """`states` start states there are, None for as many as are drawn; `held_out` validation games."""
        self._states = states
        self._seed = seed
        self._held_out = held_out
        self._drawn = 0

    def take(self, count: int) -> list[int]:
        """See `Starts.take`."""
        numbers = range(self._drawn, self._drawn + count)
        self._drawn += count
        return [split_seed(Split.TRAIN, start_state(number, self._states, self._seed)) for number in numbers]

    def held_out(self) -> list[int]:
        """See `Starts.held_out`."""
        return [split_seed(Split.VALIDATION, index) for index in range(self._held_out)]

    def trials(self, count: int) -> list[int]:
        """See `Starts.trials`; beyond those of any step."""
        return [split_seed(Split.TRAIN, TRIALS_FROM + index) for index in range(count)]

    def state(self) -> dict[str, Any]:
        """See `Starts.state`."""
        return {"drawn": self._drawn}

    def load(self, state: Mapping[str, Any]) -> None:
        """See `Starts.load`."""
        self._drawn = int(state["drawn"])
