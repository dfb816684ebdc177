"""What an engine is busy with, told now and then."""

from __future__ import annotations

import logging
import time

__all__ = ["LoadLog"]

LOGGER = logging.getLogger("quintet.engine")


class LoadLog:
    """A line once in so many decoding steps: requests that run and wait, tokens a second since the last line."""

    def __init__(self, every: int) -> None:
        """Somebody asked for the lines: they go to standard error unless the program logs elsewhere."""
        self._every = every
        self._steps = 0
        self._tokens = 0
        self._since = time.perf_counter()
        LOGGER.setLevel(logging.INFO)
        if not LOGGER.hasHandlers():
            LOGGER.addHandler(logging.StreamHandler())

    def note(self, running: int, waiting: int) -> None:
        """A step in which each of the running requests got a token."""
        self._steps += 1
        self._tokens += running
        if self._steps % self._every:
            return
        now = time.perf_counter()
        pace = self._tokens / max(now - self._since, 1e-9)
        LOGGER.info("step %d: %d running, %d waiting, %.0f tokens/s", self._steps, running, waiting, pace)
        self._tokens, self._since = 0, now
