"""Stop requests by signals: the first one lets the current step finish, the second one interrupts at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class StopRequest:
    """Name of the signal that requested a stop; None if there was none."""

    signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals(check: Callable[[], None] | None = None) -> Iterator[StopRequest]:
    """Yield a stop request that SIGINT and SIGTERM set until the context exits. A second signal raises
    KeyboardInterrupt, and an error of `check`, which is called at each signal, is raised at once."""
    request = StopRequest()

    def handle(number: int, _frame: FrameType | None) -> None:
        if check is not None:
            check()
        if request:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number).name

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
