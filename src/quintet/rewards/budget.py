"""How much time an answer's judgement has left, for verifiers that divide it."""

from __future__ import annotations

import time

__all__ = ["begin", "seconds_left"]

_ends: float | None = None


def begin(seconds: float | None) -> None:
    """A judgement begins that will be ended after so many seconds; None sets no end."""
    global _ends
    _ends = None if seconds is None else time.monotonic() + seconds


def seconds_left(otherwise: float) -> float:
    """Seconds until it is ended, not below 0; `otherwise` where nobody has set an end."""
    return otherwise if _ends is None else max(_ends - time.monotonic(), 0.0)
