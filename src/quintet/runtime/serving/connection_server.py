"""TCP server: accepts connections, and handles each in a thread."""

from __future__ import annotations

import _thread
import logging
import socket
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from quintet.rollout.engines.request_queue import RoundRobinQueue
from quintet.runtime.serving.address import Address
from quintet.runtime.serving.connections import ConnectionTable, max_connections

TOO_MANY_CONNECTIONS = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)
"""Response to connections beyond the maximum."""


class ConnectionServer(ThreadingHTTPServer):
    """Server with a thread per connection, within the limits of its `connections`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = socket.SOMAXCONN

    def __init__(self, address: Address, handler: type[BaseHTTPRequestHandler]) -> None:
        """Listen on the address.

        Raises:
            OSError, OverflowError: the address is not available.
        """
        self.connections = ConnectionTable(max_connections())
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        super().__init__((address.host, address.port), handler)

    def server_bind(self) -> None:
        """Bind without a DNS lookup, which HTTPServer would wait for."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.setblocking(False)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def _handle_request_noblock(self) -> None:
        """Accept all waiting connections before handling the next ones, so that clients take turns also here."""
        accepted: RoundRobinQueue[tuple[socket.socket, Any]] = RoundRobinQueue()
        with self.connections.computing_server():
            self._accept(accepted)
            while accepted:
                for client in list(accepted.clients):
                    self.process_request(*accepted.pop(client))
                self._accept(accepted)

    def _accept(self, accepted: RoundRobinQueue[tuple[socket.socket, Any]]) -> None:
        with suppress(OSError):
            while True:
                connection, address = self.get_request()
                accepted.push(address[0], (connection, address))

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread, or reject it if there are too many."""
        try:
            if self.connections.add(client_address[0], request):
                # `Thread.start` would wait until the thread runs
                _thread.start_new_thread(self.process_request_thread, (request, client_address))
                return
        except RuntimeError:
            self.handle_error(request, client_address)
        with suppress(OSError):
            request.setblocking(False)
            request.send(TOO_MANY_CONNECTIONS)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection, when it is the client's turn."""
        connection = self.connections.get(request)
        if connection is None:  # closed to make room
            super().shutdown_request(request)
            return
        connection.begin_computing()
        try:
            super().process_request_thread(request, client_address)
        finally:
            connection.end_computing()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.connections.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log broken connections as debug messages only."""
        logging.getLogger(__name__).debug("a connection from %s broke", client_address, exc_info=True)
