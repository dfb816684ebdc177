"""Types of foreign keys' values: each describes itself in error messages and checks a value as YAML reads it.

Key files name them by expressions: `int >= 1`, `one of a | b or null`, `list of (text or section)`.
"""

import operator
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

COMPARISONS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = {
    ">": (">", operator.gt),
    ">=": ("≥", operator.ge),
    "<=": ("≤", operator.le),
    "<": ("<", operator.lt),
}
_BOUND = re.compile(r"(>=|<=|>|<) (\S+)")
_FUNCTION_ADDRESS = re.compile(r"[^:\n]+:[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class ValueType:
    """A set of valid values.

    >>> parse_type("int >= 1").description
    'an integer ≥ 1'
    """

    description: str
    """Ends the message "must be …"."""
    accepts: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()
    """Valid values of an enumeration."""


def _is_integer(value: Any) -> bool:
    """Whether a value is an integer; neither true nor 8.0 is one."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Whether a value is a number that a float can have."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -sys.float_info.max <= value <= sys.float_info.max


def _bounded(description: str, is_kind: Callable[[Any], bool], bounds: str) -> ValueType:
    """A number with bounds such as `>= 0 < 1`."""
    limits = [(*COMPARISONS[sign], _scalar(limit)) for sign, limit in _BOUND.findall(bounds)]

    def accepts(value: Any) -> bool:
        return is_kind(value) and all(compare(value, limit) for _, compare, limit in limits)

    described = " and ".join(f"{sign} {limit:g}" for sign, _, limit in limits)
    return ValueType(f"{description} {described}".strip(), accepts)


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


def pair_of(item: ValueType) -> ValueType:
    """A list of two values of the given type of integers."""
    items = list_of(item)
    description = f"a list of two {item.description.replace('an integer', 'integers')}"
    return ValueType(description, lambda value: items.accepts(value) and len(value) == 2)


def is_function_address(value: object) -> bool:
    """Whether a value is the address of a user's function, such as `rules.py:score` or `package.module:score`."""
    return isinstance(value, str) and _FUNCTION_ADDRESS.fullmatch(value) is not None


BOOLEAN = ValueType("true or false", lambda value: isinstance(value, bool))
TEXT = ValueType("text", lambda value: isinstance(value, str) and value != "")
FUNCTION = ValueType("a custom function, file.py:function", is_function_address)
SECTION = ValueType("a free-form section", lambda value: value is None or isinstance(value, Mapping))
"""A free-form section, whose entries are checked against the component that receives them."""
ANYTHING = ValueType("anything", lambda value: True)
_SIMPLE = {"anything": ANYTHING, "bool": BOOLEAN, "function": FUNCTION, "section": SECTION, "text": TEXT}


def parse_type(expression: str, named: Mapping[str, ValueType] | None = None) -> ValueType:
    """Return the type that an expression describes; `named` are types that it may refer to by name.

    Grammar: `TYPE or TYPE`, `TYPE or null`, `list of TYPE`, `pair of int`, `one of VALUE | VALUE`, `int` and `number`
    with bounds such as `>= 1`, `text`, `bool`, `section`, `function`, `anything`, a name, and parentheses after
    `list of`.

    >>> parse_type("int >= 1 or null").description
    'an integer ≥ 1 or null'

    Raises:
        ValueError: the expression has a name or a bound that does not exist.
    """
    alternatives = re.split(r" or (?![^(]*\))", expression)
    types = [_parse_alternative(text, named or {}) for text in alternatives if text != "null"]
    combined = types[0] if len(types) == 1 else either(*types)
    return optional(combined) if "null" in alternatives else combined


def _parse_alternative(text: str, named: Mapping[str, ValueType]) -> ValueType:
    if text.startswith("list of "):
        return list_of(parse_type(text.removeprefix("list of ").strip("()"), named))
    if text.startswith("pair of "):
        return pair_of(parse_type(text.removeprefix("pair of "), named))
    if text.startswith("one of "):
        return one_of(*(_scalar(value) for value in text.removeprefix("one of ").split(" | ")))
    kind, _, bounds = text.partition(" ")
    if kind == "int":
        return _bounded("an integer", _is_integer, bounds)
    if kind == "number":
        return _bounded("a number", _is_number, bounds)
    matched = named.get(text) or _SIMPLE.get(text)
    if matched is None:
        raise ValueError(f"no type is called {text!r}")
    return matched


@cache
def _scalar(text: str) -> Any:
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506 - both are safe


POSITIVE_NUMBER = parse_type("number > 0")
