"""HTTP server: authentication, routes, and clients that disconnect."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import h11

from quintet.errors import MachineError
from quintet.rollout.engines.async_engine import EngineDeadError
from quintet.runtime.serving import connections
from quintet.runtime.serving.address import Address
from quintet.runtime.serving.connection_server import ConnectionServer
from quintet.runtime.serving.connections import Connection, ConnectionTable
from quintet.runtime.serving.http_connection import HttpConnection
from quintet.runtime.serving.request_handler import PendingCompletion, RequestHandler
from quintet.runtime.serving.request_schema import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    OpenAiBody,
    RequestError,
    RewardBody,
    parse,
)
from quintet.runtime.serving.responses import completion_body, generate_body, iter_events, load_status_body, models_body

T = TypeVar("T")
MAX_BODY_BYTES = 16 << 20
"""Maximum size of a request's body."""
SESSION_HEADER = "x-quintet-session"
SESSION_PATH = re.compile(r"/sessions/([^/]+)(/.*)?")


class ServingServer:
    """HTTP server in a thread. Closing it leaves the request handler open, which then fails unfinished requests."""

    def __init__(self, handler: RequestHandler, address: Address) -> None:
        """Listen on the address, and handle requests in a thread.

        Raises:
            ConfigError: it would be open to other machines without a token.
            MachineError: the address is not available.
        """
        address.check()

        async def handle(connection: Connection, table: ConnectionTable) -> None:
            await _ConnectionHandler(handler, address, connection, table).run()

        try:
            self._server = ConnectionServer(address, handle)
        except (OSError, OverflowError) as error:
            message = f"cannot listen on {address.host}:{address.port}: {error}"
            raise MachineError(message, "use another --port; 0 selects a free one") from error
        self._host = address.host

    @property
    def url(self) -> str:
        """Base URL of the routes."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.port}"

    def close(self) -> None:
        """Stop accepting requests."""
        self._server.close()


class _ConnectionHandler:
    """Handler of one connection, with one request after another."""

    def __init__(
        self, requests: RequestHandler, address: Address, connection: Connection, table: ConnectionTable
    ) -> None:
        self._requests = requests
        self._address = address
        self._connection = connection
        self._table = table
        self._http = HttpConnection(connection)
        self._headers: Mapping[str, str] = {}

    async def run(self) -> None:
        """Handle requests until the connection is closed.

        Raises:
            OSError: it broke.
        """
        try:
            while (request := await self._http.receive_request()) is not None:
                await self._handle(request)
                if not self._http.begin_next():
                    return
        except h11.RemoteProtocolError as error:
            message = f"request line and headers are larger than {connections.HEAD_BYTES >> 10} KiB"
            message = message if error.error_status_hint == 431 else str(error)
            await self._send_error(RequestError(message, status=error.error_status_hint, code="bad_request"))

    async def _handle(self, request: h11.Request) -> None:
        """Handle a request of any method, and send errors."""
        self._headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        try:
            await self._dispatch(request.method.decode("latin-1"), request.target.decode("latin-1"))
        except RequestError as error:
            await self._send_error(error)
        except EngineDeadError as error:
            await self._send_error(RequestError(str(error), status=503, kind="server_error", code="engine_gone"))
        except ValueError as error:
            await self._send_error(RequestError(str(error)))
        except (OSError, h11.RemoteProtocolError):
            raise
        except Exception as error:
            logging.getLogger(__name__).exception("a request failed")
            message = f"{type(error).__name__}: {error}"
            await self._send_error(RequestError(message, status=500, kind="server_error"))
            raise ConnectionAbortedError(message) from error

    async def _dispatch(self, method: str, target: str) -> None:
        path = unquote(urlsplit(target).path).rstrip("/") or "/"
        if path == "/health" and method == "GET":
            await self._send_health()
            return
        self._address.authenticate(self._headers.get("authorization", ""), self._headers.get("host", ""))
        session = self._headers.get(SESSION_HEADER)
        if match := SESSION_PATH.fullmatch(path):
            session, path = match[1], match[2] or "/session"
        route = _ROUTES.get(path)
        is_hidden = path in _CONTROL_ROUTES and not self._requests.can_sleep
        if route is None or is_hidden or (path in _SESSION_ROUTES and session is None):
            raise RequestError(f"unknown path {path}", status=404, code="not_found")
        if method not in route:
            raise RequestError(f"{path} supports only {' or '.join(route)}", status=405, code="method_not_allowed")
        await route[method](self, session)

    def _body_bytes(self) -> int:
        """Return the size of the body.

        Raises:
            RequestError: the body is not JSON, has no length, or is too long.
        """
        if self._headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RequestError("Content-Type must be application/json", status=415, code="unsupported_media_type")
        if self._headers.get("content-encoding", "identity") != "identity":
            raise RequestError("send the body uncompressed", status=415, code="unsupported_media_type")
        if "content-length" not in self._headers:
            raise RequestError("send a Content-Length", status=411, code="length_required")
        num_bytes = int(self._headers["content-length"])
        if num_bytes > MAX_BODY_BYTES:
            raise RequestError(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413, code="too_large")
        return num_bytes

    async def _with_body(self, function: Callable[[bytes], T]) -> T:
        """Call a function with the body of the request, in another thread.

        Raises:
            RequestError: the body is not accepted, or arrives too slowly.
        """
        num_bytes = self._body_bytes()
        seconds = connections.BODY_SECONDS + num_bytes / connections.BODY_BYTES_PER_SECOND
        async with self._table.body(self._connection, num_bytes):
            try:
                body = await self._http.receive_body(seconds)
            except TimeoutError:
                message = f"the body did not arrive within {seconds:.0f} seconds"
                raise RequestError(message, status=408, code="timeout") from None
            return await self._connection.compute(lambda: function(body))

    async def _send_health(self) -> None:
        engine_error = self._requests.engine.error
        if engine_error is not None:
            raise RequestError(
                f"the engine has died: {engine_error}", status=503, kind="server_error", code="engine_gone"
            )
        await self._send_json({"status": "ok"})

    async def _send_models(self, _: str | None) -> None:
        await self._send_json(models_body(self._requests))

    async def _sleep(self, _: str | None) -> None:
        await self._connection.compute(lambda: self._requests.engine.call(lambda engine: engine.sleep()))
        await self._send_json({"asleep": True})

    async def _wake_up(self, _: str | None) -> None:
        await self._connection.compute(lambda: self._requests.engine.call(lambda engine: engine.wake_up()))
        await self._send_json({"asleep": False})

    async def _send_load(self, _: str | None) -> None:
        await self._send_json(load_status_body(self._requests.engine))

    async def _send_sessions(self, _: str | None) -> None:
        await self._send_json({"sessions": self._requests.sessions()})

    async def _send_session(self, name: str | None) -> None:
        session = self._requests.session(str(name))
        lines = await self._connection.compute(
            lambda: "".join(f"{exchange.to_json()}\n" for exchange in session.exchanges)
        )
        await self._http.respond(200, "application/jsonl", lines.encode(), {})

    async def _end_session(self, name: str | None) -> None:
        self._requests.end_session(str(name))
        await self._send_json({"deleted": name})

    async def _reward(self, name: str | None) -> None:
        body = await self._with_body(lambda data: parse(RewardBody, data))
        self._requests.session(str(name)).reward(body.reward)
        await self._send_json({"rewarded": name})

    async def _complete_chat(self, session: str | None) -> None:
        await self._run(ChatBody, session)

    async def _complete(self, session: str | None) -> None:
        await self._run(CompletionBody, session)

    async def _generate(self, session: str | None) -> None:
        await self._run(GenerateBody, session)

    async def _run(self, kind: type[ChatBody | CompletionBody | GenerateBody], session_name: str | None) -> None:
        """Complete a request, or abort it if the client disconnects."""
        updates = _Updates()
        client = self._connection.client

        def begin(data: bytes) -> PendingCompletion:
            body = parse(kind, data)
            session = None if session_name is None else self._requests.session(session_name, create=True)
            return self._requests.begin(body, session, client, updates.notify)

        job = await self._with_body(begin)
        self._connection.end_computing()
        try:
            with self._connection.on_disconnect(updates.disconnect):
                if isinstance(job.body, OpenAiBody) and job.body.stream:
                    await self._stream(job, updates)
                else:
                    await updates.wait_until_done(job)
            if not self._http.is_answered:
                await self._send_json(await self._connection.compute(lambda: self._response(job)))
        finally:
            self._requests.end(job)

    def _response(self, job: PendingCompletion) -> Mapping[str, Any]:
        finished = [generation for generation in job.pending.generations if generation is not None]
        choices = [self._requests.choice(job, index, generation) for index, generation in enumerate(finished)]
        self._requests.record(job, choices)
        is_openai = isinstance(job.body, OpenAiBody)
        return completion_body(self._requests, job, choices) if is_openai else generate_body(choices[0])

    async def _stream(self, job: PendingCompletion, updates: _Updates) -> None:
        """Send server-sent events."""
        await self._http.begin_stream()
        async for message in iter_events(self._requests, job, updates.wait):
            await self._http.send_chunk(_event(message))
        await self._http.send_chunk(b"data: [DONE]\n\n")
        await self._http.end_stream()

    async def _send_json(self, message: Mapping[str, Any], status: int = 200) -> None:
        headers = {"Retry-After": "1"} if status in (429, 503) else {}
        await self._http.respond(status, "application/json", json.dumps(message).encode(), headers)

    async def _send_error(self, error: RequestError) -> None:
        """Send an error as the response, or as the last event of a stream."""
        with suppress(OSError):
            if not self._http.is_answered:
                await self._send_json(error.body(), error.status)
                return
            await self._http.send_chunk(_event(error.body()))
            await self._http.end_stream()


class _Updates:
    """Signals of the engine's thread and of the client to the task that waits for a completion."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._is_disconnected = False

    def notify(self) -> None:
        """Wake the task; called in any thread."""
        with suppress(RuntimeError):  # the server is closed
            self._loop.call_soon_threadsafe(self._event.set)

    def disconnect(self) -> None:
        """Wake the task because the client has disconnected."""
        self._is_disconnected = True
        self._event.set()

    async def wait(self) -> None:
        """Wait for the next update.

        Raises:
            ConnectionAbortedError: the client has disconnected.
        """
        await self._event.wait()
        self._event.clear()
        if self._is_disconnected:
            raise ConnectionAbortedError

    async def wait_until_done(self, job: PendingCompletion) -> None:
        """Wait until all completions are finished.

        Raises:
            ConnectionAbortedError: the client has disconnected.
            ValueError, EngineDeadError: see `PendingRequests.done`.
        """
        while not job.pending.done:
            await self.wait()


Route = Mapping[str, Callable[[_ConnectionHandler, str | None], Awaitable[None]]]
_ROUTES: Mapping[str, Route] = {
    "/v1/models": {"GET": _ConnectionHandler._send_models},
    "/v1/chat/completions": {"POST": _ConnectionHandler._complete_chat},
    "/v1/completions": {"POST": _ConnectionHandler._complete},
    "/generate": {"POST": _ConnectionHandler._generate},
    "/load": {"GET": _ConnectionHandler._send_load},
    "/sessions": {"GET": _ConnectionHandler._send_sessions},
    "/session": {"GET": _ConnectionHandler._send_session, "DELETE": _ConnectionHandler._end_session},
    "/reward": {"POST": _ConnectionHandler._reward},
    "/sleep": {"POST": _ConnectionHandler._sleep},
    "/wake_up": {"POST": _ConnectionHandler._wake_up},
}
_CONTROL_ROUTES = frozenset({"/sleep", "/wake_up"})
"""Routes of servers that a run has started for itself."""
_SESSION_ROUTES = frozenset({"/session", "/reward"})


def _event(message: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(message)}\n\n".encode()
