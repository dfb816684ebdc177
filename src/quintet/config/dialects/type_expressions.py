"""Parser of the type expressions in key files: `int >= 1`, `one of a | b or null`, `list of (text or section)`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from quintet.config.dialects.value_types import (
    ANYTHING,
    BOOLEAN,
    FUNCTION,
    SECTION,
    TEXT,
    ValueType,
    either,
    integer,
    list_of,
    number,
    one_of,
    optional,
)

_SIMPLE = {"anything": ANYTHING, "bool": BOOLEAN, "function": FUNCTION, "section": SECTION, "text": TEXT}
_BOUND = re.compile(r"(>=|<=|>|<) (\S+)")
_BOUND_NAMES = {">": "above", ">=": "minimum", "<=": "maximum", "<": "below"}


def parse_type(expression: str, named: Mapping[str, ValueType]) -> ValueType:
    """Return the type that an expression describes; `named` are types that it may refer to by name.

    Grammar: `TYPE or TYPE`, `TYPE or null`, `list of TYPE`, `one of VALUE | VALUE`, `int` and `number` with bounds
    such as `>= 1`, `text`, `bool`, `section`, `function`, `anything`, a name, and parentheses after `list of`.

    >>> parse_type("int >= 1 or null", {}).description
    'an integer ≥ 1 or null'

    Raises:
        ValueError: the expression has a name or a bound that does not exist.
    """
    alternatives = re.split(r" or (?![^(]*\))", expression)
    types = [_parse_alternative(text, named) for text in alternatives if text != "null"]
    combined = types[0] if len(types) == 1 else either(*types)
    return optional(combined) if "null" in alternatives else combined


def _parse_alternative(text: str, named: Mapping[str, ValueType]) -> ValueType:
    if text.startswith("list of "):
        return list_of(parse_type(text.removeprefix("list of ").strip("()"), named))
    if text.startswith("one of "):
        return one_of(*(_scalar(value) for value in text.removeprefix("one of ").split(" | ")))
    kind, _, bounds = text.partition(" ")
    limits: dict[str, Any] = {_BOUND_NAMES[sign]: _scalar(limit) for sign, limit in _BOUND.findall(bounds)}
    if kind == "int":
        return integer(**limits)
    if kind == "number":
        return number(**limits)
    matched = named.get(text) or _SIMPLE.get(text)
    if matched is None:
        raise ValueError(f"no type is called {text!r}")
    return matched


def _scalar(text: str) -> Any:
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
