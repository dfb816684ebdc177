"""One generic registry: a name, what it makes, its configuration class, a line of help.

Everything pluggable (worlds, engines, policies, algorithms) is a protocol plus an entry here.

    WORLDS: Registry[World] = Registry("world", entry_points="quintet.worlds")
    WORLDS.add("frozenlake", "quintet.envs.frozenlake:FrozenLake", help="...", config=FrozenLakeConfig)
    WORLDS.get("frozenlake").load()
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from quintet.errors import ConfigError, nearest

__all__ = ["Entry", "Registry", "load_outside"]

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
    how: str | None = None

    def missing(self) -> tuple[str, ...]:
        """The packages that this entry needs and this installation lacks."""
        return tuple(name for name in self.requires if importlib.util.find_spec(name) is None)

    @property
    def install(self) -> str:
        """What `pip install` needs to be told: the extra, else the packages that are missing."""
        return f"quintet[{self.extra}]" if self.extra else " ".join(self.missing())

    @property
    def guide(self) -> str:
        """What to do where a package is missing."""
        return self.how or f"pip install '{self.install}'"

    def load(self) -> Callable[..., T]:
        """The factory itself.

        Raises:
            ConfigError: a package it needs is not installed; the message says what to install.
        """
        if missing := self.missing():
            raise ConfigError(
                f"{self.name!r} needs {', '.join(missing)}, not installed here",
                value=self.name,
                hint=self.guide,
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
        how: str | None = None,
    ) -> None:
        """Register `name`; `how` says what to do where packages are missing, if that isn't `pip install`.

        Raises:
            ValueError: the name is taken.
        """
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = Entry(name, target, help, config, requires, extra, how)

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


def load_outside(reference: str, key: str, entry_points: str | None = None) -> Callable[..., Any]:
    """What a user's `file.py:name`, `module:name`, or a name that another package registered under `entry_points`
    stands for; `key` is the configuration's, for messages.

    Raises:
        ConfigError: there is no such file, module or name, or importing it fails.
    """
    for point in importlib.metadata.entry_points(group=entry_points) if entry_points else ():
        if point.name == reference:
            return cast("Callable[..., Any]", point.load())
    place, colon, name = reference.rpartition(":")
    if not colon:
        raise ConfigError(
            f"{key} = {reference!r} names nothing to call", key=key, value=reference, hint="give file.py:name"
        )
    module = _module(place, key, reference)
    if not hasattr(module, name):
        close = nearest(name, vars(module))
        raise ConfigError(
            f"{key} = {reference!r}: {place} has no {name!r}",
            key=key,
            value=reference,
            hint=f"did you mean {close!r}?" if close else None,
        )
    return cast("Callable[..., Any]", getattr(module, name))


def _module(place: str, key: str, reference: str) -> ModuleType:
    """A user's file or module, imported once."""
    try:
        return _file(Path(place).expanduser().resolve()) if place.endswith(".py") else importlib.import_module(place)
    except FileNotFoundError as error:
        raise ConfigError(f"{key} = {reference!r}: there is no file {place}", key=key, value=reference) from error
    except Exception as error:
        told = f"{key} = {reference!r}: importing it failed: {type(error).__name__}: {error}"
        raise ConfigError(told, key=key, value=reference) from error


def _file(path: Path) -> ModuleType:
    name = f"quintet_outside_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
