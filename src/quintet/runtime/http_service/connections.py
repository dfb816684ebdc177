"""Limits of connections that uvicorn does not have: their number, and deadlines of their clients."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter, defaultdict
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from quintet.runtime.http_service import limits
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.http_service.request_guard import ErrorBody
from quintet.runtime.http_service.turns import Turns


class ConnectionTable:
    """Open connections. No client can use so many that others cannot connect."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._connections: dict[LimitedProtocol, None] = {}
        """In the order in which they were opened."""
        self._idle: defaultdict[str, dict[LimitedProtocol, None]] = defaultdict(dict)
        """Connections of each client that can make room, the one that is idle for longest first."""
        self._refused: dict[LimitedProtocol, None] = {}
        """Connections beyond the maximum, which have their response."""
        self._counts: Counter[str] = Counter()
        self._checked_at = time.monotonic()
        self.receive_buffer = bytearray(limits.RECEIVE_BYTES)
        """Where bytes of all connections are received, one after the other: the kernel would clear new buffers."""

    def add(self, connection: LimitedProtocol) -> bool:
        """Add a connection; return False if there are too many. A connection that is idle makes room: one of the same
        client if it has all that a client may have, else one of the client with most. A connection on which a request
        arrives or is handled stays.
        """
        client_to_evict = None
        reserved = max(1, self._max_connections // limits.RESERVED_SHARE)
        if self._counts[connection.client_host] >= self._max_connections - reserved:
            client_to_evict = connection.client_host
        elif len(self._connections) >= self._max_connections:
            client_to_evict = max(self._counts, key=self._counts.__getitem__)
        if client_to_evict is not None and not self._evict(client_to_evict):
            return False
        self._connections[connection] = None
        self._counts[connection.client_host] += 1
        return True

    def remove(self, connection: LimitedProtocol) -> None:
        """Remove a connection, unless it was closed to make room."""
        self._refused.pop(connection, None)
        self._note_busy(connection)
        if connection in self._connections:
            del self._connections[connection]
            self._counts[connection.client_host] -= 1
            self._counts += Counter()  # drops clients without connections

    def update(self, connection: LimitedProtocol) -> None:
        """Note whether a connection is idle; called whenever that can have changed."""
        if connection.is_idle and connection in self._connections:
            self._idle[connection.client_host][connection] = None
        else:
            self._note_busy(connection)

    def close_overdue(self) -> None:
        """Close the connections whose clients have exceeded a time limit. Time in which this process was not able to
        receive, on a busy machine, does not count."""
        pause = time.monotonic() - self._checked_at
        self._checked_at += pause
        for connection in self._connections if pause > limits.PAUSE_SECONDS else ():
            connection.postpone(pause)
        for connection in [candidate for candidate in self._connections if candidate.is_overdue]:
            connection.transport.abort()
        for connection in [candidate for candidate in self._refused if candidate.is_overdue]:
            connection.transport.abort()
        for connection in self._connections:
            if connection.is_silent:
                self.update(connection)

    def refuse(self, connection: LimitedProtocol) -> bool:
        """Note a connection that is told that there are too many; return False if there are too many of these."""
        if len(self._refused) >= limits.MAX_REFUSED:
            return False
        self._refused[connection] = None
        return True

    def _evict(self, client: str) -> bool:
        """Close the connection of a client that is idle for longest; return False if there is none."""
        connection = next(iter(self._idle.get(client, ())), None)
        if connection is None:
            return False
        self.remove(connection)
        connection.make_room()
        return True

    def _note_busy(self, connection: LimitedProtocol) -> None:
        idle = self._idle.get(connection.client_host)
        if idle is not None:
            idle.pop(connection, None)
            if not idle:
                del self._idle[connection.client_host]


class LimitedProtocol(H11Protocol, asyncio.BufferedProtocol):
    """HTTP/1.1 connection of a limited number. Its client has a time limit for request line and headers, and for
    receiving; its bytes are parsed in turns of the clients."""

    def __init__(self, *args: Any, table: ConnectionTable, turns: Turns, error_body: ErrorBody, **options: Any) -> None:
        super().__init__(*args, **options)
        self.client_host = ""
        self._table = table
        self._turns = turns
        self._error_body = error_body
        self._receiving_began = 0.0
        """Processor time of the event loop's thread when it began to receive the last bytes."""
        self._num_queued = 0
        """Number of received blocks of bytes that wait to be parsed."""
        self._head_began: float | None = time.monotonic()
        """When the client connected, or began the request whose head is incomplete."""
        self._has_sent = False
        """Whether the client has sent anything."""
        self._refused_at: float | None = None
        """When the client was told that there are too many connections."""
        self._num_discarded = 0
        """Number of bytes that were received since then."""
        self._sending_began: float | None = None
        """Since when the client has not received all bytes that were sent."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a request has arrived that has no response yet, and the client has all responses."""
        if self._num_queued or self._sending_began is not None or self._refused_at is not None:
            return False
        return self.is_silent if self.cycle is None else self._is_between_requests

    @property
    def is_silent(self) -> bool:
        """Whether the client has connected some time ago, and has not sent anything."""
        if self.cycle is not None or self._num_queued or self._has_sent:
            return False
        return self._head_began is not None and time.monotonic() - self._head_began > limits.SILENT_SECONDS

    @property
    def _is_between_requests(self) -> bool:
        """Whether the last request is complete, has its response, and no byte of the next one has been parsed."""
        states = {self.conn.our_state, self.conn.their_state}
        return self._head_began is None and states == {h11.IDLE} and not self.conn.trailing_data[0]

    @property
    def is_overdue(self) -> bool:
        """Whether the client has exceeded a time limit."""
        now = time.monotonic()
        if self._refused_at is not None:
            return now - self._refused_at > limits.REFUSED_SECONDS
        is_sending_late = self._head_began is not None and now - self._head_began > limits.HEAD_SECONDS
        is_receiving_late = self._sending_began is not None and now - self._sending_began > limits.SEND_SECONDS
        return is_receiving_late or (is_sending_late and not self._num_queued)

    @property
    def _waits_for_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _has_large_body(self) -> bool:
        """Whether a large body, or one of unknown size, is being received."""
        if self._waits_for_head or not self.cycle.more_body:
            return False
        headers = dict(self.headers)
        return b"transfer-encoding" in headers or int(headers.get(b"content-length", 0)) > limits.LARGE_BODY_BYTES

    def postpone(self, seconds: float) -> None:
        """Give the client more time."""
        self._head_began = None if self._head_began is None else self._head_began + seconds
        self._sending_began = None if self._sending_began is None else self._sending_began + seconds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Add the connection, or close it if there are too many."""
        super().connection_made(transport)
        self.client_host = self.client[0] if self.client else ""
        transport.set_write_buffer_limits(0)  # any byte that the client does not receive calls `pause_writing`
        if not self._table.add(self):
            self._refuse(transport)

    def make_room(self) -> None:
        """Close an idle connection. A client that has not had any response is told why."""
        if self.cycle is None:
            self._refuse(self.transport)
        else:
            self.transport.close()

    def _refuse(self, transport: asyncio.Transport) -> None:
        """Respond that there are too many connections, and discard what the client sends until it has the response."""
        self._refused_at = time.monotonic()
        transport.write(closing_response(503))
        if self._table.refuse(self):
            transport.write_eof()
        else:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._table.remove(self)
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return where to receive bytes; `buffer_updated` follows before any other connection receives."""
        self._receiving_began = time.thread_time()
        return self._table.receive_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the bytes when it is the client's turn. Until then, no more are received."""
        if self._refused_at is not None:
            self._discard(nbytes)
            return
        self._has_sent = True
        parse = partial(self._parse, bytes(memoryview(self._table.receive_buffer)[:nbytes]))
        seconds = time.thread_time() - self._receiving_began
        self._num_queued += 1
        self._table.update(self)
        self._turns.call(self.client_host, parse, is_large=self._has_large_body, seconds=seconds)
        if self._num_queued:
            self.transport.pause_reading()

    def _discard(self, nbytes: int) -> None:
        """Receive from a refused client no more than a limit; from then on, its system waits."""
        self._num_discarded += nbytes
        if self._num_discarded > limits.REFUSED_BYTES:
            self.transport.pause_reading()

    def on_response_complete(self) -> None:
        """Note that the connection is idle, unless the next request has arrived."""
        super().on_response_complete()
        self._table.update(self)

    def pause_writing(self) -> None:
        """Start the time limit of a client that does not receive."""
        super().pause_writing()
        self._sending_began = time.monotonic()

    def resume_writing(self) -> None:
        """End the time limit of a client that has received all."""
        super().resume_writing()
        self._sending_began = None
        self._table.update(self)

    def send_400_response(self, msg: str) -> None:
        """Respond to bytes that are not HTTP, or have too large headers; called while the error is handled."""
        error = sys.exc_info()[1]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
            message = f"request line and headers are larger than {limits.HEAD_BYTES >> 10} KiB"
            problem = RequestError(message if status == 431 else str(error or msg), status=status, code="bad_request")
            self.transport.write(closing_response(status, json.dumps(self._error_body(problem))))
        self.transport.close()

    def _parse(self, data: bytes) -> None:
        self._num_queued -= 1
        if self.transport.is_closing():
            return
        try:
            self.data_received(data)
        except ValueError:  # h11 converts a length of thousands of digits
            self.send_400_response("bad Content-Length")
        if not self._waits_for_head:
            self._head_began = None
        elif self._head_began is None:
            self._head_began = time.monotonic()
        if not self._num_queued and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()
        self._table.update(self)


def closing_response(status: int, body: str = "") -> bytes:
    """Return a response with a JSON body, or without one, after which the connection is closed."""
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += ["Content-Type: application/json"] if body else ["Retry-After: 1"]
    return "\r\n".join([*lines, "", body]).encode()
