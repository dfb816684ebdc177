"""One generic registry: a name, what it makes, its configuration class, a line of help.

Everything pluggable (worlds, engines, policies, algorithms) is a protocol plus an entry here.

    WORLDS: Registry[World] = Registry("world", entry_points="quintet.worlds")
    WORLDS.add("frozenlake", "quintet.envs.frozenlake:FrozenLake", help="...", config=FrozenLakeConfig)
    WORLDS.get("frozenlake").load()
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from quintet.errors import ConfigError, nearest

__all__ = ["Entry", "Registry"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entry(Generic[T]):
    """A registered name. `target` is the factory or its `module:attribute` address, loaded on use."""

    name: str
    target: Callable[..., T] | str
    help: str
    config: type | None = None
    requires: tuple[str, ...] = ()
    extra: str | None = None

    def missing(self) -> tuple[str, ...]:
        """The packages that this entry needs and this installation lacks."""
        return tuple(name for name in self.requires if importlib.util.find_spec(name) is None)

    @property
    def install(self) -> str:
        """What `pip install` needs to be told: the extra, else the packages that are missing."""
        return f"quintet[{self.extra}]" if self.extra else " ".join(self.missing())

    def load(self) -> Callable[..., T]:
        """The factory itself.

        Raises:
            ConfigError: a package it needs is not installed; the message says what to install.
        """
        if missing := self.missing():
            raise ConfigError(
                f"{self.name!r} needs {', '.join(missing)}, not installed here",
                value=self.name,
                hint=f"pip install '{self.install}'",
            )
        if not isinstance(self.target, str):
            return self.target
        module, _, attribute = self.target.partition(":")
        return cast("Callable[..., T]", getattr(importlib.import_module(module), attribute))


class Registry(Generic[T]):
    """Names of one kind. `entry_points` names the group through which other packages add theirs."""

    def __init__(self, kind: str, entry_points: str | None = None) -> None:
        self.kind = kind
        self._group = entry_points
        self._entries: dict[str, Entry[T]] = {}

    def add(
        self,
        name: str,
        target: Callable[..., T] | str,
        *,
        help: str,  # noqa: A002 - the word users know
        config: type | None = None,
        requires: tuple[str, ...] = (),
        extra: str | None = None,
    ) -> None:
        """Register `name`.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = Entry(name, target, help, config, requires, extra)

    def get(self, name: str) -> Entry[T]:
        """The entry of that name.

        Raises:
            ConfigError: no such name; the message lists the nearest.
        """
        self._load_entry_points()
        if name in self._entries:
            return self._entries[name]
        close = nearest(name, self._entries)
        known = ", ".join(sorted(self._entries))
        raise ConfigError(
            f"unknown {self.kind} {name!r}",
            value=name,
            hint=(f"did you mean {close!r}? " if close else "") + f"known: {known}",
        )

    def __iter__(self) -> Iterator[Entry[T]]:
        self._load_entry_points()
        return iter(sorted(self._entries.values(), key=lambda entry: entry.name))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def _load_entry_points(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        for point in importlib.metadata.entry_points(group=group):
            if point.name not in self._entries:
                self.add(point.name, point.value, help=f"from {point.module}")
