"""Channel: a bounded queue between threads that waits if it is full or empty and passes on errors; and a counter for
channels in which nothing waits."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from threading import Condition
from typing import Generic, Self, TypeVar

from quintet.config.native.placement import ChannelConfig

T = TypeVar("T")


class ChannelClosedError(RuntimeError):
    """A channel was closed: nothing can be put into it, or nothing is left to get."""


class ChannelCounter:
    """Counts of a channel whose consumer takes each item at once, in the thread that puts it: nothing waits in it, so
    that a size never limits it."""

    def __init__(self, config: ChannelConfig) -> None:
        self._name = config.full_name
        self._passed = 0
        self._get_seconds = 0.0

    def count(self, items: int = 1, *, get_seconds: float = 0.0) -> None:
        """Count items that pass through the channel, and the time that the consumer has waited for them."""
        self._passed += items
        self._get_seconds += get_seconds

    def pop_metrics(self) -> dict[str, float]:
        """Return the counts and waiting times since the last call, with the names of `Channel.pop_metrics`."""
        passed, self._passed = self._passed, 0
        seconds, self._get_seconds = self._get_seconds, 0.0
        return _metrics(self._name, items=0, puts=passed, gets=passed, put_seconds=0.0, get_seconds=seconds)


def _metrics(channel: str, **values: float) -> dict[str, float]:
    return {f"channel/{channel}/{name}": value for name, value in values.items()}


class Channel(Generic[T]):
    """FIFO queue of any number of producers and consumers.

    `put` waits while the queue is full, so that a producer does not get further ahead than its size; `get` waits while
    it is empty. Waiting ends at once when the channel is closed.
    """

    def __init__(self, name: str, size: int = 0) -> None:
        """`size` is the maximum number of items; 0 sets no limit."""
        self.name = name
        self.size = size
        self._items: deque[T] = deque()
        self._changed = Condition()
        self._is_closed = False
        self._error: BaseException | None = None
        self._puts = self._gets = 0
        self._put_seconds = self._get_seconds = 0.0

    @classmethod
    def from_config(cls, config: ChannelConfig) -> Self:
        """Build a channel with its configured name and size."""
        return cls(config.full_name, config.size)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def room(self) -> float:
        """Number of items that can be put into the queue now; infinite without a limit."""
        return max(0, self.size - len(self._items)) if self.size else math.inf

    @property
    def is_full(self) -> bool:
        return not self.room

    def put(self, item: T) -> None:
        """Append an item; wait while the queue is full.

        Raises:
            ChannelClosedError: the channel is closed.
        """
        with self._changed:
            started = time.monotonic()
            self._changed.wait_for(lambda: self._is_closed or not self.is_full)
            self._put_seconds += time.monotonic() - started
            if self._is_closed:
                raise ChannelClosedError(f"channel {self.name} is closed")
            self._items.append(item)
            self._puts += 1
            self._changed.notify_all()

    def put_nowait(self, item: T) -> None:
        """Append an item to a queue that is not full.

        Raises:
            ChannelClosedError: the channel is closed.
        """
        if self.is_full:
            raise AssertionError(f"channel {self.name} is full")
        self.put(item)

    def add_waiting(self, *, put_seconds: float = 0.0, get_seconds: float = 0.0) -> None:
        """Count time that a producer or a consumer has waited elsewhere than in `put` or `get`."""
        with self._changed:
            self._put_seconds += put_seconds
            self._get_seconds += get_seconds

    def get(self, timeout: float | None = None) -> T | None:
        """Remove and return the oldest item; wait while there is none, up to `timeout` seconds, then return None.

        Raises:
            ChannelClosedError: the channel is closed and empty.
            BaseException: the error that the channel was closed with; items that are left are not returned.
        """
        with self._changed:
            started = time.monotonic()
            self._changed.wait_for(lambda: self._is_closed or bool(self._items), timeout)
            self._get_seconds += time.monotonic() - started
            self.raise_error()
            if not self._items:
                if self._is_closed:
                    raise ChannelClosedError(f"channel {self.name} is closed")
                return None
            self._gets += 1
            self._changed.notify_all()
            return self._items.popleft()

    def remove(self, is_obsolete: Callable[[T], bool]) -> list[T]:
        """Remove and return the items for which `is_obsolete` is true."""
        with self._changed:
            removed = [item for item in self._items if is_obsolete(item)]
            self._items = deque(item for item in self._items if not is_obsolete(item))
            self._changed.notify_all()
            return removed

    def close(self, error: BaseException | None = None) -> None:
        """Refuse further items; consumers get those that are left or, if there was an error, the error."""
        with self._changed:
            self._is_closed = True
            self._error = self._error or error
            self._changed.notify_all()

    def raise_error(self) -> None:
        """
        Raises:
            BaseException: the error that the channel was closed with.
        """
        if self._error is not None:
            raise self._error

    def pop_metrics(self) -> dict[str, float]:
        """Return the items in the queue, and the counts and waiting times since the last call."""
        with self._changed:
            metrics = _metrics(
                self.name,
                items=len(self._items),
                puts=self._puts,
                gets=self._gets,
                put_seconds=self._put_seconds,
                get_seconds=self._get_seconds,
            )
            self._puts = self._gets = 0
            self._put_seconds = self._get_seconds = 0.0
        return metrics
