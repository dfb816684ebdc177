"""Being asked to stop: the first signal is a wish, the second an order."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

__all__ = ["StopRequest", "stop_on_signals"]


@dataclass(slots=True)
class StopRequest:
    """`signal` is the name of the signal that asked, None while nobody did."""

    signal: str | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals(check: Callable[[], None] | None = None) -> Iterator[StopRequest]:
    """While inside, SIGINT and SIGTERM only set the request; a second one interrupts at once, and so does what `check`
    raises at any of them."""
    request = StopRequest()

    def ask(number: int, _frame: FrameType | None) -> None:
        if check is not None:
            check()
        if request:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number).name

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
