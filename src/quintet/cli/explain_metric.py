"""`quintet explain METRIC`: documentation of a metric."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from quintet.errors import ConfigError
from quintet.tracking.metrics import Metric, Side, all_metrics, describe, healthy_text
from quintet.tracking.remedies import remedies

SIDES: Mapping[Side, str] = {"low": "too low", "high": "too high"}


def is_metric(name: str) -> bool:
    """Return whether a word is a metric, or meant as one: keys have no slash."""
    return "/" in name or any(metric.name.startswith(f"{name}/") for metric in all_metrics())


def run(name: str, *, as_json: bool) -> None:
    """Print the documentation of a metric, or of all metrics whose names begin with `name/`.

    Raises:
        ConfigError: there is no such metric; the message names similar ones.
    """
    metrics = _find(name)
    for metric in metrics:
        if as_json:
            print(json.dumps(_as_object(metric)))
        elif len(metrics) > 1:
            print(f"{metric.name}  {shorten(metric.meaning, 90, placeholder=' …')}")
        else:
            _print(metric, name)


def print_list(*, as_json: bool) -> None:
    """Print one line per metric, and their number; with JSON the number goes to stderr."""
    metrics = list(all_metrics())
    width = max(len(metric.name) for metric in metrics if len(metric.name) < 40)
    for metric in metrics:
        shown = f"{metric.name:<{width}}  {shorten(metric.meaning, 90, placeholder=' …')}"
        print(json.dumps(_as_object(metric)) if as_json else shown)
    print(f"{len(metrics)} metrics", file=sys.stderr if as_json else sys.stdout)


def related_metrics(word: str) -> list[Metric]:
    """Return the metrics whose names contain a word."""
    return [metric for metric in all_metrics() if word.casefold() in metric.name.casefold()]


def _find(name: str) -> list[Metric]:
    try:
        return [describe(name)]
    except KeyError:
        inside = [metric for metric in all_metrics() if metric.name.startswith(f"{name}/")]
    if inside:
        return inside
    for metric in all_metrics():
        frameworks = [framework for framework, other in metric.elsewhere.items() if other == name]
        if frameworks:
            print(f"{name} of {' and '.join(frameworks)} is {metric.name} here", file=sys.stderr)
            return [metric]
    similar = difflib.get_close_matches(name, [metric.name for metric in all_metrics()], 3, 0.7)
    similar = similar or [metric.name for metric in related_metrics(name.rpartition("/")[2])][:3]
    listing = "`quintet explain --list --metrics` shows every metric"
    hint = f"did you mean {' or '.join(similar)}?" if similar else listing
    raise ConfigError(f"unknown metric {name}", key=name, hint=hint)


def _print(metric: Metric, name: str) -> None:
    is_placeholder = metric.name != name and metric.matches(name)
    print(f"{name}  ({metric.name})" if is_placeholder else metric.name)
    print(f"  {metric.meaning}")
    print(f"  unit      {metric.unit}")
    print(f"  healthy   {healthy_text(metric.healthy)}")
    print(f"  computed  {metric.aggregation}")
    if metric.part_of:
        print(f"  part of   {metric.part_of}")
    for side, label in SIDES.items():
        if metric.causes.get(side):
            print(f"  {label}, usual causes")
            _print_items(metric.causes[side])
        if metric.remedies.get(side):
            print(f"  {label}, what to try")
            _print_items([str(remedies()[remedy]) for remedy in metric.remedies[side]])
    if metric.related:
        print(f"  related   {', '.join(metric.related)}")
    for framework, other in metric.elsewhere.items():
        print(f"  {framework:<8}  {other}")


def _print_items(items: tuple[str, ...] | list[str]) -> None:
    for item in items:
        print(f"    - {item}")


def _as_object(metric: Metric) -> dict[str, Any]:
    return {
        "metric": metric.name,
        "meaning": metric.meaning,
        "unit": metric.unit,
        "healthy": metric.healthy,
        "computed": metric.aggregation,
        "part_of": metric.part_of,
        "depends_on_clock": metric.clock,
        "causes": dict(metric.causes),
        "remedies": {side: [str(remedies()[name]) for name in names] for side, names in metric.remedies.items()},
        "related": list(metric.related),
        "elsewhere": dict(metric.elsewhere),
    }
