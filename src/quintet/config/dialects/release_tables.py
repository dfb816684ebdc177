"""The default values of a framework's releases, from `FRAMEWORK/defaults.json`.

`scripts/record_defaults.py` writes them from a checkout of the framework.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from quintet.config.dotted import sections_around

ANY_NAME = "*"
"""Stands in a table for the name of a section that the user chooses."""
MANDATORY = "???"
"""Value of a key that a release has without a default."""
Table = Mapping[str, Any]
"""Default values by dotted key; an empty section is a value."""


@dataclass(frozen=True, slots=True)
class ReleaseTables:
    """The tables of all releases of a framework, by the name of a configuration of it."""

    modules: Mapping[str, tuple[str, ...]]
    """Releases that have a trainer, by its module."""
    recorded: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """By configuration and release, newest first, what differs from another table."""
    _tables: dict[tuple[str, str], Table] = field(default_factory=dict, init=False, repr=False, compare=False)

    def releases(self, configurations: Iterable[str] | None = None) -> tuple[str, ...]:
        """Return the releases that have one of the configurations, by default any, newest first."""
        names = self.recorded if configurations is None else configurations
        present = {release for name in names for release in self.recorded.get(name, {})}
        return tuple(release for release in self._order() if release in present)

    def _order(self) -> tuple[str, ...]:
        """Return all releases, newest first: no configuration skips one between two others."""
        order: list[str] = []
        for releases in sorted(self.recorded.values(), key=len, reverse=True):
            order += [release for release in releases if release not in order]
        return tuple(order)

    def table(self, configuration: str, release: str) -> Table:
        """Return the default values of a configuration in a release."""
        name = (configuration, release)
        if name not in self._tables:
            stored = self.recorded[configuration][release]
            table = dict(self.table(*stored["from"])) if "from" in stored else {}
            dropped = frozenset(stored.get("drop", ()))
            if dropped:
                table = {key: value for key, value in table.items() if dropped.isdisjoint((key, *sections_around(key)))}
            self._tables[name] = table | dict(leaves(stored.get("set", {})))
        return self._tables[name]


@cache
def load_release_tables(framework: str) -> ReleaseTables | None:
    """Return the tables of a framework; None if none are recorded."""
    file = files("quintet.config.dialects") / framework / "defaults.json"
    if not file.is_file():
        return None
    document = json.loads(file.read_text(encoding="utf-8"))
    return ReleaseTables({name: tuple(names) for name, names in document["modules"].items()}, document["tables"])


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a tree by dotted key, with empty sections."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@dataclass(frozen=True, slots=True)
class ReleaseEvidence:
    """Evidence of the release of a configuration besides its keys."""

    module: str = ""
    """Module of the trainer that a script starts."""
    added: frozenset[str] = frozenset()
    """Keys that `+key=value` adds: the release lacks them, or they are null in it."""
    named: str | None = None
    """Release that the user named."""
    trainer_file_keys: frozenset[str] = frozenset()
    """Keys that only the framework's own file in a checkout sets, which are its defaults."""
    code: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Code of the trainer in the checkout around a script, by its part."""
    tables: Mapping[str, Table] = field(default_factory=dict, repr=False)
    """Defaults in the checkout around a file, by configuration."""
    checkout: Path | None = None
    """Directory of the trainer's package."""


NO_EVIDENCE = ReleaseEvidence()


@dataclass(frozen=True, slots=True)
class ChosenRelease:
    """A release, its defaults, and why it was chosen."""

    framework: str
    name: str
    reason: str
    table: Table = field(repr=False)
    code: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Code of the trainer in the checkout around a script, by its part."""
    is_of_checkout: bool = False
    """Whether the defaults are those of classes in the checkout, and the release is the closest one."""

    def __str__(self) -> str:
        return f"{self.framework} {self.name}: {self.reason}"


def matches_code(rule: Mapping[str, str] | None, code: Mapping[str, str]) -> bool | None:
    """Return whether the `part` of a trainer's code `has` a pattern and `lacks` a text; None without rule or code."""
    text = code.get(rule["part"]) if rule else None
    if rule is None or text is None:
        return None
    has, lacks = rule.get("has"), rule.get("lacks")
    return (has is None or re.search(has, text) is not None) and (lacks is None or lacks not in text)


def stored_name(table: Table, key: str) -> str:
    """Return the name under which a table has a key, in which sections that the user named are `*`."""
    section, _, rest = key.partition(".")
    inner = rest.partition(".")[2]
    return f"{section}.{ANY_NAME}.{inner}" if f"{section}.{ANY_NAME}.{inner}" in table else key


class TableNames:
    """The keys and sections of a table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.sections: frozenset[str] = frozenset()

    def has(self, key: str) -> bool:
        """Return whether there is a key or a section with that name, or an empty section around it."""
        if key in self.table or stored_name(self.table, key) in self.table:
            return True
        if not self.sections:
            self.sections = frozenset(section for name in self.table for section in sections_around(name))
        return key in self.sections or any(self.table.get(section) == {} for section in sections_around(key))
