"""Batches of requests that a worker process of an environment service has received, and whose turn it is.

Clients take turns of `TURN_SECONDS`, and so do the sessions of a client: next is who has used the least time. So a
request for thousands of environments delays others by one turn, or by one environment that takes longer. The batches of
a session keep their order.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

HEAD = struct.Struct(">IQqq")
"""Before the body of a batch: its size, its number, and the hashes of its client and its session."""
RECEIVE_BYTES = 64 << 10
"""Maximum number of bytes that are received at once: memory for more would come from the kernel for each request."""
TURN_SECONDS = 0.001
"""Time after which another session is next. Turns of one request each would cost a tenth of the speed of batches."""
MAX_WAITING_BYTES = 256 << 20
"""Size of all batches in the process beyond which it receives no more."""


class ReceivedBatch:
    """Requests of one exchange, which are parsed at their first turn: the bodies of those that wait are smaller."""

    def __init__(self, number: int, body: bytes) -> None:
        self.number, self.num_bytes = number, len(body)
        self._body = body
        self._requests: Sequence[Any] = ()
        self.configs: Sequence[str | None] = ()
        self.form: Any = None
        self.max_bytes = self.result_bytes = 0
        """Maximum size of all results, and size of those so far."""
        self.index = 0
        """Index of the next request."""

    @property
    def is_done(self) -> bool:
        """Whether all requests were taken."""
        return not self._body and self.index == len(self._requests)

    def take(self) -> Sequence[Any]:
        """Return the next request."""
        if self._body:
            message = json.loads(self._body)
            self._body = b""
            self._requests, self.configs = message["requests"], message["configs"]
            self.form, self.max_bytes = message["format"], message["max_bytes"]
        self.index += 1
        request: Sequence[Any] = self._requests[self.index - 1]
        return request


@dataclass(slots=True)
class _SessionShare:
    seconds: float
    batches: deque[ReceivedBatch] = field(default_factory=deque)


@dataclass(slots=True)
class _ClientShare:
    seconds: float
    sessions: dict[int, _SessionShare] = field(default_factory=dict)


_seconds = attrgetter("seconds")


def _least(shares: Mapping[int, Any]) -> float:
    """Return the time of who is next, which newcomers start with: time without requests is no credit."""
    return min(map(_seconds, shares.values()), default=0.0)


class BatchTurns:
    """Batches of clients and their sessions."""

    def __init__(self) -> None:
        self._clients: dict[int, _ClientShare] = {}
        self.num_bytes = 0
        """Size of all batches."""

    def __bool__(self) -> bool:
        return bool(self._clients)

    def add(self, client: int, session: int, batch: ReceivedBatch) -> None:
        """Add the last batch of a session."""
        if client not in self._clients:
            self._clients[client] = _ClientShare(_least(self._clients))
        sessions = self._clients[client].sessions
        if session not in sessions:
            sessions[session] = _SessionShare(_least(sessions))
        sessions[session].batches.append(batch)
        self.num_bytes += batch.num_bytes

    def execute_next(self, execute: Callable[[ReceivedBatch], None]) -> None:
        """Call `execute`, which takes one request, with the batch whose turn it is, until the turn ends."""
        client, client_share = min(self._clients.items(), key=lambda item: item[1].seconds)
        session, session_share = min(client_share.sessions.items(), key=lambda item: item[1].seconds)
        batch, started, seconds = session_share.batches[0], time.monotonic(), 0.0
        while seconds < TURN_SECONDS and not batch.is_done:
            execute(batch)
            seconds = time.monotonic() - started
        client_share.seconds += seconds
        session_share.seconds += seconds
        if batch.is_done:
            self.num_bytes -= session_share.batches.popleft().num_bytes
            if not session_share.batches:
                del client_share.sessions[session]
            if not client_share.sessions:
                del self._clients[client]


class BatchReceiver:
    """Receives batches from the server, and adds them to the turns."""

    def __init__(self, connection: socket.socket, turns: BatchTurns) -> None:
        self._connection, self._turns = connection, turns
        self._input = bytearray()

    def receive(self) -> bool:
        """Add what has arrived; wait for a batch if there is none. Return False at the end of the connection."""
        while self._turns.num_bytes <= MAX_WAITING_BYTES:
            try:
                chunk = self._connection.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT if self._turns else 0)
            except BlockingIOError:
                break
            if not chunk:
                return False
            self._input += chunk
            self._add_complete()
        return True

    def _add_complete(self) -> None:
        start = 0
        while len(self._input) - start >= HEAD.size:
            num_bytes, number, client, session = HEAD.unpack_from(self._input, start)
            end = start + HEAD.size + num_bytes
            if len(self._input) < end:
                break
            self._turns.add(client, session, ReceivedBatch(number, bytes(self._input[start + HEAD.size : end])))
            start = end
        del self._input[:start]
