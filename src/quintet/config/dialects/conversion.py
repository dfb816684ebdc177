"""From a dialect's keys to native ones, each native value remembering which keys it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quintet.config.dialects.composition.reading import Written
from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.ledger import Row, counts
from quintet.config.faults import Fault
from quintet.config.keys import show

__all__ = ["Native", "Values", "foreign_word", "native_word"]


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a foreign configuration: those given, over those of the reference."""

    written: Written
    dialect: Dialect
    """With the references that this configuration is written by."""

    def __getitem__(self, key: str) -> Any:
        return self.written.value(key)

    def given(self, key: str) -> bool:
        """Whether somebody wrote it, in a file or on the command line."""
        return key in self.written.sources

    def source(self, key: str) -> str:
        """Where it was written; `reference` where it wasn't."""
        return self.written.sources.get(key, "reference")

    def told(self, key: str) -> str:
        """Key, value and source, as a message says them."""
        return f"{key} = {show(self[key])} ({self.source(key)})"

    def fault(self, key: str, problem: str, hint: str | None = None) -> Fault:
        """What is wrong with a key."""
        return Fault(key, self[key], self.source(key), f"{self.told(key)}: {problem}", hint)


@dataclass(slots=True)
class Native:
    """A native configuration in the making."""

    values: Values
    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of each native key, the foreign ones that it follows from."""
    remarks: list[str] = field(default_factory=list)
    """What people are told of it."""

    def put(self, native: str, value: Any, *origins: str) -> None:
        """Set a native key to a value that follows from the foreign keys `origins`."""
        *sections, last = native.split(".")
        place = self.tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
        self.origins[native] = origins

    def take(self, pairs: Mapping[str, str]) -> None:
        """Set native keys to the values of foreign ones, as they are."""
        for native, foreign in pairs.items():
            self.put(native, self.values[foreign], foreign)

    def take_rows(self, rows: Iterable[Row]) -> None:
        """Set the native key of every direct row to the row's value, by its words; rows that only count where
        another key has a certain value are left out elsewhere."""
        table = self.values.dialect.rows()
        for row in rows:
            if row.direct and counts(row, table, self.values.__getitem__):
                self.put(row.native[0], native_word(row, self.values[row.key]), row.key)

    def take_given(self, rows: Iterable[Row], here: str, there: str, native: Mapping[str, str]) -> None:
        """The same for those keys of a section `here` that somebody gave, where it takes the keys of `there`;
        `native` says which native section takes the place of which."""
        for row in rows:
            key = here + row.key.removeprefix(there)
            if row.direct and row.key.startswith(f"{there}.") and self.values.given(key):
                field = row.native[0]
                for theirs, ours in native.items():
                    if field.startswith(f"{theirs}."):
                        self.put(ours + field.removeprefix(theirs), native_word(row, self.values[key]), key)

    def provenance(self) -> Iterator[tuple[str, str]]:
        """Of each native key that was put: where its value was written, and as what."""
        for native, origins in self.origins.items():
            told = ", ".join(f"{origin}: {self.values.source(origin)}" for origin in origins)
            yield native, told or "this dialect"

    def origins_of(self, native: str) -> tuple[str, ...]:
        """The foreign keys that a native key, or what lies in its section, follows from."""
        found = [
            origin
            for key, origins in self.origins.items()
            if key == native or key.startswith(f"{native}.") or native.startswith(f"{key}.")
            for origin in origins
        ]
        return tuple(dict.fromkeys(found))


def foreign_word(row: Row, value: Any) -> Any:
    """A native value as a row's key has it."""
    if isinstance(value, list | tuple):
        return [foreign_word(row, item) for item in value]
    for theirs, ours in row.words.items():
        if ours == value and isinstance(ours, bool) == isinstance(value, bool):
            return theirs
    return value


def native_word(row: Row, value: Any) -> Any:
    """A value of a row as its native key has it."""
    if isinstance(value, list):
        return [native_word(row, item) for item in value]
    for theirs, ours in row.words.items():
        if theirs == value and isinstance(theirs, bool) == isinstance(value, bool):
            return ours
    return value
