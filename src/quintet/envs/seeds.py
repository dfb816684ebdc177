"""Who may see which seed, and which map: training, validation and demonstrations never overlap."""

from __future__ import annotations

import zlib
from enum import StrEnum

__all__ = ["Split", "layout_split", "split_of", "split_seed"]


class Split(StrEnum):
    """What a seed is for."""

    TRAIN = "train"
    VALIDATION = "validation"
    DEMONSTRATION = "demonstration"


_ORDER = tuple(Split)


def split_seed(split: Split, index: int) -> int:
    """The seed of the `index`-th game of a split: every third number belongs to each."""
    return index * len(_ORDER) + _ORDER.index(split)


def split_of(seed: int) -> Split:
    """The split a seed belongs to."""
    return _ORDER[seed % len(_ORDER)]


def layout_split(layout: str) -> Split:
    """The split a map belongs to, by what it looks like.

    Generators draw again until the map's split is the seed's: two seeds of different splits can
    never give the same map, however few maps there are.
    """
    return _ORDER[zlib.crc32(layout.encode()) % len(_ORDER)]
