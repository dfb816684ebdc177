"""HTTP/1.1 on one connection: requests with deadlines, responses, and streams."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus

import h11

from quintet.runtime.serving import connections
from quintet.runtime.serving.connections import Connection


class HttpConnection:
    """Reader of the successive requests of a connection."""

    def __init__(self, connection: Connection) -> None:
        self.is_answered = False
        """Whether the response to the current request has begun."""
        self._connection = connection
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=connections.HEAD_BYTES)
        self._idle_seconds = connections.HEAD_SECONDS

    async def receive_request(self) -> h11.Request | None:
        """Return the next request without its body; None if the client has closed the connection.

        Raises:
            h11.RemoteProtocolError: it is invalid, or larger than `HEAD_BYTES`.
            TimeoutError: it does not arrive in time.
            OSError: the connection is broken.
        """
        deadline = _deadline_after(self._idle_seconds)
        has_begun = False
        while (event := self._http.next_event()) is h11.NEED_DATA:
            received = await self._connection.receive(deadline)
            if not has_begun:
                has_begun, deadline = True, min(deadline, _deadline_after(connections.HEAD_SECONDS))
            self._http.receive_data(received)
        self.is_answered = False
        self._idle_seconds = connections.IDLE_SECONDS
        return event if isinstance(event, h11.Request) else None

    async def receive_body(self, seconds: float) -> bytes:
        """Return the body of the request.

        Raises:
            h11.RemoteProtocolError: the client has closed the connection.
            TimeoutError: it does not arrive within `seconds`.
            OSError: the connection is broken.
        """
        if self._http.they_are_waiting_for_100_continue:
            await self._send(h11.InformationalResponse(status_code=100, headers=[], reason="Continue"))
        deadline, body = _deadline_after(seconds), bytearray()
        while not isinstance(event := self._http.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                body += event.data
            else:
                self._http.receive_data(await self._connection.receive(deadline))
        return bytes(body)

    async def respond(self, status: int, content_type: str, data: bytes, headers: Mapping[str, str]) -> None:
        """Send a whole response.

        Raises:
            TimeoutError: the client does not receive it.
            OSError: the connection is broken.
        """
        head = self._response(status, {"Content-Type": content_type, "Content-Length": str(len(data)), **headers})
        await self._send(head, h11.Data(data), h11.EndOfMessage())

    async def begin_stream(self) -> None:
        """Send the head of a stream of events; same errors as `respond`."""
        await self._send(self._response(200, {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}))

    async def send_chunk(self, data: bytes) -> None:
        """Send a part of the stream; same errors as `respond`."""
        await self._send(h11.Data(data))

    async def end_stream(self) -> None:
        """Send the end of the stream; same errors as `respond`."""
        await self._send(h11.EndOfMessage())

    def begin_next(self) -> bool:
        """Prepare for the next request; return False if the connection has to be closed."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def _response(self, status: int, headers: Mapping[str, str]) -> h11.Response:
        self.is_answered = True
        if self._http.their_state is h11.SEND_BODY:
            self._http.next_event()  # the end of the request, if it has no body
        has_unread_body = self._http.their_state is not h11.DONE
        all_headers = {"Server": "quintet", **headers} | ({"Connection": "close"} if has_unread_body else {})
        return h11.Response(status_code=status, headers=list(all_headers.items()), reason=HTTPStatus(status).phrase)

    async def _send(self, *events: h11.Event) -> None:
        await self._connection.send(b"".join(self._http.send(event) or b"" for event in events))


def _deadline_after(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds
