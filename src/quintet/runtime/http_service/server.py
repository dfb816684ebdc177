"""Servers of ASGI applications on uvicorn: address, limits, start and end."""

from __future__ import annotations

import socket
import threading
import time
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from quintet.errors import MachineError
from quintet.runtime.http_service import limits
from quintet.runtime.http_service.address import Address
from quintet.runtime.http_service.connections import ConnectionTable, LimitedProtocol
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.http_service.request_guard import ErrorBody
from quintet.runtime.http_service.turns import Turns

START_SECONDS = 60.0
"""Time for the application to start."""
START_POLL_SECONDS = 0.01
"""Interval at which it is checked whether the application has started."""


def listen(address: Address) -> socket.socket:
    """Return a socket that listens on an address.

    Raises:
        ConfigError: it would be open to other machines without a token.
        MachineError: the port is in use, or the host is not an address of this machine.
    """
    address.check()
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        listener = socket.create_server((address.host, address.port), family=family, backlog=socket.SOMAXCONN)
    except (OSError, OverflowError) as error:
        message = f"cannot listen on {address.host}:{address.port}: {error}"
        raise MachineError(message, "use another --port; 0 selects a free one") from error
    # inherited by the connections: uvicorn writes head and body of a response separately
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class LimitedServer(uvicorn.Server):
    """Server of an application with the limits of `limits.py`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        turns: Turns | None = None,
        error_body: ErrorBody = RequestError.plain_body,
        shutdown_seconds: int | None = None,
    ) -> None:
        """`turns` are the turns in which bytes of clients are parsed. Requests in progress are cancelled
        `shutdown_seconds` after the server is closed; None waits for them."""
        self.turns = turns or Turns()
        self._table = ConnectionTable(limits.max_connections())
        protocol = partial(LimitedProtocol, table=self._table, turns=self.turns, error_body=error_body)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast("Any", protocol),
                loop="asyncio",
                ws="none",
                proxy_headers=False,  # clients could name other clients, and so evade limits
                access_log=False,
                log_level="error",
                headers=[("Server", "quintet")],
                backlog=limits.ACCEPTED_AT_ONCE,
                timeout_keep_alive=limits.IDLE_SECONDS,
                timeout_graceful_shutdown=shutdown_seconds,
                h11_max_incomplete_event_size=limits.HEAD_BYTES,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and listen."""
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(socket.SOMAXCONN)  # `backlog` is how many connections asyncio accepts at once

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all connections, and the threads of the turns."""
        await super().shutdown(sockets)
        self.turns.close()

    async def on_tick(self, counter: int) -> bool:
        """Close connections, ten times per second; return whether the server ends."""
        self._table.close_overdue()
        return await super().on_tick(counter)


class BackgroundServer:
    """Server in a thread with its own event loop, which ends with the server."""

    def __init__(self, server: LimitedServer, address: Address, close_seconds: float) -> None:
        """Listen on the address. `close_seconds` is how long `close` waits for requests in progress.

        Raises:
            ConfigError: it would be open to other machines without a token.
            MachineError: the address is not available, or the application does not start.
        """
        self._listener = listen(address)
        self._server = server
        self._close_seconds = close_seconds
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"
        """Base URL of the routes."""
        self._thread = threading.Thread(target=self._run, name="http-server", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not server.started:
            if not self.is_running or time.monotonic() > deadline:
                self.close()
                raise MachineError("the server does not start", "see its output above")
            time.sleep(START_POLL_SECONDS)

    @property
    def is_running(self) -> bool:
        """Whether requests are handled."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop accepting connections, close those without a request, and wait at most `close_seconds` for the others.

        The event loop reads `should_exit` within 0.1 s.
        """
        self._server.should_exit = True
        self._thread.join(self._close_seconds)

    def _run(self) -> None:
        with self._listener:
            self._server.run(sockets=[self._listener])
