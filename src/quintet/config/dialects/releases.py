"""The releases of a framework in which its keys exist, from `FRAMEWORK/releases.yaml`, and the list of all its keys.

`scripts/write_releases.py` writes the ranges from a checkout of the framework; `files` is written by hand.
"""

from collections.abc import Collection, Iterator
from datetime import date
from functools import cache, cached_property
from importlib.resources import files
from typing import Self

import yaml
from pydantic import BaseModel, ConfigDict, model_validator

from quintet.config.dialects.dialect import Dialect, key_files
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dialects.value_types import BOOLEAN
from quintet.config.dotted import sections_around

_STRICT = ConfigDict(frozen=True, extra="forbid")


class Release(BaseModel):
    """A release of a framework, or the state of its main branch at a date."""

    model_config = _STRICT

    name: str
    commit: str
    day: date


class KeyRange(BaseModel):
    """Keys that exist in the same releases."""

    model_config = _STRICT

    since: str | None = None
    """First release with the keys; null if the oldest of `releases` has them."""
    until: str | None = None
    """Last release with the keys; null if the newest of `releases` has them."""
    keys: tuple[str, ...]

    @property
    def text(self) -> str:
        """Describe the range for users."""
        if self.since is not None and self.until is not None:
            return self.since if self.since == self.until else f"{self.since} to {self.until}"
        return f"since {self.since}" if self.since else f"until {self.until}" if self.until else "all"


class Releases(BaseModel):
    """The releases of a framework that were read, and the keys in them.

    Raises:
        ValueError: a range names an unknown release, or a key is in two ranges.
    """

    model_config = _STRICT

    repository: str
    releases: tuple[Release, ...]
    """Oldest first."""
    files: dict[str, str]
    """The key files, in order of precedence, with the documents or releases whose keys they list."""
    ranges: tuple[KeyRange, ...] = ()

    @model_validator(mode="after")
    def _check_ranges(self) -> Self:
        names = {release.name for release in self.releases}
        unknown = {name for each in self.ranges for name in (each.since, each.until) if name is not None} - names
        if unknown:
            raise ValueError(f"ranges with unknown releases: {', '.join(sorted(unknown))}")
        if len(self._texts) != sum(len(each.keys) for each in self.ranges):
            raise ValueError("a key is in two ranges")
        return self

    @cached_property
    def _texts(self) -> dict[str, str]:
        return {key: each.text for each in self.ranges for key in each.keys}

    def of(self, key: str) -> str:
        """Return the releases with a key, such as `since 0.5`; empty if none of the files that were read has it."""
        return self._texts.get(key, "")


@cache
def load_releases(framework: str) -> Releases:
    """Return the releases of a framework."""
    text = (files("quintet.config.dialects") / framework / "releases.yaml").read_text(encoding="utf-8")
    return Releases.model_validate(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))  # noqa: S506 - both are safe


def all_keys(dialect: Dialect, mentioning: Collection[str] = ()) -> Iterator[tuple[str, KeySpec]]:
    """Yield each key of a framework with the name of its key file.

    The keys of the references come first; then those of the other files, each only if no earlier file has it. Only
    files are read that mention one of the given names, if there are any.
    """
    documented = {reference.name for reference in dialect.references}
    listed: set[str] = set()
    for reference in dialect.references:
        if mentioning and not reference.mentions(mentioning):
            continue
        for spec in reference.load():
            listed.add(spec.key)
            yield reference.name, spec
    further = (name for name in load_releases(dialect.name).files if name not in documented)
    for reference in key_files(dialect.name, further):
        if mentioning and not reference.mentions(mentioning):
            continue
        for spec in reference.load():
            if spec.key not in listed:
                listed.add(spec.key)
                yield reference.name, spec


def documented_names(dialect: Dialect) -> frozenset[str]:
    """Return the keys of any run of a framework that a key file documents, with their aliases and those of its base."""
    names = frozenset(name for _, spec in all_keys(dialect) for name in (spec.key, *spec.aliases))
    return names if dialect.base is None else names | documented_names(dialect.base)


def is_of_framework(dialect: Dialect, key: str) -> bool:
    """Return whether a framework has a key in any release: by name, in a section of any keys, or as a section."""
    names = documented_names(dialect) | dialect.known_keys()
    return not names.isdisjoint((key, *sections_around(key))) or any(name.startswith(f"{key}.") for name in names)


def is_switch(dialect: Dialect, key: str) -> bool:
    """Return whether a key of a framework is true or false."""
    of_framework = any(spec.key == key and spec.value_type is BOOLEAN for _, spec in all_keys(dialect))
    return of_framework or (dialect.base is not None and is_switch(dialect.base, key))
