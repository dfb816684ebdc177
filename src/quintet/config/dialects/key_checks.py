"""Problems of a foreign configuration: unknown keys, illegal values, and keys that require a missing capability."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quintet.config.dialects.composition.foreign_config import RUN_KEYS, MergedConfig
from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.ledger import KeySpec, is_effective, unmet_condition
from quintet.config.dialects.passthrough import engine_argument
from quintet.config.dialects.typos import closest_keys
from quintet.config.dialects.value_types import SECTION, ValueType
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value


class UnknownReason(StrEnum):
    """Why a key is unknown, as the end of a sentence."""

    TYPO = "looks like a typo"
    UNDOCUMENTED = "exists in that framework but is not documented in its reference"
    NOWHERE = "does not exist in that framework"


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """A key that is missing in the dialect's references."""

    key: str
    source: str
    reason: UnknownReason
    suggestions: tuple[str, ...]

    def __str__(self) -> str:
        suggestion = f"; did you mean {' or '.join(self.suggestions)}?" if self.suggestions else ""
        return f"{self.key} ({self.source}) {self.reason}{suggestion}"


def unknown_keys(written: MergedConfig, dialect: Dialect, known: frozenset[str]) -> list[UnknownKey]:
    """Return the undocumented keys of a configuration; `known` are those that the framework's releases have."""
    specs = dialect.specs()
    sections = {section for key in specs for section in _sections_of(key)}
    free_sections = {key for key, spec in specs.items() if spec.value_type is SECTION}
    legal = [*specs, *sections, *_keys_of_similar_sections(specs, dialect.shared_sections)]

    def is_documented(key: str) -> bool:
        names = (key, dialect.documented(key))
        argument = engine_argument(key, written, dialect)
        if (argument is not None and argument.is_known) or key in dialect.undocumented:
            return True
        is_free = any(name == free or name.startswith(f"{free}.") for name in names for free in free_sections)
        return is_free or any(name in specs or name in sections for name in names)

    def describe(key: str) -> UnknownKey:
        argument = engine_argument(key, written, dialect)
        of_engine = () if argument is None else argument.closest_keys
        candidates = (*of_engine, *_corrected_name_lists(key, dialect), *closest_keys(key, legal))
        near = [name for name in candidates if not key.startswith(f"{name}.")]
        if _is_known(key, known):
            return UnknownKey(key, written.sources[key], UnknownReason.UNDOCUMENTED, ())
        return UnknownKey(
            key, written.sources[key], UnknownReason.TYPO if near else UnknownReason.NOWHERE, tuple(near[:1])
        )

    return [describe(key) for key in written.leaves() if key not in RUN_KEYS and not is_documented(key)]


def _is_known(key: str, names: frozenset[str]) -> bool:
    """Whether a key is listed, lies in a listed section, or is a section with listed keys."""
    in_section = key in names or any(section in names for section in _sections_of(key))
    return in_section or any(name.startswith(f"{key}.") for name in names)


def _corrected_name_lists(key: str, dialect: Dialect) -> Iterator[str]:
    """Yield a list of names with its misspelt names corrected, if each is close to a legal name."""
    section, _, names = key.rpartition(".")
    legal = dialect.name_lists.get(section, ())
    corrected = [name if name in legal else next(iter(closest_keys(name, legal)), name) for name in names.split(",")]
    if set(corrected) <= set(legal):
        yield f"{section}.{','.join(corrected)}"


def illegal_values(written: MergedConfig, dialect: Dialect) -> Iterator[ConfigProblem]:
    """Yield values that their keys do not accept, unresolved interpolations included, and sections that are none."""
    specs = dialect.specs()
    sections = {section for key in specs for section in _sections_of(key)} - set(specs)
    for key, spec in _set_keys(written, dialect):
        value, source = written.value(key), written.sources[key]
        if not spec.value_type.accepts(value):
            message = f"{key} = {format_value(value)} ({source}): must be {spec.value_type.description}"
            yield ConfigProblem(key, value, source, message, f"{key}: {spec.effect}")
    for key, source in written.sources.items():
        value = written.value(key) if key in sections else {}
        if not isinstance(value, Mapping):
            message = f"{key} = {format_value(value)} ({source}): must be a section"
            yield ConfigProblem(key, value, source, message, "set the keys in it, or leave it out")


def unsupported_keys(written: MergedConfig, dialect: Dialect) -> Iterator[ConfigProblem]:
    """Yield the keys of a configuration with values that require a missing capability."""
    for key, spec in _set_keys(written, dialect):
        value, source = written.value(key), written.sources[key]
        if _is_unsupported(written, dialect, spec, value):
            message = f"{key} = {format_value(value)} ({source}) is not supported yet: requires {spec.requires}"
            yield ConfigProblem(key, value, source, message, _alternative(spec))


def ineffective_keys(written: MergedConfig, dialect: Dialect) -> Iterator[str]:
    """Yield a remark for each key that differs from its default and has no effect beside the other keys."""
    specs = dialect.specs()
    for key, spec in _set_keys(written, dialect):
        condition = unmet_condition(spec, specs, written.value) if key in specs else None
        if condition is not None and written.value(key) != written.interpolated(spec.default):
            other, needed = condition
            setting = f"{key} = {format_value(written.value(key))} ({written.sources[key]})"
            actual = format_value(written.value(other))
            yield f"{setting} has no effect: {other} is {actual}, not {describe_value(needed)}"


def unsupported_defaults(written: MergedConfig, dialect: Dialect) -> Iterator[str]:
    """Yield a remark for each key that is not set and whose default requires a missing capability."""
    for key, spec in dialect.specs().items():
        if spec.requires and key not in written.sources and _is_unsupported(written, dialect, spec, written.value(key)):
            yield f"{key} = {format_value(written.value(key))} is not supported yet: requires {spec.requires}"


def _set_keys(written: MergedConfig, dialect: Dialect) -> Iterator[tuple[str, KeySpec]]:
    """Yield each documented key that the configuration sets, as it is written there."""
    specs = dialect.specs()
    for key in written.sources:
        spec = specs.get(key) or specs.get(dialect.documented(key))
        if spec is not None:
            yield key, spec


def _is_unsupported(written: MergedConfig, dialect: Dialect, spec: KeySpec, value: object) -> bool:
    if spec.requires is None or not is_effective(spec, dialect.specs(), written.value):
        return False
    return not any(_matches(value, written.interpolated(noop)) for noop in spec.noop)


def _matches(value: object, noop: Any) -> bool:
    if isinstance(noop, ValueType):
        return noop.accepts(value)
    # 0 equals 0.0, but not false
    return bool(value == noop) and isinstance(value, bool) == isinstance(noop, bool)


def _alternative(spec: KeySpec) -> str:
    if not spec.noop:
        return "leave the key out"
    return f"leave the key out, or set it to {' or '.join(map(describe_value, spec.noop))}"


def describe_value(value: Any) -> str:
    """Return a value, or the description of a `ValueType`, for messages."""
    return value.description if isinstance(value, ValueType) else format_value(value)


def _sections_of(key: str) -> Iterator[str]:
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def _keys_of_similar_sections(keys: Iterable[str], shared_sections: Mapping[str, str]) -> Iterator[str]:
    """Yield documented keys as they are written in other sections that take them, too."""
    for section, other in shared_sections.items():
        prefix = f"{other}." if other else ""
        yield from (f"{section}.{key.removeprefix(prefix)}" for key in keys if key.startswith(prefix))
