"""Time of a run by phase, as a tree: `timing_s/engine` is a part of `timing_s/gen`, which is a part of `timing_s/step`.

The parts of a phase add up to the phase: what no metric measures is its part `other`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from quintet.tracking.metric_columns import MetricColumns
from quintet.tracking.metrics import describe

PREFIX = "timing_s/"
OTHER = "other"
NEGLIGIBLE = 0.001
"""Share of a phase below which its unmeasured time is not shown."""


@dataclass(frozen=True, slots=True)
class TimedPhase:
    """Seconds of a phase, summed over the run, and its parts, longest first."""

    name: str
    seconds: float
    parts: tuple[TimedPhase, ...] = ()

    def leaves(self) -> Iterator[TimedPhase]:
        """Yield the phases without parts; their seconds add up to this phase's."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()


def timing_tree(seconds: Mapping[str, float]) -> TimedPhase:
    """Return the phases of a run or of a step from the sums of its metrics; others than times are ignored."""
    times = {name: value for name, value in seconds.items() if name.startswith(PREFIX) and math.isfinite(value)}
    return _phase("run", None, times)


def total_times(metrics: MetricColumns) -> dict[str, float]:
    """Return the sum of each time over a run."""
    names = [name for name in metrics.names if name.startswith(PREFIX)]
    return {name: float(np.nansum(metrics.values(name))) for name in names if len(metrics.points(name)[0])}


def _phase(name: str, metric: str | None, seconds: Mapping[str, float]) -> TimedPhase:
    parts = [_phase(part.removeprefix(PREFIX), part, seconds) for part in seconds if _parent(part, seconds) == metric]
    measured = math.fsum(part.seconds for part in parts)
    total = measured if metric is None else max(seconds[metric], measured)
    if parts and total - measured > NEGLIGIBLE * total:
        parts.append(TimedPhase(OTHER, total - measured))
    return TimedPhase(name, total, tuple(sorted(parts, key=lambda part: -part.seconds)))


def _parent(name: str, seconds: Mapping[str, float]) -> str | None:
    """Return the innermost enclosing phase that was measured."""
    parent = describe(name).part_of
    while parent is not None and parent not in seconds:
        parent = describe(parent).part_of
    return parent
