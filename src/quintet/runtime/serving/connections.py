"""Limits of connections: their number, deadlines and sizes of requests, and turns between clients."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TypeVar

from quintet.rollout.engines.request_queue import RoundRobinQueue
from quintet.runtime.memory import return_freed_memory
from quintet.runtime.serving.request_schema import RequestError

T = TypeVar("T")
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
RECEIVE_BYTES = 256 << 10
"""Maximum number of bytes that are received at once."""
LARGE_BODY_BYTES = 128 << 10
"""Size from which bodies are handled one after the other."""
MAX_LARGE_BYTES, MAX_LARGE_BYTES_PER_CLIENT = 512 << 20, 128 << 20
"""Maximum size of all large bodies that are received or handled at the same time."""
COMPUTING_CONNECTIONS = 4
"""Number of connections that are parsed and tokenized at the same time, beside one with a large body."""
REST_RATIO = 3.0
"""Rest after parsing and tokenizing, in multiples of its processor time: it holds the interpreter lock, which the
engine's thread needs, too."""
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
        """Call the function as soon as there is a permit for it; it returns whether it keeps the permit."""
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
        if pause < MIN_REST_SECONDS:
            self._grant()
        else:
            asyncio.get_running_loop().call_later(pause, self._grant)

    def _grant(self) -> None:
        """Give a permit to the next client that keeps it."""
        while (client := next(self._waiting.clients, None)) is not None:
            if self._waiting.pop(client)():
                return
        self._free += 1


class Connection:
    """A connection of a client. It computes only with a permit, which it returns while it waits."""

    def __init__(self, client: str, sock: socket.socket, semaphore: FairSemaphore, pool: ThreadPoolExecutor) -> None:
        self.client = client
        self.socket = sock
        self.semaphore = semaphore
        self.is_reading = True
        """Whether it waits for bytes of the client."""
        self.large_body_bytes = 0
        """Size of the large body that is being received or handled."""
        self._pool = pool
        self._held: FairSemaphore | None = None
        self._cpu_seconds = 0.0
        """Processor time since the connection got its permit."""
        self._resumed = 0.0
        """Processor time of the loop's thread when the connection's task got its permit or a result."""

    async def begin_computing(self) -> None:
        """Wait for a permit, unless it has one."""
        if self._held is None:
            await self.semaphore.acquire(self.client)
            self.set_computing()

    def set_computing(self) -> None:
        """Note that the connection has a permit; called by the task that uses it."""
        self.is_reading = False
        self._held, self._cpu_seconds = self.semaphore, 0.0
        self._resumed = time.thread_time()

    def end_computing(self) -> None:
        """Return the permit, if it has one."""
        if self._held is not None:
            held, self._held = self._held, None
            held.release(self._cpu_seconds + time.thread_time() - self._resumed)

    async def compute(self, function: Callable[[], T]) -> T:
        """Call a function in another thread, with a permit."""

        def measure() -> T:
            started = time.thread_time()
            try:
                return function()
            finally:
                self._cpu_seconds += time.thread_time() - started

        await self.begin_computing()
        self._cpu_seconds += time.thread_time() - self._resumed
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, measure)
        finally:
            self._resumed = time.thread_time()

    async def receive(self, deadline: float) -> bytes:
        """Return bytes that the client has sent, at least one; none if it has closed the connection.

        Raises:
            TimeoutError: the deadline, a time of the event loop, has passed.
            OSError: the connection is broken.
        """
        with suppress(BlockingIOError):
            received = self.socket.recv(RECEIVE_BYTES)
            if self.large_body_bytes:
                self.end_computing()
                await asyncio.sleep(0)
                await self.begin_computing()
            return received
        self.end_computing()
        self.is_reading = True
        async with asyncio.timeout_at(deadline):
            received = await asyncio.get_running_loop().sock_recv(self.socket, RECEIVE_BYTES)
        await self.begin_computing()
        return received

    async def send(self, data: bytes) -> None:
        """Send bytes.

        Raises:
            TimeoutError: the client does not receive them.
            OSError: the connection is broken.
        """
        self.end_computing()
        async with asyncio.timeout(SEND_SECONDS):
            await asyncio.get_running_loop().sock_sendall(self.socket, data)

    @contextmanager
    def on_disconnect(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call the callback when the client closes the connection."""
        loop = asyncio.get_running_loop()

        def check() -> None:
            try:
                is_open = bool(self.socket.recv(1, socket.MSG_PEEK))
            except BlockingIOError:
                return
            except OSError:
                is_open = False
            loop.remove_reader(self.socket)
            if not is_open:
                callback()

        loop.add_reader(self.socket, check)
        try:
            yield
        finally:
            loop.remove_reader(self.socket)


class ConnectionTable:
    """Open connections. No client can use so many that others cannot connect."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._small_bodies = FairSemaphore(COMPUTING_CONNECTIONS, REST_RATIO)
        self._large_bodies = FairSemaphore(1, REST_RATIO)
        self._pool = ThreadPoolExecutor(COMPUTING_CONNECTIONS + 1, "http")
        self._connections: dict[socket.socket, Connection] = {}
        self._counts: Counter[str] = Counter()

    def __contains__(self, connection: Connection) -> bool:
        return connection.socket in self._connections

    def add(self, client: str, sock: socket.socket) -> Connection | None:
        """Add and return a connection, or return None if there are too many. The connection that has waited longest for
        its client makes room: one of the same client if it has half of the maximum, else one of the client with most.
        """
        client_to_evict = None
        if self._counts[client] >= self._max_connections // 2:
            client_to_evict = client
        elif len(self._connections) >= self._max_connections:
            client_to_evict = max(self._counts, key=self._counts.__getitem__)
        if client_to_evict is not None and not self._close_reading(client_to_evict):
            return None
        connection = self._connections[sock] = Connection(client, sock, self._small_bodies, self._pool)
        self._counts[client] += 1
        return connection

    def remove(self, connection: Connection) -> None:
        """Remove a connection, unless it was closed to make room."""
        if self._connections.pop(connection.socket, None) is not None:
            self._counts[connection.client] -= 1
            if not self._counts[connection.client]:
                del self._counts[connection.client]

    @asynccontextmanager
    async def body(self, connection: Connection, num_bytes: int) -> AsyncIterator[None]:
        """Receive and handle a body of that size; large ones are handled one after the other.

        Raises:
            RequestError: the server receives too many large bodies.
        """
        if num_bytes <= LARGE_BODY_BYTES:
            yield
            return
        self._check_large_bodies(connection)
        connection.end_computing()
        connection.semaphore, connection.large_body_bytes = self._large_bodies, num_bytes
        try:
            await connection.begin_computing()
            yield
        finally:
            connection.end_computing()
            connection.semaphore, connection.large_body_bytes = self._small_bodies, 0
            return_freed_memory()

    def close_reading(self) -> None:
        """Close the connections that wait for their clients."""
        for connection in [candidate for candidate in self._connections.values() if candidate.is_reading]:
            self._close(connection)

    def close(self) -> None:
        """End the threads that compute."""
        self._pool.shutdown(wait=False)

    def _check_large_bodies(self, connection: Connection) -> None:
        sizes = Counter[str]()
        for candidate in self._connections.values():
            sizes[candidate.client] += candidate.large_body_bytes
        if sizes[connection.client] >= MAX_LARGE_BYTES_PER_CLIENT or sizes.total() >= MAX_LARGE_BYTES:
            message = "the server is receiving too many large bodies: try again later"
            raise RequestError(message, status=503, kind="server_error", code="overloaded")

    def _close_reading(self, client: str) -> bool:
        """Close the connection of a client that has waited longest for it; return False if there is none."""
        connections = self._connections.values()
        idle = next(
            (connection for connection in connections if connection.client == client and connection.is_reading), None
        )
        if idle is None:
            return False
        self._close(idle)
        return True

    def _close(self, connection: Connection) -> None:
        self.remove(connection)
        with suppress(OSError):
            connection.socket.shutdown(socket.SHUT_RDWR)


def max_connections() -> int:
    """Return the maximum number of connections, after allowing this process to open as many files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = MAX_CONNECTIONS + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= num_files:
        return MAX_CONNECTIONS
    num_files = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    return num_files - OTHER_FILES
