"""Parsing of bodies in the event loop of an environment service."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json


class FastJsonRequest(Request):
    """Request whose JSON is parsed by pydantic's parser: no other request is handled meanwhile, and of a body of 10 MB
    with long texts the standard library's takes 50 ms, this one 1 ms."""

    async def json(self) -> Any:
        """Return the parsed body.

        Raises:
            JSONDecodeError: it is not JSON.
        """
        try:
            return from_json(await self.body())
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None


class FastJsonRoute(APIRoute):
    """Route whose requests are `FastJsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Return the handler of FastAPI with another request."""
        handle = super().get_route_handler()

        async def handle_fast(request: Request) -> Response:
            response: Response = await handle(FastJsonRequest(request.scope, request.receive))
            return response

        return handle_fast
