"""Suggestions for misspelt keys."""

import re
from collections.abc import Iterable

from rapidfuzz.distance import OSA

MAX_DISTANCE = 0.34
"""Largest share of differing characters between a key and a suggestion."""
WRONG_SECTION_DISTANCE = 0.2
"""Distance of a key with the right last part in another section."""


def closest_keys(key: str, legal: Iterable[str], limit: int = 3) -> list[str]:
    """Return the legal dotted keys closest to `key`, the closest first; none if all are too far.

    The distance is the number of characters to insert, delete, substitute or transpose (optimal string alignment),
    regardless of case and separators: `trainBatchSize` matches `train_batch_size`. A key with the right last part in
    the wrong section is close, too.
    """
    ranked = sorted((_rank(key, other), other) for other in legal if other != key and _has_similar_name(key, other))
    return [other for (distance, *_), other in ranked if distance <= MAX_DISTANCE][:limit]


def _has_similar_name(key: str, other: str) -> bool:
    """Whether the last parts are similar, however long their sections are, or the keys differ in two characters."""
    name, other_name = _normalized(key.rpartition(".")[2]), _normalized(other.rpartition(".")[2])
    return OSA.distance(name, other_name) <= len(name) // 2 or OSA.distance(_normalized(key), _normalized(other)) <= 2


def _rank(key: str, other: str) -> tuple[float, float, int]:
    full, other_full = _normalized(key), _normalized(other)
    distance = OSA.distance(full, other_full) / max(len(full), len(other_full), 1)
    name, other_name = _normalized(key.rpartition(".")[2]), _normalized(other.rpartition(".")[2])
    name_distance = OSA.distance(name, other_name) / max(len(name), len(other_name), 1)
    misplaced = WRONG_SECTION_DISTANCE + OSA.normalized_distance(key, other) / 10 if name_distance == 0 else 1.0
    # among keys that differ in equally many characters, the one with the same case and separators is closer
    return min(distance, misplaced), name_distance, OSA.distance(key, other)


def _normalized(word: str) -> str:
    return re.sub(r"[\W_]+", "", word).casefold()
