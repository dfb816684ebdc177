"""Checks of a request before it is handled: token, host, type, size and time of its body."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quintet.rollout.engines.request_queue import client_name
from quintet.runtime.http_service import limits
from quintet.runtime.http_service.address import Address
from quintet.runtime.http_service.request_error import RequestError

ErrorBody = Callable[[RequestError], Mapping[str, Any]]
"""Returns the JSON body of an error response."""


class RequestGuard:
    """ASGI middleware that authenticates requests, and responds to a `RequestError` of the application, which it raises
    before its response has begun."""

    def __init__(
        self,
        app: ASGIApp,
        address: Address,
        error_body: ErrorBody,
        open_paths: Collection[str] = ("/health",),
        of_route: Callable[[RequestError, str], RequestError] = lambda error, _: error,
    ) -> None:
        """`open_paths` need no token; their responses contain no data of clients. `of_route` converts an error to the
        form of the route with a path."""
        self._app = app
        self._address = address
        self._error_body = error_body
        self._open_paths = open_paths
        self._of_route = of_route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or respond with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with suppress(ClientDisconnect):
            await self._handle(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            if scope["path"].rstrip("/") not in self._open_paths:
                self._address.authenticate(sent_key(headers), headers.get("host", ""))
            await self._app(scope, receive, send)
        except RequestError as error:
            response = json_response(self._error_body(self._of_route(error, scope["path"])), error.status)
            # the client does not send the announced body, or only slowly; uvicorn discards other unread bodies
            if "expect" in headers or error.status == 408:
                response.headers["Connection"] = "close"
            await response(scope, receive, send)


class RequestBodies:
    """The bodies that a server receives at the same time, with their limits."""

    def __init__(
        self,
        media_types: Collection[str],
        *,
        max_bytes: int = limits.MAX_BODY_BYTES,
        max_large_bytes_per_client: int = limits.MAX_LARGE_BYTES,
    ) -> None:
        """Accept bodies of `media_types` with at most `max_bytes` each. Large ones of a client, which are received or
        handled at the same time, have at most `max_large_bytes_per_client`, and one more."""
        self._media_types = media_types
        self._max_bytes = max_bytes
        self._max_large_bytes_per_client = max_large_bytes_per_client
        self._large_bytes: Counter[str] = Counter()
        """Sizes of the large bodies that are received or handled, by client."""

    @asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[bytes]:
        """Receive the body of a request; it counts as handled at the end of the context.

        Raises:
            RequestError: it is not accepted, or arrives too slowly.
            ClientDisconnect: the client has disconnected.
        """
        num_bytes = self._declared_bytes(request.headers)
        client, held = client_host(request), 0

        def reserve(size: int) -> None:
            nonlocal held
            if size > max(held, limits.LARGE_BODY_BYTES):
                self._check_large_bytes(client, held)
                self._large_bytes[client] += size - held
                held = size

        try:
            yield await self._receive_in_time(request, num_bytes, reserve)
        finally:
            self._large_bytes[client] -= held
            self._large_bytes += Counter()  # drops clients without large bodies

    async def _receive_in_time(self, request: Request, num_bytes: int | None, reserve: Callable[[int], None]) -> bytes:
        """Return a body of that size; if it is None, of any size up to the maximum. `reserve` is called with the size
        before so much is held. Raises as `receive`."""
        maximum = self._max_bytes if num_bytes is None else num_bytes
        reserve(num_bytes or 0)
        body = bytearray()  # a list of parts takes twice the processor time: each part is memory that the kernel clears
        start, seconds = asyncio.get_running_loop().time(), _body_seconds(num_bytes or 0)
        try:
            async with asyncio.timeout_at(start + seconds) as timeout:
                async for part in request.stream():
                    body += part
                    if len(body) > maximum:
                        raise self._too_large(num_bytes)
                    if num_bytes is None:
                        reserve(len(body))
                        seconds = _body_seconds(len(body))
                        timeout.reschedule(start + seconds)
                return bytes(body)
        except TimeoutError:
            message = f"the body did not arrive within {seconds:.0f} seconds"
            raise RequestError(message, status=408, code="timeout") from None

    def _too_large(self, num_bytes: int | None) -> RequestError:
        if num_bytes is not None:
            return RequestError("the body is longer than its Content-Length", status=413, code="too_large")
        return RequestError(
            f"the body is larger than {self._max_bytes / (1 << 20):g} MiB", status=413, code="too_large"
        )

    def _declared_bytes(self, headers: Mapping[str, str]) -> int | None:
        """Return the size of the body; None if it is sent in chunks.

        Raises:
            RequestError: it has none, or a wrong type, or is too long.
        """
        if media_type(headers) not in self._media_types:
            message = f"Content-Type must be {' or '.join(self._media_types)}"
            raise RequestError(message, status=415, code="unsupported_media_type")
        if headers.get("content-encoding", "identity") != "identity":
            raise RequestError("send the body uncompressed", status=415, code="unsupported_media_type")
        is_chunked = headers.get("transfer-encoding", "").strip().lower() == "chunked"
        # a Transfer-Encoding would take precedence over the size that is checked
        if is_chunked == ("content-length" in headers) or ("transfer-encoding" in headers and not is_chunked):
            message = "send a Content-Length, or chunks without one"
            raise RequestError(message, status=411, code="length_required")
        if is_chunked:
            return None
        num_bytes = int(headers["content-length"])
        if num_bytes > self._max_bytes:
            raise self._too_large(None)
        return num_bytes

    def _check_large_bytes(self, client: str, held: int) -> None:
        """Check the other large bodies; this one holds `held` bytes so far."""
        is_client_full = self._large_bytes[client] - held >= self._max_large_bytes_per_client
        if is_client_full or self._large_bytes.total() - held >= limits.MAX_LARGE_BYTES:
            message = "the server is receiving too many large bodies: try again later"
            raise RequestError(message, status=503, kind="server_error", code="overloaded")


class PiecewiseResponse(Response):
    """Response whose body is sent in pieces. Its end comes after the client has received nearly all, so that what the
    request holds until then also bounds the bytes that wait for slow clients."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response.

        Raises:
            ClientDisconnect: the client receives too slowly.
        """
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = self.body
        try:
            async with asyncio.timeout(limits.SEND_SECONDS + len(body) / limits.BODY_BYTES_PER_SECOND):
                for start in range(0, len(body), limits.SEND_BYTES):
                    piece = body[start : start + limits.SEND_BYTES]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            raise ClientDisconnect from None


def json_response(body: Mapping[str, Any], status: int = 200) -> Response:
    """Return a response of JSON; a busy server asks the client to try again after a second."""
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return PiecewiseResponse(json.dumps(body), status, headers, "application/json")


def client_host(request: Request) -> str:
    """Return the IP address of a request's client."""
    return "" if request.client is None else request.client.host


def sent_key(headers: Headers) -> str:
    """Return the value of the header that has a client's key; Anthropic's clients have one of their own."""
    return headers.get("authorization") or headers.get("x-api-key", "")


def client_of(request: Request) -> str:
    """Return the name of a request's client: its address and key."""
    return client_name(client_host(request), sent_key(request.headers).removeprefix("Bearer ").strip())


def media_type(headers: Mapping[str, str]) -> str:
    """Return the media type of a request's body."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _body_seconds(num_bytes: int) -> float:
    """Return the time in which a client has to send so much of a body."""
    return limits.BODY_SECONDS + num_bytes / limits.BODY_BYTES_PER_SECOND
