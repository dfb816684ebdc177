"""Queue of an engine that several clients share: they take turns, so that one client does not delay the others.

A client is an address, or an address with an API key. Addresses take turns, and in the turns of an address its keys do:
several users behind one proxy are served alike, and no address gets more turns by sending more keys.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Collection, Iterator
from typing import Generic, TypeVar

from quintet.records import Request

T = TypeVar("T")
RESERVED_SHARE = 8
"""One of this number of sequence slots is reserved for addresses without a running request."""


def client_name(address: str, key: str = "") -> str:
    """Return the name of a client, which does not contain the key.

    >>> client_name("::1"), client_name("::1", "secret")
    ('::1', '::1 2bb80d53')
    """
    return f"{address} {hashlib.sha256(key.encode()).hexdigest()[:8]}" if key else address


def client_address(client: str) -> str:
    """Return the address in the name of a client."""
    return client.partition(" ")[0]


class RoundRobinQueue(Generic[T]):
    """Items of several clients. Addresses take turns, and the clients of an address do in its turns; the items of a
    client keep their order."""

    def __init__(self) -> None:
        self._items: dict[str, dict[str, deque[T]]] = {}
        """Items by address and client, both in the order of their turns."""

    def __len__(self) -> int:
        return sum(len(items) for clients in self._items.values() for items in clients.values())

    @property
    def clients(self) -> Iterator[str]:
        """The client of each address whose turn is next, in the order of the addresses' turns."""
        return (next(iter(clients)) for clients in self._items.values())

    def push(self, client: str, item: T) -> None:
        """Append an item of a client."""
        self._items.setdefault(client_address(client), {}).setdefault(client, deque()).append(item)

    def pop(self, client: str) -> T:
        """Remove the first item of a client, whose next turn comes after those of all others."""
        clients = self._items.pop(client_address(client))
        items = clients.pop(client)
        item = items.popleft()
        if items:
            clients[client] = items
        if clients:
            self._items[client_address(client)] = clients
        return item

    def drain(self) -> list[tuple[str, T]]:
        """Remove all items; return them with their clients."""
        drained = [
            (client, item) for clients in self._items.values() for client, items in clients.items() for item in items
        ]
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
        """Running requests by address."""

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
            self._num_running[client_address(client)] += 1
            yield request

    def release(self, request_id: int) -> None:
        """Free the slot of a request, if it has one."""
        client = self._client_by_id.pop(request_id, None)
        if client is not None:
            self._num_running[client_address(client)] -= 1

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
        idle = (client for client in self._waiting.clients if not self._num_running[client_address(client)])
        return next(idle, None) if num_free else None
