"""TCP server: accepts connections, and handles them in the event loop of one thread."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

from quintet.runtime.serving.address import Address
from quintet.runtime.serving.connections import Connection, ConnectionTable, max_connections

ACCEPTED_AT_ONCE = 64
TOO_MANY_CONNECTIONS = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)
"""Response to connections beyond the maximum."""


class ConnectionServer:
    """Listens on an address. `handle` is called once per connection, in turns of the clients."""

    def __init__(self, address: Address, handle: Callable[[Connection, ConnectionTable], Awaitable[None]]) -> None:
        """Listen on the address, and handle connections in a thread.

        Raises:
            OSError, OverflowError: the address is not available.
        """
        self._handle = handle
        self._table = ConnectionTable(max_connections())
        self._tasks: set[asyncio.Task[None]] = set()
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._socket = socket.create_server((address.host, address.port), family=family, backlog=socket.SOMAXCONN)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting connections, and close those without a request. The others end when they are answered."""
        stopped = threading.Event()
        self._loop.call_soon_threadsafe(self._stop_listening, stopped)
        stopped.wait()

    def _run(self) -> None:
        self._loop.add_reader(self._socket, self._accept)
        self._loop.run_forever()
        self._table.close()
        self._loop.close()

    def _stop_listening(self, stopped: threading.Event) -> None:
        try:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._table.close_reading()
            self._loop.call_soon(self._stop_if_done)
        finally:  # no future of the loop, which may stop before it reports the result
            stopped.set()

    def _stop_if_done(self) -> None:
        if self._socket.fileno() < 0 and not self._tasks:
            self._loop.stop()

    def _accept(self) -> None:
        with suppress(OSError):
            for _ in range(ACCEPTED_AT_ONCE):
                sock, address = self._socket.accept()
                sock.setblocking(False)
                self._add(sock, address[0])

    def _add(self, sock: socket.socket, client: str) -> None:
        """Handle a connection when it is the client's turn, or reject it if there are too many."""
        connection = self._table.add(client, sock)
        if connection is not None:
            connection.semaphore.call_with_permit(client, lambda: self._start(connection))
            return
        with suppress(OSError):
            sock.send(TOO_MANY_CONNECTIONS)
        sock.close()

    def _start(self, connection: Connection) -> bool:
        if connection not in self._table:  # closed to make room
            connection.socket.close()
            return False
        task = self._loop.create_task(self._handle_connection(connection))
        self._tasks.add(task)
        task.add_done_callback(self._end_task)
        return True

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._stop_if_done()

    async def _handle_connection(self, connection: Connection) -> None:
        connection.set_computing()
        try:
            with suppress(OSError):  # low latency for streams
                connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._handle(connection, self._table)
        except OSError:  # TimeoutError is one
            logging.getLogger(__name__).debug("a connection from %s broke", connection.client, exc_info=True)
        finally:
            connection.end_computing()
            self._table.remove(connection)
            with suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)
            connection.socket.close()
