"""Types of foreign keys' values: each describes itself in error messages and checks a value as YAML reads it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_FUNCTION_ADDRESS = re.compile(r"[^:\n]+:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class ValueType:
    """A set of valid values.

    >>> integer(minimum=1).description
    'an integer ≥ 1'
    """

    description: str
    """Ends the message "must be …"."""
    accepts: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()
    """Valid values of an enumeration."""


def integer(*, minimum: int | None = None, maximum: int | None = None) -> ValueType:
    """An integer in a closed range; neither true nor 8.0 is an integer."""

    def accepts(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and _in_range(value, minimum, maximum)

    return ValueType(" ".join(["an integer", *_describe_range(minimum, maximum)]), accepts)


def number(
    *,
    above: float | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> ValueType:
    """A finite number in a range that excludes `above` and `below` and includes `minimum` and `maximum`."""

    def accepts(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        in_range = _in_range(value, minimum, maximum)
        return in_range and (above is None or value > above) and (below is None or value < below)

    bounds = [f"> {above:g}"] if above is not None else []
    bounds += _describe_range(minimum, maximum)
    bounds += [f"< {below:g}"] if below is not None else []
    return ValueType(" ".join(["a number", *([" and ".join(bounds)] if bounds else [])]), accepts)


def one_of(*choices: Any) -> ValueType:
    """An enumeration; text is case-sensitive, and 1 is not true."""
    description = "one of " + ", ".join(str(choice) for choice in choices)
    return ValueType(
        description, lambda value: any(value == choice and type(value) is type(choice) for choice in choices), choices
    )


def optional(inner: ValueType) -> ValueType:
    """A value of the inner type, or null."""
    return ValueType(f"{inner.description} or null", lambda value: value is None or inner.accepts(value), inner.choices)


def either(*options: ValueType) -> ValueType:
    """A value of any of the given types."""
    choices = tuple(choice for option in options for choice in option.choices)
    description = " or ".join(option.description for option in options)
    return ValueType(description, lambda value: any(option.accepts(value) for option in options), choices)


def list_of(item: ValueType) -> ValueType:
    """A list, possibly empty, of values of the given type."""

    def accepts(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(map(item.accepts, value))

    return ValueType(f"a list, each {item.description}", accepts, item.choices)


def is_function_address(value: object) -> bool:
    """Whether a value is the address of a user's function, such as `rules.py:score` or `package.module:score`."""
    return isinstance(value, str) and _FUNCTION_ADDRESS.fullmatch(value) is not None


def _in_range(value: float, minimum: float | None, maximum: float | None) -> bool:
    return (minimum is None or value >= minimum) and (maximum is None or value <= maximum)


def _describe_range(minimum: float | None, maximum: float | None) -> list[str]:
    bounds = [f"≥ {minimum:g}"] if minimum is not None else []
    bounds += [f"≤ {maximum:g}"] if maximum is not None else []
    return [" and ".join(bounds)] if bounds else []


BOOLEAN = ValueType("true or false", lambda value: isinstance(value, bool))
POSITIVE = integer(minimum=1)
POSITIVE_NUMBER = number(above=0)
TEXT = ValueType("text", lambda value: isinstance(value, str) and value != "")
FUNCTION = ValueType("a custom function, file.py:function", is_function_address)
SECTION = ValueType("a free-form section", lambda value: value is None or isinstance(value, Mapping))
"""A free-form section, whose entries are checked against the component that receives them."""
ANYTHING = ValueType("anything", lambda value: True)
