"""Wall-clock time of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from quintet import trace


class Timings:
    """Seconds spent in each phase of a step."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent within the context to `timing_s/<name>`."""
        started = time.perf_counter()
        with trace.span(name):
            yield
        key = f"timing_s/{name}"
        self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - started


def throughput(timings: Timings, num_tokens: int) -> dict[str, float]:
    """Return tokens, seconds and tokens per second of the phase `step`."""
    seconds = timings.metrics["timing_s/step"]
    return {
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": seconds,
        "perf/throughput": num_tokens / seconds,
    }
