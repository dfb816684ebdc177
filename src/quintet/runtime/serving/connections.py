"""Limits of connections: their number, deadlines and sizes of requests, and turns between clients."""

from __future__ import annotations

import io
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from quintet.rollout.engines.request_queue import RoundRobinQueue
from quintet.runtime.memory import return_freed_memory
from quintet.runtime.serving.request_schema import RequestError

MAX_CONNECTIONS = 1024
OTHER_FILES = 128
"""Open files that are no connections."""
HEAD_BYTES = 64 << 10
"""Maximum size of request line and headers."""
HEAD_SECONDS = 10.0
"""Time for request line and headers."""
IDLE_SECONDS = 60.0
"""Time until the next request of a connection."""
BODY_SECONDS, BODY_BYTES_PER_SECOND = 20.0, 1 << 20
"""Time for a body, and the additional time by its size."""
SEND_SECONDS = 60.0
"""Time for a client to receive a response, or an event of a stream."""
LARGE_BODY_BYTES = 128 << 10
"""Size from which bodies are handled one after the other."""
MAX_LARGE_BYTES, MAX_LARGE_BYTES_PER_CLIENT = 512 << 20, 128 << 20
"""Maximum size of all large bodies that are received or handled at the same time."""
COMPUTING_CONNECTIONS = 2
"""Number of connections that parse and tokenize at the same time."""


class HeadTooLargeError(Exception):
    """Request line and headers exceed `HEAD_BYTES`."""


class FairSemaphore:
    """Semaphore that gives waiting clients permits in turns."""

    def __init__(self, permits: int) -> None:
        self._free = permits
        self._waiting: RoundRobinQueue[threading.Event] = RoundRobinQueue()
        self._lock = threading.Lock()

    def acquire(self, client: str) -> None:
        """Wait for a permit."""
        event = threading.Event()
        with self._lock:
            if self._free:
                self._free -= 1
                return
            self._waiting.push(client, event)
        event.wait()

    def release(self) -> None:
        """Return a permit."""
        with self._lock:
            client = next(self._waiting.clients, None)
            if client is None:
                self._free += 1
            else:
                self._waiting.pop(client).set()


@dataclass(eq=False, slots=True)
class Connection:
    """A connection of a client. It computes only with a permit, which it returns while it waits for the client."""

    client: str
    socket: socket.socket
    semaphore: FairSemaphore
    is_reading: bool = True
    """Whether it waits for bytes of the client."""
    large_body_bytes: int = 0
    """Size of the large body that is being received or handled."""
    _held: FairSemaphore | None = None

    def begin_computing(self) -> None:
        """Wait for a permit, unless it has one."""
        if self._held is None:
            self.semaphore.acquire(self.client)
            self._held = self.semaphore

    def end_computing(self) -> None:
        """Return the permit, if it has one."""
        if self._held is not None:
            self._held.release()
            self._held = None


class RequestReader(io.RawIOBase):
    """Stream of the bytes that a client sends, with a deadline and a maximum number of bytes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.expect(HEAD_BYTES, HEAD_SECONDS)

    def expect(self, num_bytes: int, seconds: float) -> None:
        """Set the number of bytes that may be read from now on, and the time for them."""
        self._num_bytes = num_bytes
        self._deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what the client has sent.

        Raises:
            TimeoutError: the deadline has passed.
            HeadTooLargeError: the client sends more bytes than expected.
        """
        if self._num_bytes <= 0:
            raise HeadTooLargeError
        connection = self._connection
        connection.end_computing()
        connection.is_reading = True
        count = self._receive(buffer)
        connection.is_reading = False
        connection.begin_computing()
        self._num_bytes -= count
        return count

    def _receive(self, buffer: Any) -> int:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        self._connection.socket.settimeout(seconds)
        count = self._connection.socket.recv_into(buffer)
        self._connection.socket.settimeout(SEND_SECONDS)
        return count


class ConnectionTable:
    """Open connections. No client can use so many that others cannot connect."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._small, self._large = FairSemaphore(COMPUTING_CONNECTIONS), FairSemaphore(1)
        self._connections: dict[socket.socket, Connection] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._connections)

    def get(self, key: socket.socket) -> Connection | None:
        """Return an open connection; None if it was closed to make room."""
        return self._connections.get(key)

    def add(self, client: str, key: socket.socket) -> bool:
        """Add a connection, or return False if there are too many. The connection that has waited longest for its
        client makes room: one of the same client if it has half of the maximum, else one of the client with most."""
        with self._lock:
            crowded = None
            if self._counts[client] >= self._max_connections // 2:
                crowded = client
            elif len(self._connections) >= self._max_connections:
                crowded = max(self._counts, key=self._counts.__getitem__)
            if crowded is not None and not self._close_reading(crowded):
                return False
            self._connections[key] = Connection(client, key, self._small)
            self._counts[client] += 1
            return True

    @contextmanager
    def computing_server(self) -> Iterator[None]:
        """Hold a permit for the server itself."""
        self._small.acquire("")
        try:
            yield
        finally:
            self._small.release()

    def remove(self, key: socket.socket) -> None:
        """Remove a connection, unless it was closed to make room."""
        with self._lock:
            self._remove(key)

    def _remove(self, key: socket.socket) -> None:
        if key in self._connections:
            client = self._connections.pop(key).client
            self._counts[client] -= 1
            if not self._counts[client]:
                del self._counts[client]

    def begin_body(self, connection: Connection, num_bytes: int) -> None:
        """Prepare for a body of that size; large ones are handled one after the other.

        Raises:
            RequestError: the server receives too many large bodies.
        """
        connection.end_computing()
        connection.semaphore = self._small if num_bytes <= LARGE_BODY_BYTES else self._large
        if num_bytes <= LARGE_BODY_BYTES:
            return
        with self._lock:
            sizes = Counter[str]()
            for each in self._connections.values():
                sizes[each.client] += each.large_body_bytes
            if sizes[connection.client] >= MAX_LARGE_BYTES_PER_CLIENT or sizes.total() >= MAX_LARGE_BYTES:
                message = "the server is receiving too many large bodies: try again later"
                raise RequestError(message, status=503, kind="server_error", code="overloaded")
            connection.large_body_bytes = num_bytes

    def end_body(self, connection: Connection) -> None:
        """Return the memory of a large body."""
        connection.end_computing()
        connection.semaphore = self._small
        if connection.large_body_bytes:
            connection.large_body_bytes = 0
            return_freed_memory()

    def _close_reading(self, client: str) -> bool:
        """Close the connection of a client that has waited longest for it; return False if there is none."""
        connections = self._connections.values()
        idle = next((each for each in connections if each.client == client and each.is_reading), None)
        if idle is None:
            return False
        self._remove(idle.socket)
        with suppress(OSError):
            idle.socket.shutdown(socket.SHUT_RDWR)
        return True


def max_connections() -> int:
    """Return the maximum number of connections, after allowing this process to open as many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = MAX_CONNECTIONS + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= num_files:
        return MAX_CONNECTIONS
    num_files = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    return num_files - OTHER_FILES
