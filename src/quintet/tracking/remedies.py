"""What to try when a metric is unhealthy, from `remedies.yaml`: a sentence, and the keys to change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from quintet.package_files import read_yaml

Value = str | int | float | bool | None
CHANGE = re.compile(r"(?P<operator>\*|>=|<=)(?P<number>[-+.\de]+)(?: or (?P<otherwise>[-+.\de]+))?")
MULTIPLES = {0.2: "a fifth of {key}", 0.5: "half of {key}", 2.0: "twice {key}"}


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something to try."""

    text: str
    changes: Mapping[str, Value]
    """Native keys and what becomes of their values; see the head of `remedies.yaml`."""

    def __str__(self) -> str:
        """Return the remedy for a run whose values are not known."""
        return ": ".join([self.text, *filter(None, [", ".join(map(_describe, self.changes, self.changes.values()))])])


@cache
def remedies() -> Mapping[str, Remedy]:
    """Return all remedies by name."""
    return {name: Remedy(entry["try"], entry.get("set", {})) for name, entry in read_yaml(__file__).items()}


def changed_value(change: Value, present: Value) -> Value:
    """Return the value that a change gives a key; the present one if the change does not apply to it.

    >>> changed_value("*0.5", 8), changed_value("*3 or 0.001", 0.0), changed_value(">=4", 8), changed_value(True, False)
    (4, 0.001, 8, True)
    """
    match = CHANGE.fullmatch(change) if isinstance(change, str) else None
    if match is None:
        return change
    number, is_number = float(match["number"]), isinstance(present, int | float) and not isinstance(present, bool)
    if match["operator"] == "*":
        if is_number and present:
            return _rounded(float(present) * number, is_integer=isinstance(present, int))
        otherwise = match["otherwise"]
        return present if otherwise is None else int(otherwise) if otherwise.isdigit() else float(otherwise)
    if present is None or not is_number:
        return present
    bound = _rounded(number, is_integer=isinstance(present, int))
    return max(present, bound) if match["operator"] == ">=" else min(present, bound)


def _rounded(number: float, *, is_integer: bool) -> int | float:
    """Return a number with three significant digits; a whole one stays at least 1."""
    return max(1, round(number)) if is_integer else float(f"{number:.3g}")


def _describe(key: str, change: Value) -> str:
    """Describe a change of a key whose value is not known.

    >>> _describe("training.epochs", "<=1"), _describe("training.mini_batches", "*0.5")
    ('training.epochs at most 1', 'half of training.mini_batches')
    """
    match = CHANGE.fullmatch(change) if isinstance(change, str) else None
    if match is None:
        return f"{key}={str(change).lower() if isinstance(change, bool) else change}"
    if match["operator"] != "*":
        return f"{key} at {'least' if match['operator'] == '>=' else 'most'} {match['number']}"
    number = float(match["number"])
    if number == 1.0:
        return f"{key}={match['otherwise']}"
    multiple = MULTIPLES.get(number, "{number:g} times {key}").format(key=key, number=number)
    return multiple if match["otherwise"] is None else f"{multiple}, or {key}={match['otherwise']} if it has none"
