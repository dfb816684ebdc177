"""HTTP server of an environment service, in a thread with its own event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from quintet.errors import MachineError
from quintet.runtime.env_service.app import ServiceSettings, build_app
from quintet.runtime.env_service.served_envs import ServedEnvs
from quintet.runtime.env_service.worker_pool import check_platform
from quintet.runtime.serving import connections

START_SECONDS = 60.0
"""Time for the first worker processes to be forked."""
SHUTDOWN_SECONDS = 5
"""Time for requests in progress when the server is closed."""


class DeadlineProtocol(H11Protocol):
    """HTTP/1.1 connections whose clients have a time limit for request line and headers."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start the time limit of the first request."""
        super().connection_made(transport)
        self._restart_deadline()

    def data_received(self, data: bytes) -> None:
        """Start the time limit of a request that has begun, unless it has."""
        super().data_received(data)
        if self._is_waiting:
            if self._deadline is None:
                self._restart_deadline()
        else:
            self._cancel_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._cancel_deadline()
        super().connection_lost(exc)

    @property
    def _is_waiting(self) -> bool:
        """Whether the head of the next request is incomplete."""
        return self.cycle is None or self.cycle.response_complete

    def _restart_deadline(self) -> None:
        self._deadline = self.loop.call_later(connections.HEAD_SECONDS, self._close_if_waiting)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_if_waiting(self) -> None:
        self._deadline = None
        if self._is_waiting and not self.transport.is_closing():
            self.transport.abort()


class EnvServiceServer:
    """Environment service; closing it ends its worker processes."""

    def __init__(self, envs: ServedEnvs, settings: ServiceSettings) -> None:
        """Listen on the address, and handle requests in a thread.

        Raises:
            ConfigError: it would be open to other machines without a token.
            MachineError: the address is not available, or the server does not start.
        """
        address = settings.address
        address.check()
        check_platform()
        try:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            self._socket = socket.create_server((address.host, address.port), family=family, backlog=socket.SOMAXCONN)
        except (OSError, OverflowError) as error:
            message = f"cannot listen on {address.host}:{address.port}: {error}"
            raise MachineError(message, "use another --port; 0 selects a free one") from error
        # inherited by the connections: uvicorn writes head and body of a response separately
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server = uvicorn.Server(_uvicorn_config(build_app(envs, settings)))
        self._host, self._port = address.host, self._socket.getsockname()[1]
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="env-service", daemon=True)
        self._thread.start()
        if not self._started.wait(START_SECONDS) or not self._server.started:
            self.close()
            raise MachineError("the environment service does not start", "see its output above")

    @property
    def url(self) -> str:
        """Base URL of the routes."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    @property
    def is_running(self) -> bool:
        """Whether requests are handled."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop after the requests in progress."""
        self._server.should_exit = True
        self._thread.join(SHUTDOWN_SECONDS + START_SECONDS)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        serve = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not serve.done():
            await asyncio.sleep(0.01)
        self._started.set()
        await serve


def _uvicorn_config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=DeadlineProtocol,
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        limit_concurrency=connections.max_connections(),
        timeout_keep_alive=int(connections.IDLE_SECONDS),
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        h11_max_incomplete_event_size=connections.HEAD_BYTES,
    )
