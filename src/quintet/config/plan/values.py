"""A native key by its dotted name: its value, where that came from, and the same run with another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quintet.config.faults import Fault, source_of
from quintet.config.keys import show

if TYPE_CHECKING:
    from quintet.config.compose import Composed
    from quintet.config.native import Experiment

__all__ = ["divisors", "fault", "nearest_number", "source", "told", "value", "with_value"]


def value(experiment: Experiment, key: str) -> Any:
    """The value of a dotted key; None where a section on the way is null."""
    place: Any = experiment
    for part in key.split("."):
        if place is not None:
            place = place[part] if isinstance(place, Mapping) else getattr(place, part)
    return place


def source(composed: Composed, key: str) -> str:
    """Where a value came from; in a foreign configuration, by which of its keys."""
    return source_of(key, composed.provenance)


def told(composed: Composed, key: str) -> str:
    """Key, value and source, as a message says them."""
    return f"{key} = {show(value(composed.experiment, key))} ({source(composed, key)})"


def fault(composed: Composed, key: str, problem: str, hint: str | None = None) -> Fault:
    """What is wrong with a key."""
    message = f"{told(composed, key)}: {problem}"
    return Fault(key, value(composed.experiment, key), source(composed, key), message, hint)


def with_value(experiment: Experiment, key: str, new: object) -> Experiment:
    """The same run with another value for one key; neither is checked."""
    changed: Experiment = _replaced(experiment, key.split("."), new)
    return changed


def _replaced(section: Any, parts: list[str], new: object) -> Any:
    name, *rest = parts
    return section.model_copy(update={name: _replaced(getattr(section, name), rest, new) if rest else new})


def divisors(number: int) -> list[int]:
    """Every divisor, ascending; of numbers beyond 10¹² only those that a search up to 10⁶ finds."""
    small = [n for n in range(1, min(int(number**0.5) + 1, 10**6) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest_number(wanted: int, legal: list[int] | Mapping[int, Any]) -> int | None:
    """The legal number closest to the wanted one; of two as close, the smaller."""
    return min(sorted(legal), key=lambda n: abs(n - wanted), default=None)
