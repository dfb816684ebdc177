"""Who may see which seed, and which map: training, validation and demonstrations never overlap."""

from __future__ import annotations

import random
import zlib
from enum import StrEnum
from functools import lru_cache

__all__ = ["Split", "layout_split", "split_of", "split_seed", "start_state"]


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


@lru_cache(maxsize=2)
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
