"""Periodic log line with an engine's running and waiting requests and its throughput."""

from __future__ import annotations

import logging
import time

LOGGER = logging.getLogger("quintet.engine")


class StatsLog:
    """Logs running and waiting requests and tokens per second once in `every_steps` decode steps."""

    def __init__(self, every_steps: int) -> None:
        """Log to standard error unless the program has configured logging."""
        self._every_steps = every_steps
        self._steps = 0
        self._tokens = 0
        self._since = time.perf_counter()
        LOGGER.setLevel(logging.INFO)
        if not LOGGER.hasHandlers():
            LOGGER.addHandler(logging.StreamHandler())

    def record(self, running: int, waiting: int) -> None:
        """Count a step in which each running request got one token."""
        self._steps += 1
        self._tokens += running
        if self._steps % self._every_steps:
            return
        now = time.perf_counter()
        throughput = self._tokens / max(now - self._since, 1e-9)
        LOGGER.info("step %d: %d running, %d waiting, %.0f tokens/s", self._steps, running, waiting, throughput)
        self._tokens, self._since = 0, now
