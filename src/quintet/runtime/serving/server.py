"""OpenAI-compatible server."""

from __future__ import annotations

from quintet.runtime.http_service.address import Address
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.http_service.request_guard import RequestGuard
from quintet.runtime.http_service.server import BackgroundServer, LimitedServer
from quintet.runtime.http_service.turns import Turns
from quintet.runtime.serving.app import REST_RATIO, ServingApp
from quintet.runtime.serving.request_handler import RequestHandler

CLOSE_SECONDS = 0.5
"""Time for closing the connections without a request."""


class ServingServer(BackgroundServer):
    """HTTP server in a thread. Closing it leaves the request handler open, which then fails unfinished requests."""

    def __init__(self, handler: RequestHandler, address: Address) -> None:
        """Listen on the address, and handle requests in a thread; raises as `BackgroundServer`."""
        turns = Turns(REST_RATIO)
        app = RequestGuard(ServingApp(handler, turns), address, lambda error: error.body())
        super().__init__(LimitedServer(app, turns=turns, error_body=RequestError.body), address, CLOSE_SECONDS)
