"""Remaining time of the current verification, for verifiers that divide it."""

from __future__ import annotations

import time

_deadline: float | None = None


def start(seconds: float | None) -> None:
    """Start the time limit of a verification; None sets no limit."""
    global _deadline
    _deadline = None if seconds is None else time.monotonic() + seconds


def seconds_left(default: float) -> float:
    """Return the seconds until the time limit, at least 0; `default` if there is no limit."""
    return default if _deadline is None else max(_deadline - time.monotonic(), 0.0)
