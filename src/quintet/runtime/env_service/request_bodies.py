"""Bodies of requests to an environment service: whole, and as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quintet.envs.service.payload import CONTENT_TYPES, JSON, MSGPACK, decode_payload
from quintet.runtime.env_service.schema import MAX_SEPARATORS
from quintet.runtime.http_service.json_limits import check_separators
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.http_service.request_guard import RequestBodies, media_type


class JsonBodies:
    """ASGI middleware that receives the body of a request, and converts msgpack to JSON."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._bodies = RequestBodies(CONTENT_TYPES.values(), max_bytes=max_body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request.

        Raises:
            RequestError: its body is refused.
            ClientDisconnect: the client has disconnected.
        """
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "DELETE"):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        async with self._bodies.receive(request) as body:
            if media_type(request.headers) != CONTENT_TYPES[JSON]:
                scope = {**scope, "headers": _as_json_headers(scope["headers"])}
                body = _msgpack_to_json(body)
            check_separators(body, MAX_SEPARATORS)
            messages: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

            async def receive_once() -> Message:
                return next(messages, None) or await receive()

            await self._app(scope, receive_once, send)


def _msgpack_to_json(body: bytes) -> bytes:
    try:
        return json.dumps(decode_payload(body, MSGPACK), default=_as_base64).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(str(error), code="bad_request") from error


def _as_json_headers(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    others = [(name, value) for name, value in headers if name not in (b"content-type", b"content-length")]
    return [*others, (b"content-type", CONTENT_TYPES[JSON].encode())]


def _as_base64(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} is not supported")
