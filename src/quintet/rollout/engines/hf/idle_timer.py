"""Timer that acts once nothing has happened for some time."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

IDLE_SECONDS = 8.0
"""Idle time after which an engine frees its KV cache."""


class IdleTimer:
    """Calls a method in a thread of its own `IDLE_SECONDS` after the last `touch`. It does not keep the method's object
    alive, nor the process."""

    def __init__(self, method: Callable[[], None]) -> None:
        self._method = weakref.WeakMethod(method)
        self._lock = threading.Lock()
        self._due = 0.0
        self._timer: threading.Timer | None = None

    def touch(self) -> None:
        """Start anew."""
        with self._lock:
            self._due = time.monotonic() + IDLE_SECONDS
            if self._timer is None:
                self._start(IDLE_SECONDS)

    def cancel(self) -> None:
        """Do not call the method."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _start(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._wake)
        self._timer.name, self._timer.daemon = "engine-idle", True
        self._timer.start()

    def _wake(self) -> None:
        method = self._method()
        with self._lock:
            self._timer = None
            if method is None:
                return
            if (remaining := self._due - time.monotonic()) > 0:
                self._start(remaining)
                return
        method()
