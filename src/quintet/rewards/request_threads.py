"""Threads that wait for the replies to requests, several at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class RequestThreads(Generic[Item, Result]):
    """Applies a function to items in threads. The end of the run does not wait for them."""

    def __init__(
        self, function: Callable[[Item], Result], concurrent: int, name: str, closed: threading.Event | None = None
    ) -> None:
        """`function` must not raise; it runs in at most `concurrent` threads, and it returns early when `closed` is
        set."""
        self._function = function
        self._concurrent = concurrent
        self._name = name
        self._closed = closed or threading.Event()
        self._waiting: SimpleQueue[Item | None] = SimpleQueue()
        self._done: SimpleQueue[Result] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.num_pending = 0
        """Number of items whose results have not been returned."""

    def submit(self, item: Item) -> None:
        """Queue an item."""
        self.num_pending += 1
        self._waiting.put(item)
        if len(self._threads) < min(self._concurrent, self.num_pending):
            # daemon threads: the end of the run does not wait for an endpoint that does not respond
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def ready(self) -> list[Result]:
        """Return the results since the last call, without waiting."""
        results = [self._done.get() for _ in range(self._done.qsize())]
        self.num_pending -= len(results)
        return results

    def next(self) -> Result:
        """Wait for a result and return it."""
        self.num_pending -= 1
        return self._done.get()

    def wait(self, seconds: float) -> list[Result]:
        """Return the results since the last call; wait up to `seconds` for the first one."""
        try:
            first = self._done.get(timeout=seconds)
        except Empty:
            return []
        self.num_pending -= 1
        return [first, *self.ready()]

    def drain(self) -> list[Result]:
        """Wait for all items and return their results."""
        return [self.next() for _ in range(self.num_pending)]

    def close(self) -> None:
        """Drop queued items; those in progress are abandoned."""
        self._closed.set()
        for _ in self._threads:
            self._waiting.put(None)

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None and not self._closed.is_set():
            self._done.put(self._function(item))
