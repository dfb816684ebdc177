"""Suggestions for misspelt keys."""

import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from itertools import groupby

from rapidfuzz.distance import OSA

MAX_DISTANCE = 0.34
"""Largest share of differing characters between a key and a suggestion."""
WRONG_SECTION_DISTANCE = 0.2
"""Distance of a key with the right last part in another section."""
RARE_DISTANCE = 0.05
"""Distance added to a key that few files set, unless it differs in no more than `SLIP` characters."""
SLIP = 2
SECTION_DISTANCE = 0.05
"""Distance of a key that only lacks a section, or has one too many."""
WORD = re.compile(r"[A-Z]*[^A-Z._-]+|[A-Z]+")
"""A word of a key: words are separated by dots, underscores, hyphens or capitals."""


def closest_keys(key: str, legal: Iterable[str], limit: int = 3, rare: Collection[str] = ()) -> list[str]:
    """Return the legal dotted keys closest to `key`, the closest first, of equally close ones the first of `legal`;
    none if all are too far. Of similarly close ones, those of `rare` come last.

    The distance is the number of characters to insert, delete, substitute or transpose (optimal string alignment),
    regardless of case and separators: `trainBatchSize` matches `train_batch_size`. A key with the right last part in
    the wrong section is close, too, and one that lacks a section or repeats it is closer.
    """
    similar = (other for other in legal if other != key and _has_similar_name(key, other))
    ranked = sorted(((_rank(key, other, other in rare), other) for other in similar), key=lambda each: each[0])
    return [other for (distance, *_), other in ranked if distance <= MAX_DISTANCE][:limit]


def slip_of(key: str, legal: Iterable[str]) -> str | None:
    """Return the legal key from which `key` differs by one character, by separators or by a repeated section.

    Keys that differ in a digit, or in a whole word, are different keys.
    """
    closest = next(iter(closest_keys(key, legal, limit=1)), None)
    if closest is None or _has_other_digit(key, closest):
        return None
    is_slip = _without_repetition(key) == closest or is_misspelt(key, closest, changes=1)
    return closest if is_slip else None


def is_typo(key: str, meant: str, *, in_known_section: bool) -> bool:
    """Return whether `key` is `meant` with slips of the hand, rather than a key with a name of its own.

    Slips are other characters in its words or between them, and sections that are missing or repeated. In a section
    that exists, so are missing words, and the name of a key of another section.
    """
    (section, _, name), (meant_section, _, meant_name) = key.rpartition("."), meant.rpartition(".")
    if _without_repetition(key) == meant or is_misspelt(key, meant):
        return True
    if _normalized(name) == _normalized(meant_name):
        return in_known_section or (key.count(".") < meant.count(".") and _section_distance(key, meant) < 1)
    lacks_few = len(name.split("_")) > len(meant_name.split("_")) / 2
    return in_known_section and section == meant_section and lacks_few and _lacks_words(key, meant)


def is_misspelt(key: str, meant: str, changes: int | None = None) -> bool:
    """Return whether two keys have the same words, but for a few characters in each or for a separator.

    `changes` are those of all words together, at most; otherwise it is one in three characters of a word.
    """
    if _normalized(key) == _normalized(meant) or OSA.distance(key.casefold(), meant.casefold()) <= 1:
        return True
    words, others = WORD.findall(key), WORD.findall(meant)
    if len(words) != len(others):
        return False
    distances = [OSA.distance(word.casefold(), other.casefold()) for word, other in zip(words, others, strict=True)]
    if changes is not None:
        return sum(distances) <= changes
    return all(
        distance <= max(1, max(len(word), len(other)) // 3)
        for distance, word, other in zip(distances, words, others, strict=True)
    )


def _without_repetition(key: str) -> str:
    return ".".join(word for word, _ in groupby(key.split(".")))


def _has_other_digit(key: str, other: str) -> bool:
    digits, other_digits = (re.sub(r"\d", "#", word) for word in (key, other))
    return key != other and digits == other_digits


def _has_similar_name(key: str, other: str) -> bool:
    """Whether the last parts are similar, however long their sections are, or the keys differ in two characters, or the
    last part only lacks words."""
    name, other_name = _normalized(key.rpartition(".")[2]), _normalized(other.rpartition(".")[2])
    return (
        _lacks_words(key, other)
        or OSA.distance(name, other_name) <= len(name) // 2
        or OSA.distance(_normalized(key), _normalized(other)) <= 2
    )


def _lacks_words(key: str, other: str) -> bool:
    """Whether the last part of a key has at least two words, which that of the other has in the same order."""
    words, rest = key.rpartition(".")[2].split("_"), iter(other.rpartition(".")[2].split("_"))
    return len(words) > 1 and all(word in rest for word in words)


def _rank(key: str, other: str, is_rare: bool) -> tuple[float, float, int]:
    full, other_full = _normalized(key), _normalized(other)
    changes = OSA.distance(full, other_full)
    distance = changes / max(len(full), len(other_full), 1) + (RARE_DISTANCE if is_rare and changes > SLIP else 0.0)
    name, other_name = _normalized(key.rpartition(".")[2]), _normalized(other.rpartition(".")[2])
    name_distance = OSA.distance(name, other_name) / max(len(name), len(other_name), 1)
    misplaced = WRONG_SECTION_DISTANCE + OSA.normalized_distance(key, other) / 10 if name_distance == 0 else 1.0
    # among keys that differ in equally many characters, the one with the same case and separators is closer
    if name_distance == 0 and (sections := _section_distance(key, other)) < min(distance, misplaced):
        return sections, 0.0, 0
    return min(distance, misplaced), name_distance, OSA.distance(key, other)


def _section_distance(key: str, other: str) -> float:
    """Return the distance of keys that are equal but for sections that one of them lacks, 1 for other keys."""
    words, other_words = (_normalized_words(name) for name in (key, other))
    shorter, longer = sorted((words, other_words), key=len)
    rest = iter(longer)
    is_contained = all(word in rest for word in shorter)
    return SECTION_DISTANCE * (len(longer) - len(shorter)) if is_contained else 1.0


@lru_cache(maxsize=1 << 14)
def _normalized_words(key: str) -> tuple[str, ...]:
    return tuple(map(_normalized, key.split(".")))


@lru_cache(maxsize=1 << 15)
def _normalized(word: str) -> str:
    return re.sub(r"[\W_]+", "", word).casefold()
