"""Problems of a foreign configuration: unknown keys, illegal values, and keys that require a missing capability."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quintet.config.dialects.composition.hydra_composition import RUN_KEYS
from quintet.config.dialects.conversion import ForeignValues
from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.ledger import KeySpec, is_effective, unmet_condition
from quintet.config.dialects.passthrough import engine_argument
from quintet.config.dialects.typos import closest_keys, slip_of
from quintet.config.dialects.value_types import SECTION, ValueType
from quintet.config.dotted import is_inside, sections_around
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value


class UnknownReason(StrEnum):
    """Why a key is unknown, as the end of a sentence with the name of the framework."""

    TYPO = "looks like a typo"
    UNDOCUMENTED = "exists in {framework} but is not documented in its reference"
    OTHER_RUNS = "is not read by runs of this kind"
    NOWHERE = "does not exist in {framework}"


@dataclass(frozen=True, slots=True)
class UnknownKey:
    """A key that is missing in the dialect's references."""

    key: str
    source: str
    reason: UnknownReason
    framework: str
    suggestion: str | None = None

    def __str__(self) -> str:
        suggestion = f"; did you mean {self.suggestion}?" if self.suggestion else ""
        return f"{self.key} ({self.source}) {self.reason.format(framework=self.framework)}{suggestion}"


def unknown_keys(values: ForeignValues, known: frozenset[str], of_other_runs: Collection[str] = ()) -> list[UnknownKey]:
    """Return the undocumented keys of a configuration.

    `known` are those that the framework's releases have, and `of_other_runs` those of any kind of its runs.
    """
    dialect, specs = values.dialect, values.dialect.specs()
    sections = {section for key in specs for section in sections_around(key)}
    free_sections = {key for key, spec in specs.items() if spec.value_type is SECTION}
    legal = [*specs, *sections, *keys_of_similar_sections(specs, dialect.shared_sections)]
    waiting = {key for key, spec in specs.items() if spec.state == "pending"}

    def is_documented(key: str) -> bool:
        names = (key, dialect.documented(key))
        argument = engine_argument(key, values)
        if (argument is not None and argument.is_known) or key in dialect.undocumented:
            return True
        if key.endswith("._target_") and str(values[key]).startswith((f"{dialect.name}.", "verl.")):
            return True  # the framework's own class of the section
        is_free = any(is_inside(name, section) for name in names for section in free_sections)
        return is_free or any(name in specs or name in sections for name in names)

    def describe(key: str) -> UnknownKey:
        if key in of_other_runs:
            return UnknownKey(key, values.source(key), UnknownReason.OTHER_RUNS, dialect.name)
        if _is_known(key, known) and (_is_listed(key, known) or slip_of(key, legal) is None):
            return UnknownKey(key, values.source(key), UnknownReason.UNDOCUMENTED, dialect.name)
        argument = engine_argument(key, values)
        of_engine = () if argument is None else argument.closest_keys
        candidates = (*of_engine, *_corrected_name_lists(key, dialect), *closest_keys(key, legal, rare=waiting))
        suggestion = next((name for name in candidates if not key.startswith(f"{name}.")), None)
        reason = UnknownReason.TYPO if suggestion else UnknownReason.NOWHERE
        return UnknownKey(key, values.source(key), reason, dialect.name, suggestion)

    return [describe(key) for key in values.merged.leaves() if key not in RUN_KEYS and not is_documented(key)]


def _is_known(key: str, names: frozenset[str]) -> bool:
    """Whether a key is listed, lies in a listed section, or is a section with listed keys."""
    return any(section in names for section in sections_around(key)) or _is_listed(key, names)


def _is_listed(key: str, names: frozenset[str]) -> bool:
    return key in names or any(name.startswith(f"{key}.") for name in names)


def _corrected_name_lists(key: str, dialect: Dialect) -> Iterator[str]:
    """Yield a list of names with its misspelt names corrected, if each is close to a legal name."""
    section, _, names = key.rpartition(".")
    legal = dialect.name_lists.get(section, ())
    corrected = [name if name in legal else next(iter(closest_keys(name, legal)), name) for name in names.split(",")]
    if set(corrected) <= set(legal):
        yield f"{section}.{','.join(corrected)}"


def illegal_values(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield values that their keys do not accept, unresolved interpolations included, and sections that are none.

    Frameworks do not check the choice of a key without an effect, such as the estimator of a KL loss that is not used.
    """
    specs = values.dialect.specs()
    sections = {section for key in specs for section in sections_around(key)} - set(specs)
    for key, spec in _documented_keys(values):
        is_used = not spec.value_type.choices or key not in specs or is_effective(spec, specs, values.__getitem__)
        if is_used and not spec.value_type.accepts(values[key]):
            yield values.problem(key, f"must be {spec.value_type.description}", f"{key}: {spec.effect}")
    for key in values.merged.sources:
        if key in sections and not isinstance(values[key], Mapping):
            yield values.problem(key, "must be a section", "leave it out, and set the keys in it")


def pending_keys(values: ForeignValues, unknown: Iterable[UnknownKey]) -> dict[str, ConfigProblem]:
    """Return a problem for each undocumented key that waits for a missing capability, as its simulator, policy or
    algorithm does."""
    problems = {}
    for key in unknown:
        if key.reason not in (UnknownReason.UNDOCUMENTED, UnknownReason.OTHER_RUNS):
            continue
        if (capability := values.dialect.waits_for(values.dialect, values.__getitem__, key.key)) is not None:
            message = f"{values.describe(key.key)} {capability.refusal()}"
            problems[key.key] = ConfigProblem(key.key, values[key.key], key.source, message, capability=capability)
    return problems


def unsupported_keys(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield the keys of a configuration with values that require a missing capability."""
    for key, spec in _documented_keys(values):
        if spec.requires is not None and _is_unsupported(values, spec, values[key]):
            message = f"{values.describe(key)} {spec.requires.refusal()}"
            hint = _alternatives(key, spec)
            yield ConfigProblem(key, values[key], values.source(key), message, hint, capability=spec.requires)


def ineffective_keys(values: ForeignValues) -> Iterator[str]:
    """Yield a remark for each key that differs from its default and has no effect beside the other keys."""
    specs = values.dialect.specs()
    for key, spec in _documented_keys(values):
        condition = unmet_condition(spec, specs, values.__getitem__) if key in specs else None
        if condition is not None and values[key] != values.merged.interpolated(spec.default):
            other, needed = condition
            reason = f"{other} is {format_value(values[other])}, not {describe_value(needed)}"
            yield f"{values.describe(key)} has no effect: {reason}"


def unsupported_defaults(values: ForeignValues) -> Iterator[tuple[str, str]]:
    """Yield each key that is not set and whose default requires a missing capability, with a remark."""
    for key, spec in values.dialect.specs().items():
        if spec.requires and not values.is_set(key) and _is_unsupported(values, spec, values[key]):
            yield key, f"{key} = {format_value(values[key])} {spec.requires.refusal()}"


def _documented_keys(values: ForeignValues) -> Iterator[tuple[str, KeySpec]]:
    """Yield each documented key that the configuration sets, as it is written there; a free-form section once."""
    yielded = set()
    for key in values.merged.sources:
        for name in (key, *sections_around(key)):
            spec = values.dialect.spec(name)
            if spec is not None and name not in yielded and (name == key or spec.value_type is SECTION):
                yielded.add(name)
                yield name, spec


def _is_unsupported(values: ForeignValues, spec: KeySpec, value: object) -> bool:
    if spec.requires is None or not is_effective(spec, values.dialect.specs(), values.__getitem__):
        return False
    return not any(_matches(value, values.merged.interpolated(noop)) for noop in spec.noop)


def _matches(value: object, noop: Any) -> bool:
    if isinstance(noop, ValueType):
        return noop.accepts(value)
    # 0 equals 0.0, but not false
    return bool(value == noop) and isinstance(value, bool) == isinstance(noop, bool)


def _alternatives(key: str, spec: KeySpec) -> str:
    """Return what a key that requires a missing capability can be instead."""
    types = [value for value in spec.noop if isinstance(value, ValueType)]
    values = [value for value in spec.noop if value not in types] + [
        choice for value_type in types for choice in value_type.choices
    ]
    changes = dict.fromkeys(f"{key}={value if isinstance(value, str) else format_value(value)}" for value in values)
    return ", or ".join(
        [
            "leave it out",
            *changes,
            *(f"set it to {value_type.description}" for value_type in types if not value_type.choices),
        ]
    )


def describe_value(value: Any) -> str:
    """Return a value, or the description of a `ValueType`, for messages."""
    return value.description if isinstance(value, ValueType) else format_value(value)


def keys_of_similar_sections(keys: Iterable[str], shared_sections: Mapping[str, str]) -> Iterator[str]:
    """Yield documented keys as they are written in other sections that take them, too."""
    for section, other in shared_sections.items():
        prefix = f"{other}." if other else ""
        yield from (f"{section}.{key.removeprefix(prefix)}" for key in keys if key.startswith(prefix))
