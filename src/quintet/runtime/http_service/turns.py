"""Turns of clients: each client's work waits for at most one piece of work of every other client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from quintet.rollout.engines.request_queue import RoundRobinQueue

T = TypeVar("T")
NUM_THREADS = 4
"""Number of small requests that are computed at the same time, beside one with a large body."""
MIN_REST_SECONDS = 0.005
"""Shortest rest that is worth a timer."""


class FairSemaphore:
    """Semaphore of an event loop that gives waiting clients permits in turns.

    With `rest_ratio` r, no permit is given for r * t seconds after t seconds of processor time, as soon as these add up
    to `MIN_REST_SECONDS`: the work uses at most 1 / (1 + r) of a core.
    """

    def __init__(self, permits: int, rest_ratio: float = 0.0) -> None:
        self._free = permits
        self._rest_ratio = rest_ratio
        self._rest_until = 0.0
        self._waiting: RoundRobinQueue[Callable[[], bool]] = RoundRobinQueue()

    async def acquire(self, client: str) -> None:
        """Wait for a permit."""
        acquired = asyncio.get_running_loop().create_future()

        def wake() -> bool:
            if acquired.done():  # cancelled
                return False
            acquired.set_result(None)
            return True

        self.call_with_permit(client, wake)
        await acquired

    def call_with_permit(self, client: str, function: Callable[[], bool]) -> None:
        """Call the function as soon as there is a permit for it; it returns whether the permit is in use."""
        if not self._free:
            self._waiting.push(client, function)
            return
        self._free -= 1
        if not function():
            self._grant()

    def release(self, seconds: float) -> None:
        """Return a permit after `seconds` of processor time."""
        now = time.monotonic()
        self._rest_until = max(now, self._rest_until) + seconds * self._rest_ratio
        pause = self._rest_until - now
        loop = asyncio.get_running_loop()
        if pause >= MIN_REST_SECONDS:
            loop.call_later(pause, self._grant)
        elif self._waiting:
            loop.call_soon(self._grant)  # no recursion through functions that release at once
        else:
            self._free += 1

    def _grant(self) -> None:
        """Give a permit to the next client that uses it."""
        while (client := next(self._waiting.clients, None)) is not None:
            if self._waiting.pop(client)():
                return
        self._free += 1


class Turns:
    """Work for the clients of a server, in turns. Work for large bodies has turns of its own.

    All methods are called in the thread of the event loop; the threads of the pool only run what `compute` is given.
    """

    def __init__(self, rest_ratio: float = 0.0) -> None:
        """`rest_ratio` as in `FairSemaphore`."""
        self._small = FairSemaphore(NUM_THREADS, rest_ratio)
        self._large = FairSemaphore(1, rest_ratio)
        self._pool = ThreadPoolExecutor(2 * NUM_THREADS + 1, "http")

    def call(self, client: str, function: Callable[[], None], *, is_large: bool = False, seconds: float = 0.0) -> None:
        """Call a function in the event loop, now or when it is the client's turn, and rest after it.

        `seconds` of processor time were needed before.
        """
        semaphore = self._large if is_large else self._small

        def run() -> bool:
            started = time.thread_time()
            try:
                function()
            finally:
                semaphore.release(seconds + time.thread_time() - started)
            return True

        semaphore.call_with_permit(client, run)

    async def compute(
        self, client: str, function: Callable[[], T], *, is_large: bool = False, semaphore: FairSemaphore | None = None
    ) -> T:
        """Call a function in another thread when it is the client's turn, and return its result. A `semaphore` of at
        most `NUM_THREADS` permits has turns of its own."""
        semaphore = semaphore or (self._large if is_large else self._small)
        seconds = 0.0

        def measure() -> T:
            nonlocal seconds
            started = time.thread_time()
            try:
                return function()
            finally:
                seconds = time.thread_time() - started

        await semaphore.acquire(client)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, measure)
        finally:
            semaphore.release(seconds)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False)
