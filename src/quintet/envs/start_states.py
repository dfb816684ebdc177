"""Start states of episodes as seeds, and their splits: training, validation and demonstrations never overlap."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any, Protocol

FIRST_TRIAL = 10**9
"""Index of the first training episode that decides about the end of a warm start."""
SEEDS_PER_ENV = 1 << 48
"""A start of a run with several envs is one number: index of the env × SEEDS_PER_ENV + seed."""


class Split(StrEnum):
    """Use of a seed."""

    TRAIN = "train"
    VALIDATION = "validation"
    DEMONSTRATION = "demonstration"


_ORDER = tuple(Split)


def split_seed(split: Split, index: int) -> int:
    """Return the seed of the `index`-th episode of a split; each split has every third number."""
    return index * len(_ORDER) + _ORDER.index(split)


def start_state(number: int, states: int | None, seed: int) -> int:
    """Return the start state of the `number`-th group of a run with `states` start states.

    After all states were used they repeat, in another order in each pass. None gives each number its own state.
    """
    if states is None:
        return number
    num_passes, index = divmod(number, states)
    return _order(states, seed, num_passes)[index]


def env_start(env: int, seed: int) -> int:
    """Return the start of the run's `env`-th env with this seed; for the first env, the seed itself."""
    return env * SEEDS_PER_ENV + seed


def env_index(start: int) -> int:
    """Return the index of the run's env that a start belongs to."""
    return start // SEEDS_PER_ENV


def env_seed(start: int) -> int:
    """Return the seed of a start within its env."""
    return start % SEEDS_PER_ENV


@lru_cache(maxsize=64)
def _order(states: int, seed: int, num_passes: int) -> tuple[int, ...]:
    order = list(range(states))
    random.Random(f"{seed}/{num_passes}").shuffle(order)  # noqa: S311 - a schedule, no secret
    return tuple(order)


def split_of(seed: int) -> Split:
    """Return the split of a seed."""
    return _ORDER[seed % len(_ORDER)]


def layout_split(layout: str) -> Split:
    """Return the split of a map, by a hash of its text.

    Generators retry until map and seed have the same split: two seeds of different splits never give the same
    map, however few maps there are.
    """
    return _ORDER[zlib.crc32(layout.encode()) % len(_ORDER)]


class StartStates(Protocol):
    """Source of start states: seeds of an env, or rows of a data file."""

    def take(self, count: int) -> list[int]:
        """Return the next start states for training."""

    def held_out(self) -> list[int]:
        """Return all start states of a validation, always the same."""

    def warm_start_check_starts(self, count: int) -> list[int]:
        """Return start states that a warm start is evaluated on; none of them is used in validation."""

    def state(self) -> dict[str, Any]:
        """Return the position as JSON."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""


class SeedStartStates:
    """`StartStates` that are seeds of an env."""

    def __init__(self, states: int | None, seed: int, held_out: int) -> None:
        """`states` distinct start states, None for no repetition; `held_out` validation episodes."""
        self._states = states
        self._seed = seed
        self._held_out = held_out
        self._num_drawn = 0

    def take(self, count: int) -> list[int]:
        numbers = range(self._num_drawn, self._num_drawn + count)
        self._num_drawn += count
        return [split_seed(Split.TRAIN, start_state(number, self._states, self._seed)) for number in numbers]

    def held_out(self) -> list[int]:
        return [split_seed(Split.VALIDATION, index) for index in range(self._held_out)]

    def warm_start_check_starts(self, count: int) -> list[int]:
        """See `StartStates.warm_start_check_starts`; seeds beyond the seeds of any training step."""
        return [split_seed(Split.TRAIN, FIRST_TRIAL + index) for index in range(count)]

    def state(self) -> dict[str, Any]:
        return {"drawn": self._num_drawn}

    def load(self, state: Mapping[str, Any]) -> None:
        self._num_drawn = int(state["drawn"])
