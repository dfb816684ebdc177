"""Queue of an engine that several clients share: they take turns, so that one client does not delay the others."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

from quintet.records import Request

T = TypeVar("T")
RESERVED_SHARE = 8
"""One of this number of sequence slots is reserved for clients without a running request."""


class RoundRobinQueue(Generic[T]):
    """Items of several clients. Clients take turns; the items of a client keep their order."""

    def __init__(self) -> None:
        self._items: dict[str, deque[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._items.values()))

    @property
    def clients(self) -> Iterator[str]:
        """Clients with items, in the order of their turns."""
        return iter(self._items)

    def push(self, client: str, item: T) -> None:
        """Append an item of a client."""
        self._items.setdefault(client, deque()).append(item)

    def pop(self, client: str) -> T:
        """Remove the first item of a client, whose next turn comes after those of all others."""
        items = self._items.pop(client)
        item = items.popleft()
        if items:
            self._items[client] = items
        return item

    def drain(self) -> list[tuple[str, T]]:
        """Remove all items; return them with their clients."""
        drained = [(client, item) for client, items in self._items.items() for item in items]
        self._items.clear()
        return drained


class RequestQueue:
    """Requests that wait for one of `max_running` sequence slots, and the ids of those that run."""

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._num_reserved = max_running // RESERVED_SHARE
        self._waiting: RoundRobinQueue[Request] = RoundRobinQueue()
        self._client_by_id: dict[int, str] = {}
        self._num_running: Counter[str] = Counter()

    @property
    def num_running(self) -> int:
        """Number of admitted requests that are not finished."""
        return len(self._client_by_id)

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    def push(self, client: str, request: Request) -> None:
        """Append a request of a client."""
        self._waiting.push(client, request)

    def admit(self) -> Iterator[Request]:
        """Yield the requests that get a slot."""
        while (client := self._next_client()) is not None:
            request = self._waiting.pop(client)
            self._client_by_id[request.id] = client
            self._num_running[client] += 1
            yield request

    def release(self, request_id: int) -> None:
        """Free the slot of a request, if it has one."""
        client = self._client_by_id.pop(request_id, None)
        if client is not None:
            self._num_running[client] -= 1

    def remove(self, ids: Collection[int]) -> list[int]:
        """Remove waiting requests; return their ids."""
        entries = self._waiting.drain()
        for client, request in entries:
            if request.id not in ids:
                self._waiting.push(client, request)
        return [request.id for _, request in entries if request.id in ids]

    def _next_client(self) -> str | None:
        num_free = self._max_running - self.num_running
        if num_free > self._num_reserved:
            return next(self._waiting.clients, None)
        return next((client for client in self._waiting.clients if num_free and not self._num_running[client]), None)
