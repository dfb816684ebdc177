"""Which documented key somebody meant who wrote one that isn't."""

from __future__ import annotations

import re
from collections.abc import Iterable

from rapidfuzz.distance import OSA

__all__ = ["meant"]

FAR = 0.34
"""Share of letters that may differ before two words are held to have nothing to do with each other."""


def meant(key: str, legal: Iterable[str], limit: int = 3) -> list[str]:
    """The legal dotted keys nearest to `key`, the nearest first; none where nothing is near.

    Letter case and separators count little: `trainBatchSize` and `train-batch-size` are
    `train_batch_size`. Letters left out, added, changed or swapped count one each (optimal string
    alignment distance). A key whose last word is spelt right but that stands in the wrong section is
    near, too.
    """
    ranked = sorted((_rank(key, other), other) for other in legal if other != key and _shares_a_word(key, other))
    return [other for (distance, *_), other in ranked if distance <= FAR][:limit]


def _shares_a_word(key: str, other: str) -> bool:
    """Whether the last words have something to do with each other, however long the sections before them are;
    keys that differ in two letters at most have in any case."""
    last, last_other = _plain(key.rpartition(".")[2]), _plain(other.rpartition(".")[2])
    return OSA.distance(last, last_other) <= len(last) // 2 or OSA.distance(_plain(key), _plain(other)) <= 2


def _rank(key: str, other: str) -> tuple[float, float, int]:
    plain, plain_other = _plain(key), _plain(other)
    whole = OSA.distance(plain, plain_other) / max(len(plain), len(plain_other), 1)
    last, last_other = _plain(key.rpartition(".")[2]), _plain(other.rpartition(".")[2])
    leaf = OSA.distance(last, last_other) / max(len(last), len(last_other), 1)
    misplaced = 0.2 + OSA.normalized_distance(key, other) / 10 if leaf == 0 else 1.0
    # of keys that differ in the same number of letters, the one written in the same letters is nearer
    return min(whole, misplaced), leaf, OSA.distance(key, other)


def _plain(word: str) -> str:
    return re.sub(r"[\W_]+", "", word).casefold()
