"""What other frameworks call a native key: for people who write their own framework's word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from quintet.config.dialects.dialect import DIALECTS

__all__ = ["by_their_names"]

MOST = 3


def by_their_names(name: str, legal: Collection[str], *, anywhere: bool = False) -> list[str]:
    """Legal native keys that some framework calls by the last word of `name`, those that most rows mean first: of the
    section that it stands in, else of the sections around that, else, where asked for, `anywhere`.

    >>> by_their_names("actor.optimizer.lr", {"actor.optimizer.learning_rate"})
    ['actor.optimizer.learning_rate']
    """
    section, _, word = name.rpartition(".")
    called = Counter(native for native in _called(word) if native in legal)
    while section or anywhere:
        prefix = f"{section}." if section else ""
        if found := [native for native, _ in called.most_common() if native.startswith(prefix)]:
            return found[:MOST]
        if not section:
            break
        section = section.rpartition(".")[0]
    return []


def _called(word: str) -> Iterator[str]:
    """Of each row of that word the native key that it feeds first."""
    for dialect in DIALECTS.values():
        for reference in dialect.references:
            for row in reference.load():
                words = {key.rpartition(".")[2] for key in (row.key, *row.aliases)}
                if word in words and row.native:
                    yield row.native[0]
