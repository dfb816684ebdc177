"""What a key takes: a type with its range, in words and as a check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "ANYTHING",
    "BOOLEAN",
    "COUNT",
    "FREE",
    "INTEGER",
    "NUMBER",
    "POSITIVE",
    "POSITIVE_NUMBER",
    "SHARE",
    "TEXT",
    "TEXTS",
    "Takes",
    "choice",
    "either",
    "integer",
    "list_of",
    "number",
    "optional",
]


@dataclass(frozen=True, slots=True)
class Takes:
    """`words` says it to people, `accepts` checks a value as YAML gives it, `legal` lists the words of a choice."""

    words: str
    accepts: Callable[[Any], bool]
    legal: tuple[Any, ...] = ()


def integer(*, least: int | None = None, most: int | None = None) -> Takes:
    """A whole number in a closed range; true and false aren't numbers, 8.0 isn't whole."""

    def accepts(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and _inside(value, least, most)

    return Takes(" ".join(["an integer", *_range(least, most)]), accepts)


def number(
    *, above: float | None = None, least: float | None = None, most: float | None = None, below: float | None = None
) -> Takes:
    """A finite number in a range, open at `above` and `below`, closed at `least` and `most`."""

    def accepts(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        inside = _inside(value, least, most)
        return inside and (above is None or value > above) and (below is None or value < below)

    bounds = [f"> {above:g}"] if above is not None else []
    bounds += _range(least, most)
    bounds += [f"< {below:g}"] if below is not None else []
    return Takes(" ".join(["a number", *([" and ".join(bounds)] if bounds else [])]), accepts)


def choice(*legal: Any) -> Takes:
    """One of the given values, letter by letter."""
    words = "one of " + ", ".join(str(value) for value in legal)
    return Takes(words, lambda value: any(value == one and type(value) is type(one) for one in legal), legal)


def optional(takes: Takes) -> Takes:
    """That, or null."""
    return Takes(f"{takes.words} or null", lambda value: value is None or takes.accepts(value), takes.legal)


def either(*options: Takes) -> Takes:
    """Any of these."""
    legal = tuple(value for option in options for value in option.legal)
    words = " or ".join(option.words for option in options)
    return Takes(words, lambda value: any(option.accepts(value) for option in options), legal)


def list_of(item: Takes) -> Takes:
    """A list of them, perhaps empty."""

    def accepts(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(map(item.accepts, value))

    return Takes(f"a list, each {item.words}", accepts, item.legal)


def _inside(value: float, least: float | None, most: float | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


def _range(least: float | None, most: float | None) -> list[str]:
    bounds = [f"≥ {least:g}"] if least is not None else []
    bounds += [f"≤ {most:g}"] if most is not None else []
    return [" and ".join(bounds)] if bounds else []


BOOLEAN = Takes("true or false", lambda value: isinstance(value, bool))
INTEGER = integer()
COUNT = integer(least=0)
POSITIVE = integer(least=1)
NUMBER = number()
POSITIVE_NUMBER = number(above=0)
SHARE = number(least=0, most=1)
TEXT = Takes("text", lambda value: isinstance(value, str) and value != "")
TEXTS = either(TEXT, list_of(TEXT))
FREE = Takes("a section of its own", lambda value: value is None or isinstance(value, Mapping))
"""Free-form: checked against what it feeds."""
ANYTHING = Takes("anything", lambda value: True)
