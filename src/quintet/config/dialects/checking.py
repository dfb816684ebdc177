"""Every fault of a foreign configuration at once: keys nobody knows, values of a wrong type, keys that wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quintet.config.dialects.composition.reading import OF_THE_RUN, Written
from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.free_sections import argument_of
from quintet.config.dialects.ledger import Row, counts, idle_for
from quintet.config.dialects.takes import FREE, Takes
from quintet.config.dialects.typos import meant
from quintet.config.faults import Fault
from quintet.config.keys import show

__all__ = [
    "Unknown",
    "UnknownKey",
    "idle_keys",
    "illegal_values",
    "noop_words",
    "pending_defaults",
    "pending_keys",
    "unknown_keys",
]


class Unknown(StrEnum):
    """Why a key isn't known, in words."""

    TYPO = "looks like a slip"
    ELSEWHERE = "known to that framework, but not to its reference"
    NOWHERE = "known to nobody"


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """A key that the dialect's references don't have."""

    key: str
    source: str
    why: Unknown
    nearest: tuple[str, ...]

    def __str__(self) -> str:
        meant = f"; did you mean {' or '.join(self.nearest)}?" if self.nearest else ""
        return f"{self.key} ({self.source}) {self.why}{meant}"


def unknown_keys(written: Written, dialect: Dialect, elsewhere: frozenset[str]) -> list[UnknownKey]:
    """What was given and isn't documented, those of `elsewhere` told apart."""
    rows = dialect.rows()
    sections = {part for key in rows for part in _above(key)}
    open_sections = {key for key, row in rows.items() if row.takes is FREE}
    legal = [*rows, *sections, *_in_like_sections(rows, dialect.alike)]

    def known(key: str) -> bool:
        other = dialect.documented(key)
        if (argument := argument_of(key, written, dialect)) is not None and argument.known:
            return True
        inside = any(name == free or name.startswith(f"{free}.") for name in (key, other) for free in open_sections)
        return inside or key in dialect.also or any(name in rows or name in sections for name in (key, other))

    found = []
    for key in written.leaves():
        if key not in OF_THE_RUN and not known(key):
            argument = argument_of(key, written, dialect)
            own = () if argument is None else argument.nearest
            maybe = (*own, *_names_meant(key, dialect), *meant(key, legal))
            near = [name for name in maybe if not key.startswith(f"{name}.")]
            why = Unknown.ELSEWHERE if _listed(key, elsewhere) else Unknown.TYPO if near else Unknown.NOWHERE
            found.append(UnknownKey(key, written.sources[key], why, tuple(near[:1]) if why is Unknown.TYPO else ()))
    return found


def _listed(key: str, names: frozenset[str]) -> bool:
    """Whether a key is among them, or in a section that is, or such a section itself."""
    return key in names or any(part in names for part in _above(key)) or any(n.startswith(f"{key}.") for n in names)


def _names_meant(key: str, dialect: Dialect) -> Iterator[str]:
    """A list of names with each misspelt one mended, where that makes a key of it."""
    section, _, names = key.rpartition(".")
    legal = dialect.listed.get(section, ())
    mended = [name if name in legal else next(iter(meant(name, legal)), name) for name in names.split(",")]
    if set(mended) <= set(legal):
        yield f"{section}.{','.join(mended)}"


def illegal_values(written: Written, dialect: Dialect) -> Iterator[Fault]:
    """Values that their key doesn't take, interpolations that lead nowhere among them, and sections that hold none."""
    rows = dialect.rows()
    sections = {part for key in rows for part in _above(key)} - set(rows)
    for key, row in _given(written, dialect):
        value, source = written.value(key), written.sources[key]
        if not row.takes.accepts(value):
            message = f"{key} = {show(value)} ({source}): must be {row.takes.words}"
            yield Fault(key, value, source, message, f"{key}: {row.effect}")
    for key, source in written.sources.items():
        value = written.value(key) if key in sections else {}
        if not isinstance(value, Mapping):
            message = f"{key} = {show(value)} ({source}): must be a section"
            yield Fault(key, value, source, message, "set the keys in it, or leave it out")


def pending_keys(written: Written, dialect: Dialect) -> Iterator[Fault]:
    """Keys that were given a value which asks for what isn't there yet."""
    for key, row in _given(written, dialect):
        value, source = written.value(key), written.sources[key]
        if _waits(written, dialect, row, value):
            message = f"{key} = {show(value)} ({source}): waits for {row.pending}"
            yield Fault(key, value, source, message, _instead(row))


def idle_keys(written: Written, dialect: Dialect) -> Iterator[str]:
    """Keys that were given a value of their own and have no effect beside the others, each as it is told."""
    for key, row in _given(written, dialect):
        missing = idle_for(row, dialect.rows(), written.value) if key in dialect.rows() else None
        if missing is not None and written.value(key) != written.interpolated(row.default):
            other, needed = missing
            told = f"{key} = {show(written.value(key))} ({written.sources[key]})"
            yield f"{told} has no effect: {other} is {show(written.value(other))}, not {noop_words(needed)}"


def pending_defaults(written: Written, dialect: Dialect) -> Iterator[str]:
    """Keys that nobody gave and whose value in the reference waits, each as it is told to people."""
    for key, row in dialect.rows().items():
        if row.pending and key not in written.sources and _waits(written, dialect, row, written.value(key)):
            yield f"{key} = {show(written.value(key))} waits for {row.pending}"


def _given(written: Written, dialect: Dialect) -> Iterator[tuple[str, Row]]:
    """Each documented key that somebody gave, as they wrote it, and what is documented of it."""
    rows = dialect.rows()
    for key in written.sources:
        row = rows.get(key) or rows.get(dialect.documented(key))
        if row is not None:
            yield key, row


def _waits(written: Written, dialect: Dialect, row: Row, value: object) -> bool:
    """Whether the value asks for what isn't there yet, in the run as it is configured."""
    if row.pending is None or not counts(row, dialect.rows(), written.value):
        return False
    return not any(_is(value, written.interpolated(noop)) for noop in row.noop)


def _is(value: object, noop: Any) -> bool:
    if isinstance(noop, Takes):
        return noop.accepts(value)
    # 0 and 0.0 ask for the same, 0 and false don't
    return bool(value == noop) and isinstance(value, bool) == isinstance(noop, bool)


def _instead(row: Row) -> str:
    if not row.noop:
        return "leave the key out"
    return f"leave the key out, or set it to {' or '.join(map(noop_words, row.noop))}"


def noop_words(noop: Any) -> str:
    """A value that a row names, or what a `Takes` accepts, as people are told."""
    return noop.words if isinstance(noop, Takes) else show(noop)


def _above(key: str) -> Iterator[str]:
    """The sections that a key stands in."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _in_like_sections(keys: Iterable[str], alike: Mapping[str, str]) -> Iterator[str]:
    """Documented keys as they are written in the sections that take them, too."""
    for section, other in alike.items():
        prefix = f"{other}." if other else ""
        yield from (f"{section}.{key.removeprefix(prefix)}" for key in keys if key.startswith(prefix))
