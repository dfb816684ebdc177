"""Synonyms of native keys: the names that other frameworks have for them, to recognise a foreign name."""

from collections import Counter
from collections.abc import Collection, Iterator

from quintet.config.dialects.registry import DIALECTS

MAX_KEYS = 3


def keys_by_synonym(name: str, legal: Collection[str], *, anywhere: bool = False) -> list[str]:
    """Return the legal native keys that frameworks call by the last part of `name`, the most frequent first.

    They are keys in the section of `name`, otherwise in an enclosing section, otherwise, with `anywhere`, in any.

    >>> keys_by_synonym("actor.optimizer.lr", {"actor.optimizer.learning_rate"})
    ['actor.optimizer.learning_rate']
    """
    section, _, word = name.rpartition(".")
    counts = Counter(native for native in _native_keys(word) if native in legal)
    while section or anywhere:
        prefix = f"{section}." if section else ""
        if matches := [native for native, _ in counts.most_common() if native.startswith(prefix)]:
            return matches[:MAX_KEYS]
        if not section:
            break
        section = section.rpartition(".")[0]
    return []


def _native_keys(word: str) -> Iterator[str]:
    """Yield the first native key of each foreign key with that last part."""
    for dialect in DIALECTS.values():
        for reference in dialect.references:
            for spec in reference.load() if reference.mentions([word]) else ():
                names = {key.rpartition(".")[2] for key in (spec.key, *spec.aliases)}
                if word in names and spec.native:
                    yield spec.native[0]
