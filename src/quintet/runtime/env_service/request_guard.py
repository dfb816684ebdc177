"""Checks of a request before it is handled: token, host, type, size and time of its body."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from quintet.envs.service.payload import CONTENT_TYPES, JSON, MSGPACK, decode_payload
from quintet.runtime.serving import connections
from quintet.runtime.serving.address import Address
from quintet.runtime.serving.request_schema import RequestError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/docs", "/openapi.json"})
"""Paths without a token; they tell nothing of the clients."""


class RequestGuard:
    """ASGI middleware. The application gets the whole body, as JSON."""

    def __init__(self, app: App, address: Address, max_body_bytes: int) -> None:
        self._app, self._address = app, address
        self._max_body_bytes = max_body_bytes
        self._receiving_bytes = 0
        """Size of all large bodies that are being received or handled."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or respond with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            if scope["path"] not in OPEN_PATHS:
                self._address.authenticate(headers.get("authorization", ""), headers.get("host", ""))
            if scope["method"] in ("GET", "HEAD", "DELETE"):
                await self._app(scope, receive, send)
                return
            num_bytes = self._declared_bytes(headers)
        except RequestError as error:
            await respond(send, error)
            return
        self._receiving_bytes += num_bytes
        try:
            await self._handle(scope, receive, send, num_bytes, is_msgpack=_media_type(headers) != CONTENT_TYPES[JSON])
        finally:
            self._receiving_bytes -= num_bytes

    def _declared_bytes(self, headers: dict[str, str]) -> int:
        """Return the size of the body.

        Raises:
            RequestError: it has none, or a wrong type, or is too long.
        """
        if _media_type(headers) not in CONTENT_TYPES.values():
            types = " or ".join(CONTENT_TYPES.values())
            raise RequestError(f"Content-Type must be {types}", status=415, code="unsupported_media_type")
        if headers.get("content-encoding", "identity") != "identity":
            raise RequestError("send the body uncompressed", status=415, code="unsupported_media_type")
        if "content-length" not in headers:
            raise RequestError("send a Content-Length", status=411, code="length_required")
        num_bytes = int(headers["content-length"])
        if num_bytes > self._max_body_bytes:
            message = f"the body is larger than {self._max_body_bytes / (1 << 20):g} MiB"
            raise RequestError(message, status=413, code="too_large")
        if num_bytes > connections.LARGE_BODY_BYTES and self._receiving_bytes >= connections.MAX_LARGE_BYTES:
            message = "the server is receiving too many large bodies: try again later"
            raise RequestError(message, status=503, kind="server_error", code="overloaded")
        return num_bytes

    async def _handle(self, scope: Scope, receive: Receive, send: Send, num_bytes: int, *, is_msgpack: bool) -> None:
        seconds = connections.BODY_SECONDS + num_bytes / connections.BODY_BYTES_PER_SECOND
        try:
            async with asyncio.timeout(seconds):
                body = await _receive_body(receive)
            if is_msgpack:
                scope = {**scope, "headers": _as_json_headers(scope["headers"])}
                body = json.dumps(decode_payload(body, MSGPACK), default=_as_base64).encode()
        except TimeoutError:
            message = f"the body did not arrive within {seconds:.0f} seconds"
            await respond(send, RequestError(message, status=408, code="timeout"), close=True)
            return
        except ConnectionAbortedError:
            return
        except (ValueError, TypeError, RecursionError) as error:
            await respond(send, RequestError(str(error), code="bad_request"))
            return
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive_once() -> Message:
            return next(messages, None) or await receive()

        await self._app(scope, receive_once, send)


def _media_type(headers: dict[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _as_json_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    others = [(name, value) for name, value in headers if name not in (b"content-type", b"content-length")]
    return [*others, (b"content-type", CONTENT_TYPES[JSON].encode())]


def _as_base64(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} is not supported")


async def _receive_body(receive: Receive) -> bytes:
    """
    Raises:
        ConnectionAbortedError: the client has disconnected.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ConnectionAbortedError
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


async def respond(send: Send, error: RequestError, *, close: bool = False) -> None:
    """Respond with an error."""
    headers = [(b"content-type", b"application/json")]
    headers += [(b"connection", b"close")] if close else []
    headers += [(b"retry-after", b"1")] if error.status == 503 else []
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error_body(error)).encode()})


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the body of an error; VAGEN's clients show its `error`."""
    return {"error": str(error), "code": error.code}
