"""Search for native keys by common words such as `batch size`, `lr` or `max tokens`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from quintet.config.dialects.registry import DIALECTS
from quintet.config.schema import REPEATED, Key, keys

MAX_RESULTS = 8
REPEATED_LEARNERS = ("critic.", "reference.")
"""Sections with the keys of `actor`, which are found there."""


def search_keys(query: str) -> list[Key]:
    """Return the native keys that match all terms of the query, the best first.

    A key matches by its own name, by the name of a key of another framework that sets it, or by its description, in
    this order. Of several, keys come first that more keys of other frameworks set.
    """
    terms = _terms(query)
    if not terms:
        return []
    names = _foreign_names()
    ranked = [
        (rank, position, key)
        for position, key in enumerate(_searched())
        if (rank := _rank(terms, key, names.get(key.name, {}))) is not None
    ]
    return [key for *_, key in sorted(ranked, key=lambda item: item[:2])[:MAX_RESULTS]]


def _terms(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.casefold())


def _searched() -> Iterator[Key]:
    """Yield each key once: neither sections nor the repetitions of a section."""
    listed: set[str] = set()
    for key in keys():
        repeated = key.name.startswith((*REPEATED_LEARNERS, f"{REPEATED}."))
        if not (key.is_section or repeated or key.name in listed):
            listed.add(key.name)
            yield key


def _foreign_names() -> Mapping[str, Mapping[str, int]]:
    """Return how often frameworks use a name, the last part of a foreign key, for each native key."""
    names: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for dialect in DIALECTS.values():
        for reference in dialect.references:
            for spec in reference.load():
                for native in spec.native[:1]:
                    names[native][spec.key.rpartition(".")[2]] += 1
    return names


def _rank(terms: list[str], key: Key, foreign: Mapping[str, int]) -> tuple[int, int] | None:
    """Return the rank of a match, the smallest for the best; None if the key does not match."""
    if _contains(_terms(key.name), terms):
        return 0, -sum(foreign.values())
    uses = sum(count for name, count in foreign.items() if _contains(_terms(name), terms))
    if uses:
        return 1, -uses
    return (2, 0) if _contains(_terms(key.description), terms) else None


def _contains(text: list[str], terms: list[str]) -> bool:
    return all(any(part == word or (len(word) > 2 and part.startswith(word)) for part in text) for word in terms)
