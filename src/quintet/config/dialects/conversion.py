"""From a dialect's keys to native ones, each native value remembering which keys it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quintet.config.dialects.reading import Written
from quintet.config.faults import Fault
from quintet.config.keys import show

__all__ = ["Native", "Values"]


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a foreign configuration: those given, over those of the reference."""

    written: Written

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

    def provenance(self) -> Iterator[tuple[str, str]]:
        """Of each native key that was put: where its value was written, and as what."""
        for native, origins in self.origins.items():
            told = ", ".join(f"{origin}: {self.values.source(origin)}" for origin in origins)
            yield native, told or "this dialect"
