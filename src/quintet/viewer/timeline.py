"""Phases of training steps as nested spans of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quintet.tracking.metrics import ordered_names
from quintet.tracking.timing_tree import PREFIX, TimedPhase, timing_tree

_ORDER = {name.removeprefix(PREFIX): number for number, name in enumerate(ordered_names())}
"""Place of each phase in a step: the order in which `metrics.yaml` lists them."""


def step_phases(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the phases of each step: name, seconds and parts, in the order in which a step has them.

    The parts of `step`, then the phases outside of it: validation and checkpoints.
    """
    return [
        {"step": line["step"], "phase": _ordered(tree)} for line in lines if (tree := timing_tree(line)).seconds > 0.0
    ]


def _ordered(phase: TimedPhase) -> dict[str, Any]:
    parts = sorted(phase.parts, key=lambda part: _ORDER.get(part.name, len(_ORDER)))
    return {"name": phase.name, "seconds": phase.seconds, "parts": [_ordered(part) for part in parts]}
