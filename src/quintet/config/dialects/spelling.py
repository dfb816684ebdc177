"""Other spellings of documented keys: those of a framework's older and newer releases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quintet.config.dialects.composition.reading import Given
from quintet.config.dialects.ledger import Row
from quintet.errors import ConfigError

__all__ = ["Respelt", "respelt"]


@dataclass(frozen=True, slots=True)
class Respelt:
    """What was given, under the documented names."""

    given: Given
    remarks: tuple[str, ...]


def respelt(given: Given, rows: Mapping[str, Row]) -> Respelt:
    """Every other spelling under its documented name.

    Raises:
        ConfigError: a key is given under two of its names.
    """
    sources = dict(given.sources)
    remarks = []
    for row in rows.values():
        for alias in row.aliases:
            if alias not in given.sources or alias in rows:
                continue
            place = given.sources[alias]
            if row.key in given.sources:
                message = f"{alias} ({place}) is another name of {row.key} ({given.sources[row.key]})"
                raise ConfigError(message, key=alias, source=place, hint="keep one of them")
            _move(given, alias, row.key)
            for key in [key for key in sources if key == alias or key.startswith(f"{alias}.")]:
                sources[row.key + key.removeprefix(alias)] = sources.pop(key)
            _note_sections(row.key, place, sources)
            remarks.append(f"{alias} ({place}) is read as {row.key}")
    _drop_emptied(given.sources, sources)
    return Respelt(Given(given.tree, sources), tuple(remarks))


def _drop_emptied(before: Mapping[str, str], after: dict[str, str]) -> None:
    """Sections that held keys and hold none any more weren't given: all that stood in them has another name."""
    above = {key.rpartition(".")[0] for key in before}
    while gone := [key for key in after if key in above and not any(one.startswith(f"{key}.") for one in after)]:
        for section in gone:
            del after[section]


def _move(given: Given, old: str, new: str) -> None:
    """Put the value under its new name; what other keys say as `${old}` leads there, too."""
    from omegaconf import OmegaConf

    section, _, last = old.rpartition(".")
    parent = OmegaConf.select(given.tree, section) if section else given.tree
    node: Any = parent._get_node(last)
    OmegaConf.update(given.tree, new, node, force_add=True)
    parent[last] = f"${{{new}}}"


def _note_sections(key: str, place: str, sources: dict[str, str]) -> None:
    """The sections that a key stands in were given with it."""
    while "." in key:
        key = key.rpartition(".")[0]
        sources.setdefault(key, place)
