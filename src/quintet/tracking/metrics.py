"""Metric definitions: meaning, unit, healthy range and computation of every logged name, from `metrics.yaml`.

Names follow verl. A metric without a definition cannot be logged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

import yaml

from quintet.errors import nearest

Range = tuple[float | None, float | None]
Side = Literal["high", "low"]
"""A value that is too high, or too low; of a metric that should rise, one that does not."""


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric definition.

    >>> Metric("val/{env}/success_rate", "Episodes won", "share", "rises", "mean").matches("val/sokoban/success_rate")
    True
    """

    name: str
    """Full name, with `{placeholder}` for a variable path component and `{placeholder*}` for several."""
    meaning: str
    unit: str
    healthy: Range | str
    """Bounds in a healthy run, None for an open side; or a sentence."""
    aggregation: str
    """How the value of one step is computed."""
    clock: bool = False
    """True if it depends on the machine and its load, so that two identical runs differ."""
    part_of: str | None = None
    """Timing of the phase that contains this phase; None for timings that no other contains."""
    causes: Mapping[Side, tuple[str, ...]] = field(default_factory=dict)
    """Usual causes of an unhealthy value."""
    remedies: Mapping[Side, tuple[str, ...]] = field(default_factory=dict)
    """Names of what to try against it, the first first; see `remedies.py`."""
    related: tuple[str, ...] = ()
    """Metrics to look at as well."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Names in other frameworks where they differ; names not listed are verl's or of Quintet alone."""

    def matches(self, name: str) -> bool:
        """Return whether `name` is this metric with its placeholders filled in."""
        return self.name == name or ("{" in self.name and re.fullmatch(self._pattern(), name) is not None)

    def _pattern(self) -> str:
        part = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(self.name))
        return re.sub(r"\\{\w+\\\*\\}", ".+", part)


_DEFINITIONS: dict[str, Metric] = {}


def define(
    name: str,
    meaning: str,
    unit: str,
    healthy: Range | str,
    aggregation: str,
    **details: Any,
) -> Metric:
    """Define a metric so that it can be logged; `details` are further fields.

    Raises:
        ValueError: `name` is already defined.
    """
    if name in _DEFINITIONS:
        raise ValueError(f"metric {name!r} is defined twice")
    metric = _DEFINITIONS[name] = Metric(name, meaning, unit, healthy, aggregation, **details)
    return metric


def describe(name: str) -> Metric:
    """Return the definition of the metric `name`.

    Raises:
        KeyError: There is no such metric; the message suggests the nearest name.
    """
    if name in _DEFINITIONS:
        return _DEFINITIONS[name]
    for metric in _DEFINITIONS.values():
        if metric.matches(name):
            return metric
    close = nearest(name, _DEFINITIONS)
    raise KeyError(f"unknown metric {name!r}" + (f", did you mean {close!r}?" if close else ""))


def all_metrics() -> Iterator[Metric]:
    """Yield all metric definitions, sorted by name."""
    return iter(sorted(_DEFINITIONS.values(), key=lambda metric: metric.name))


def ordered_names() -> list[str]:
    """Return the names of all metrics as `metrics.yaml` lists them: phases in the order in which a step has them."""
    return list(_DEFINITIONS)


def without_timing(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of `metrics.jsonl` without the metrics that depend on the clock.

    Two runs of the same configuration on one machine agree in the rest bit for bit.
    """
    return {
        key: value
        for key, value in line.items()
        if key == "step" or (key != "time_seconds" and not describe(key).clock)
    }


def healthy_text(healthy: Range | str) -> str:
    """Format a healthy range as text.

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
    """Return all metric definitions as a Markdown table."""
    rows = ["| metric | meaning | unit | healthy | how it is computed |", "| --- | --- | --- | --- | --- |"]
    for metric in all_metrics():
        cells = (f"`{metric.name}`", metric.meaning, metric.unit, healthy_text(metric.healthy), metric.aggregation)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _load_definitions() -> None:
    text = (resources.files("quintet.tracking") / "metrics.yaml").read_text(encoding="utf-8")
    for entry in yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # noqa: S506 - both are safe
        healthy = tuple(entry["healthy"]) if isinstance(entry["healthy"], list) else entry["healthy"]
        details = {name: entry[name] for name in ("clock", "part_of", "elsewhere") if name in entry}
        details |= {name: _by_side(entry[name]) for name in ("causes", "remedies") if name in entry}
        details["related"] = tuple(entry.get("related", ()))
        if entry.get("spread"):
            _define_spread(entry["name"], entry["meaning"], entry["unit"], healthy, entry["over"], details)
        else:
            define(entry["name"], entry["meaning"], entry["unit"], healthy, entry["computed"], **details)


def _by_side(texts: Mapping[Side, list[str]]) -> dict[Side, tuple[str, ...]]:
    return {side: tuple(names) for side, names in texts.items()}


def _define_spread(
    name: str, meaning: str, unit: str, healthy: Range | str, over: str, details: Mapping[str, Any]
) -> None:
    """Define mean, maximum and minimum; the details describe the mean."""
    same = "same order of magnitude as the mean"
    define(f"{name}/mean", f"Mean {meaning}", unit, healthy, f"mean over {over}", **details)
    for part, word in (("max", "Maximum"), ("min", "Minimum")):
        related = (f"{name}/mean",)
        define(f"{name}/{part}", f"{word} {meaning}", unit, same, f"{word.lower()} over {over}", related=related)


_load_definitions()
