"""The same run in another dialect, with a comment for what has no counterpart there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, cast

from quintet.config.compose import Composed, flatten, yaml_lines
from quintet.config.dialects.composition.reading import given_tree, reference_values
from quintet.config.dialects.conversion import foreign_word
from quintet.config.dialects.dialect import Dialect, narrowed
from quintet.config.dialects.ledger import counts
from quintet.config.dialects.loading import convert
from quintet.config.keys import show
from quintet.config.native import Experiment
from quintet.errors import ConfigError

__all__ = ["Foreign", "Translation", "translate"]


@dataclass(slots=True)
class Foreign:
    """A foreign configuration in the making."""

    experiment: Experiment
    values: dict[str, Any] = field(default_factory=dict)
    """Of dotted keys."""

    def put(self, key: str, value: Any) -> None:
        """Say a value in the dialect's own words."""
        self.values[key] = value

    def native(self, key: str) -> Any:
        """The value of a native key; None where a section on the way isn't there."""
        place: Any = self.experiment
        for part in key.split("."):
            place = place.get(part) if isinstance(place, Mapping) else getattr(place, part, None)
        return place


class _Expression(Protocol):
    """What a dialect's module gives, besides the way here."""

    def frame(self, experiment: Experiment) -> dict[str, Any]:
        """A tree that makes the dialect choose the references by which such a run is written."""
        ...

    def express(self, foreign: Foreign) -> None:
        """Say what the rows can't say one by one."""
        ...


@dataclass(frozen=True, slots=True)
class Translation:
    """A run in another dialect's words."""

    dialect: Dialect
    tree: Mapping[str, Any]
    """Its keys, those that the reference shows otherwise."""
    lost: Mapping[str, tuple[Any, Any]]
    """Native keys that the dialect can't say: their value, and the one that the translation has."""

    def text(self) -> str:
        """As a YAML file."""
        lines = [f"# A run in the dialect of {self.dialect.name}; keys that aren't here have its reference's values."]
        lines += yaml_lines(self.tree)
        if self.lost:
            lines += ["", f"# No counterpart in {self.dialect.name}:"]
            lines += [
                f"#   {key} = {show(ours)}   (there: {show(theirs)})" for key, (ours, theirs) in self.lost.items()
            ]
        return "\n".join(lines) + "\n"


def translate(composed: Composed, dialect: Dialect) -> Translation:
    """Say a run in another dialect, then read that back to see what was lost.

    Raises:
        ConfigError: the dialect can't say a run of that kind at all.
    """
    module = cast("_Expression", import_module(f"quintet.config.dialects.{dialect.name}.convert"))
    frame = module.frame(composed.experiment)
    here = narrowed(dialect, frame)
    foreign = Foreign(composed.experiment)
    for row in here.rows().values():
        if row.direct:
            value = foreign_word(row, foreign.native(row.native[0]))
            if row.takes.accepts(value):
                foreign.put(row.key, value)
    module.express(foreign)
    rows = here.rows()
    values = {key: value for key, value in foreign.values.items() if key not in rows or rows[key].takes.accepts(value)}
    tree, back = _readable(_differing(values, frame, here), frame, dialect)
    return Translation(here, tree, _lost(composed.experiment, back))


def _readable(tree: dict[str, Any], frame: Mapping[str, Any], dialect: Dialect) -> tuple[dict[str, Any], Experiment]:
    """The tree without the keys that the dialect's own rules forbid beside the others, and what it says."""
    said, needed = flatten(tree), flatten(dict(frame))
    while True:
        try:
            return _nested(said), convert(given_tree(_nested(said)), dialect).composed.experiment
        except ConfigError as error:
            # the fault may lie in the reference's value beside one that was said, which the message names, too
            blamed = [error.key, *(key for key in said if f"{key} = " in error.message)]
            culprit = next((key for key in blamed if key in said and key not in needed), None)
            if culprit is None:
                raise
            del said[culprit]


def _differing(values: Mapping[str, Any], frame: Mapping[str, Any], here: Dialect) -> dict[str, Any]:
    """The keys whose value isn't what the reference shows, as a tree; those that follow another key in the
    reference are compared with what they would follow."""
    rows, reference = here.rows(), reference_values(here)
    follow = {key for key, row in rows.items() if isinstance(row.default, str) and "${" in row.default}
    said: dict[str, Any] = flatten(dict(frame))
    for keys in ([key for key in values if key not in follow], [key for key in values if key in follow]):
        written = given_tree(_nested(said)).over(reference)
        said |= {key: values[key] for key in keys if written.value(key) != values[key]}
    written = given_tree(_nested(said)).over(reference)
    counting = [key for key in said if key not in rows or counts(rows[key], rows, written.value)]
    return _nested({key: said[key] for key in sorted(counting, key=[*rows, *said].index)})


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return tree


def _lost(ours: Experiment, theirs: Experiment) -> dict[str, tuple[Any, Any]]:
    here, there = (flatten(each.model_dump(mode="json")) for each in (ours, theirs))
    return {key: (value, there.get(key)) for key, value in here.items() if key not in there or there[key] != value}
