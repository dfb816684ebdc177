"""Killable processes that judge: one that hangs or dies costs its own answer and no other.

The time of an answer runs from when its process begins with it. A process that takes longer is killed with all that
it started, and its answer has failed. Where the rules are our own, what waits behind a slow answer is judged by others
meanwhile.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Self

from quintet.errors import UserError
from quintet.rewards.dispatch import Crew, Dispatcher, Result
from quintet.rewards.processes import Job, Lane

__all__ = ["Crew", "Job", "Lane", "Pool", "Result"]

START_SECONDS = 120.0
"""Time that importing a user's function may take."""


class Pool:
    """Jobs in, results out, in the order in which they come. Ends with the run, however that ends."""

    def __init__(self, crew: Crew) -> None:
        self._basket = _Basket()
        dispatcher = Dispatcher(crew, self._basket.deliver, self._basket.report)
        self._dispatcher = dispatcher
        # a forked child of the run has the object, but neither the thread nor the processes
        self._close = weakref.finalize(self, _stop, dispatcher, os.getpid())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, lane: Lane, *, wait: bool = False) -> None:
        """Make processes before there is anything to do; `wait` until one can begin.

        Raises:
            ConfigError: it can't: the user's function can't be loaded.
        """
        self._dispatcher.warm(lane)
        if wait:
            self._basket.wait_for_start(START_SECONDS)

    def submit(self, job: Job) -> None:
        """Have a job done; doesn't wait."""
        if not self._close.alive:
            raise RuntimeError("the pool is closed")
        self._basket.expect()
        self._dispatcher.put(job)

    def ready(self) -> list[Result]:
        """What has been done since.

        Raises:
            UserError: nothing can be done any more.
        """
        return self._basket.take()

    def drain(self) -> list[Result]:
        """Everything that was submitted and not yet taken, once it is done.

        Raises:
            UserError: nothing can be done any more.
        """
        return self._basket.take_all()

    def close(self) -> None:
        """End all processes, at work or not."""
        self._close()


def _stop(dispatcher: Dispatcher, owner: int) -> None:
    if os.getpid() == owner:
        dispatcher.stop()


class _Basket:
    """Results between two threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._results: list[Result] = []
        self._waiting = 0
        self._started = False
        self._fault: UserError | None = None

    def expect(self) -> None:
        with self._changed:
            self._waiting += 1

    def deliver(self, result: Result) -> None:
        with self._changed:
            self._waiting -= 1
            self._results.append(result)
            if self._waiting == 0:
                self._changed.notify_all()

    def report(self, fault: UserError | None) -> None:
        with self._changed:
            if fault is None:
                self._started = True
            else:
                self._fault = fault
            self._changed.notify_all()

    def wait_for_start(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._started or self._fault is not None, seconds)
            self._raise()

    def take(self) -> list[Result]:
        with self._changed:
            self._raise()
            taken, self._results = self._results, []
            return taken

    def take_all(self) -> list[Result]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting == 0 or self._fault is not None)
        return self.take()

    def _raise(self) -> None:
        if self._fault is not None:
            raise self._fault
