"""Stop requests by signals: the first one lets the current step finish, the second one ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from quintet.errors import SIGNALLED

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
SAME_REQUEST_SECONDS = 0.5
"""Signals closer to each other are one request: Ctrl-C reaches a rank from the terminal and from torchrun."""
SHOW_CURSOR = b"\x1b[?25h"


@dataclass(slots=True)
class StopRequest:
    """Signal that requested a stop; None if there was none."""

    number: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.number is not None


@contextmanager
def stop_on_signals(check: Callable[[], None] | None = None) -> Iterator[StopRequest]:
    """Yield a stop request that SIGINT and SIGTERM set until the context exits. An error of `check`, which is called at
    each signal, is raised at once."""
    request = StopRequest()

    def handle(number: int, _frame: FrameType | None) -> None:
        if check is not None:
            check()
        request.number = request.number or signal.Signals(number)

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def exit_on_second_signal() -> Iterator[None]:
    """End the process at a second SIGINT or SIGTERM within the context, whatever the main thread does.

    Python runs signal handlers between two instructions of the main thread, so native code delays them. A thread
    therefore reads the numbers of the signals from a pipe.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


def _watch(reader: int) -> None:
    first: float | None = None
    while number := os.read(reader, 1):
        if number[0] in STOP_SIGNALS:
            now = time.monotonic()
            first = now if first is None else first
            if now - first > SAME_REQUEST_SECONDS:
                exit_at_once(f"stopped at once by a second signal, {signal.Signals(number[0]).name}", number[0])
    os.close(reader)


def exit_at_once(message: str, number: int) -> None:
    """End the process without cleaning up, as by the signal; child processes end with their parent."""
    cursor = SHOW_CURSOR if sys.__stderr__ and sys.__stderr__.isatty() else b""
    os.write(2, cursor + f"quintet: {message}\n".encode())
    os._exit(SIGNALLED + number)
