"""Changes of a parameter's value in `${NAME#pattern}`, `${NAME/old/new}` and `${NAME:first:count}`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

Value = TypeVar("Value", str, tuple[str, ...])

MAX_MATCHED = 1 << 12
"""Characters of a value that a pattern is matched with, at most."""


def changed(value: str, operation: str, argument: str) -> str | None:
    """Return a value after an operation: `,,`, `:`, `/`, `//`, `#`, `##`, `%` or `%%`; None if it is not supported."""
    match operation:
        case ",,":
            return value.lower() if not argument else None
        case ":":
            return part(value, argument)
        case "/" | "//":
            return _replaced(value, argument, -1 if operation == "//" else 1)
        case "#" | "##" | "%" | "%%":
            return _without(value, operation, argument)
    return None


def part(value: Value, argument: str) -> Value | None:
    """Return the part of a text or an array that `first` or `first:count` selects."""
    bounds = re.fullmatch(r"\s*(\d{1,9})\s*(?::\s*(\d{1,9})\s*)?", argument)
    if bounds is None:
        return None
    first = int(bounds[1])
    return value[first : first + int(bounds[2]) if bounds[2] else None]


def _replaced(value: str, argument: str, count: int) -> str | None:
    old, *rest = re.split(r"(?<!\\)/", argument, maxsplit=1)
    old, new = old.replace("\\/", "/"), "".join(rest)
    if not old or re.search(r"[*?\[\\]", old) or "\\" in new or old[0] in "#%" or len(value) * len(new) > 1 << 16:
        return None
    return value.replace(old, new, count)


def _without(value: str, operation: str, pattern: str) -> str | None:
    """Return a value without its shortest or, if the sign is doubled, longest prefix or suffix that matches."""
    if len(value) > MAX_MATCHED or "\\" in pattern:
        return None
    lengths: Sequence[int] = range(len(value) + 1)
    for length in lengths if len(operation) == 1 else lengths[::-1]:
        end = len(value) - length
        if operation[0] == "#" and fnmatchcase(value[:length], pattern):
            return value[length:]
        if operation[0] == "%" and fnmatchcase(value[end:], pattern):
            return value[:end]
    return value
