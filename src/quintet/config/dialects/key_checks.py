"""Problems of a foreign configuration: illegal values, and keys that require a missing capability."""

from collections.abc import Iterator, Mapping
from typing import Any

from quintet.config.dialects.conversion import ForeignValues
from quintet.config.dialects.ledger import KeySpec, is_effective, unmet_condition
from quintet.config.dialects.value_types import SECTION, ValueType
from quintet.config.dotted import sections_around
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value


def illegal_values(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield values that their keys do not accept, unresolved interpolations included, and sections that are none.

    Frameworks do not check the choice or number of a key without an effect, such as the estimator of a KL loss that is
    not used.
    """
    specs = values.dialect.specs()
    sections = {section for key in specs for section in sections_around(key)} - set(specs)
    for key, spec in _documented_keys(values):
        if spec.value_type.accepts(values[key]):
            continue
        may_be_any = spec.value_type.choices or isinstance(values[key], int | float)
        if not may_be_any or key not in specs or is_effective(spec, specs, values.__getitem__):
            yield values.problem(key, f"must be {spec.value_type.description}", f"{key}: {spec.effect}")
    for key in values.merged.sources:
        if key in sections and not isinstance(values[key], Mapping):
            yield values.problem(key, "must be a section", "leave it out, and set the keys in it")


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
