"""What it takes to define a metric, and to look one up. The definitions are in `metrics`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quintet.errors import nearest

__all__ = ["Metric", "Range", "all_metrics", "define", "describe", "healthy_text", "markdown_table", "reproducible"]

Range = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Metric:
    """One defined metric.

    >>> Metric("val/{world}/success_rate", "Games won", "share", "rises", "mean").matches("val/sokoban/success_rate")
    True
    """

    name: str
    """The full name, with `{placeholder}` for a component that varies."""
    meaning: str
    unit: str
    healthy: Range | str
    """What a run that learns shows: bounds, None for an open side, or a sentence."""
    aggregation: str
    """What is averaged, summed or picked to give the number of one step."""
    clock: bool = False
    """Depends on the machine and its load: two identical runs differ in it."""

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric, its placeholders filled with anything but `/`."""
        return self.name == name or ("{" in self.name and re.fullmatch(self._pattern(), name) is not None)

    def _pattern(self) -> str:
        part = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(self.name))
        return re.sub(r"\\{\w+\\\*\\}", ".+", part)


_DEFINED: dict[str, Metric] = {}


def define(
    name: str, meaning: str, unit: str, healthy: Range | str, aggregation: str, *, clock: bool = False
) -> Metric:
    """Add a metric, so that it may be logged.

    Raises:
        ValueError: the name is defined already.
    """
    if name in _DEFINED:
        raise ValueError(f"metric {name!r} is defined twice")
    metric = _DEFINED[name] = Metric(name, meaning, unit, healthy, aggregation, clock)
    return metric


def describe(name: str) -> Metric:
    """The definition behind a metric's name.

    Raises:
        KeyError: no such metric; the message names the nearest one.
    """
    if name in _DEFINED:
        return _DEFINED[name]
    for metric in _DEFINED.values():
        if metric.matches(name):
            return metric
    close = nearest(name, _DEFINED)
    raise KeyError(f"unknown metric {name!r}" + (f", did you mean {close!r}?" if close else ""))


def all_metrics() -> Iterator[Metric]:
    """Every defined metric, by name."""
    return iter(sorted(_DEFINED.values(), key=lambda metric: metric.name))


def reproducible(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line of `metrics.jsonl` without what depends on the clock or the machine's load.

    Two runs of the same configuration on one machine agree in the rest to the last bit.
    """
    return {
        key: value
        for key, value in line.items()
        if key == "step" or (key != "time_seconds" and not describe(key).clock)
    }


def healthy_text(healthy: Range | str) -> str:
    """A healthy range in words.

    >>> healthy_text((0.0, 0.1)), healthy_text((None, 1.0)), healthy_text("rises")
    ('0 to 0.1', 'at most 1', 'rises')
    """
    if isinstance(healthy, str):
        return healthy
    low, high = healthy
    if low is None:
        return "any" if high is None else f"at most {high:g}"
    if high is None:
        return f"at least {low:g}"
    return f"{low:g}" if math.isclose(low, high) else f"{low:g} to {high:g}"


def markdown_table() -> str:
    """Every metric as one Markdown table, for the documentation."""
    rows = ["| metric | meaning | unit | healthy | how it is computed |", "| --- | --- | --- | --- | --- |"]
    for metric in all_metrics():
        cells = (f"`{metric.name}`", metric.meaning, metric.unit, healthy_text(metric.healthy), metric.aggregation)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"
