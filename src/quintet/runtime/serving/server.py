"""HTTP server: authentication, routes, and clients that disconnect."""

from __future__ import annotations

import hmac
import io
import json
import logging
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from quintet.errors import MachineError
from quintet.rollout.engines.async_engine import EngineDeadError, wait_for_generations
from quintet.rollout.sessions import Session
from quintet.runtime.serving.address import Address, is_loopback
from quintet.runtime.serving.connection_server import ConnectionServer
from quintet.runtime.serving.connections import (
    BODY_BYTES_PER_SECOND,
    BODY_SECONDS,
    HEAD_BYTES,
    HEAD_SECONDS,
    IDLE_SECONDS,
    SEND_SECONDS,
    ConnectionTable,
    HeadTooLargeError,
    RequestReader,
)
from quintet.runtime.serving.request_handler import CompletionChoice, PendingCompletion, RequestHandler
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

MAX_BODY_BYTES = 16 << 20
"""Maximum size of a request's body."""
POLL_SECONDS = 0.25
"""Interval of checks whether a waiting client is still connected, if there are few."""
POLLS_PER_SECOND = 200
"""Maximum number of these checks for all clients together."""
SESSION_HEADER = "X-Quintet-Session"
SESSION_PATH = re.compile(r"/sessions/([^/]+)(/.*)?")


class ServingServer:
    """HTTP server in a thread. Closing it leaves the request handler open."""

    def __init__(self, handler: RequestHandler, address: Address) -> None:
        """Listen on the address, and handle requests in a thread.

        Raises:
            ConfigError: it would be open to other machines without a token.
            MachineError: the address is not available.
        """
        address.check()
        try:
            self._server = _Server(handler, address)
        except (OSError, OverflowError) as error:
            message = f"cannot listen on {address.host}:{address.port}: {error}"
            raise MachineError(message, "use another --port; 0 selects a free one") from error
        self._host = address.host
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Base URL of the routes."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop accepting requests."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ConnectionServer):
    def __init__(self, handler: RequestHandler, address: Address) -> None:
        self.handler = handler
        self.address = address
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    """Handler of one connection, with one request after another."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "quintet", ""
    timeout = SEND_SECONDS
    disable_nagle_algorithm = True
    _answered = False

    _has_unread_body = False

    def setup(self) -> None:
        """Read with deadlines."""
        super().setup()
        connection = self._table.get(self.request)
        if connection is None:
            raise ConnectionAbortedError("the connection was closed to make room for others")
        self._connection = connection
        self._reader = RequestReader(self._connection)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        """Handle the next request of the connection, when it arrives."""
        try:
            if not cast("io.BufferedReader", self.rfile).peek(1):
                self.close_connection = True
                return
            self._reader.expect(HEAD_BYTES, HEAD_SECONDS)
            self._connection.begin_computing()
            super().handle_one_request()
        except HeadTooLargeError:
            self.requestline, self.request_version, self.command = "", "", ""
            self.send_error(431, f"request line and headers are larger than {HEAD_BYTES >> 10} KiB")
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        finally:
            self._table.end_body(self._connection)
            self._reader.expect(HEAD_BYTES, IDLE_SECONDS)

    def handle_expect_100(self) -> bool:
        """Let the client send its body only when its size has been checked."""
        return True

    def parse_request(self) -> bool:
        """Parse the request line and headers; the body is still unread."""
        self._has_unread_body = True
        return super().parse_request()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send errors of the HTTP protocol in the format of all other errors."""
        self._has_unread_body, self.close_connection = False, True
        message = message or explain or self.responses[HTTPStatus(code)][0]
        self._send_json(RequestError(message, code="bad_request").body(), code)

    def log_message(self, *_: Any) -> None:
        """Log nothing; statistics are under `/load`."""

    @property
    def _requests(self) -> RequestHandler:
        return cast("_Server", self.server).handler

    @property
    def _address(self) -> Address:
        return cast("_Server", self.server).address

    @property
    def _table(self) -> ConnectionTable:
        return cast("_Server", self.server).connections

    def _handle(self) -> None:
        """Handle a request of any method, and send errors."""
        self._answered = False
        try:
            self._dispatch()
        except RequestError as error:
            self._send_error(error)
        except ValueError as error:
            self._send_error(RequestError(str(error)))
        except EngineDeadError as error:
            self._send_error(RequestError(str(error), status=503, kind="server_error", code="engine_gone"))
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            logging.getLogger(__name__).exception("a request failed")
            self._send_error(RequestError(f"{type(error).__name__}: {error}", status=500, kind="server_error"))
            raise

    do_GET = do_POST = do_DELETE = _handle  # noqa: N815 - names that http.server looks for

    def _dispatch(self) -> None:
        path = unquote(urlsplit(self.path).path).rstrip("/") or "/"
        if path == "/health" and self.command == "GET":
            self._send_health()
            return
        self._authenticate()
        session = self.headers.get(SESSION_HEADER)
        if match := SESSION_PATH.fullmatch(path):
            session, path = match[1], match[2] or "/session"
        route = _ROUTES.get(path)
        if route is None or (path in _SESSION_ROUTES and session is None):
            raise RequestError(f"unknown path {path}", status=404, code="not_found")
        if self.command not in route:
            raise RequestError(f"{path} supports only {' or '.join(route)}", status=405, code="method_not_allowed")
        route[self.command](self, session)

    def _authenticate(self) -> None:
        """Check the token or, without one, the Host header.

        Raises:
            RequestError: the token is missing or wrong, or a browser sends the request for a web page.
        """
        token = self._address.token
        if token is not None:
            sent = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(sent.encode(errors="replace"), token.encode()):
                message = 'missing or wrong token: send the header "Authorization: Bearer <token>"'
                raise RequestError(message, status=401, kind="authentication_error", code="invalid_api_key")
        elif not is_loopback(urlsplit(f"//{self.headers.get('Host', 'localhost')}").hostname or ""):
            # DNS rebinding: a web page reaches this server under its own host name
            raise RequestError("the Host header names another machine", status=403, code="wrong_host")

    def _body(self) -> bytes:
        """Read the body of the request.

        Raises:
            RequestError: the body is not JSON, has no length, is too long, or arrives too slowly.
        """
        kind = self.headers.get_content_type()
        if self.headers.get("Content-Type") is None or kind != "application/json":
            raise RequestError("Content-Type must be application/json", status=415, code="unsupported_media_type")
        if self.headers.get("Content-Encoding", "identity") != "identity":
            raise RequestError("send the body uncompressed", status=415, code="unsupported_media_type")
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"\d{1,15}", length):
            raise RequestError("send a Content-Length", status=411, code="length_required")
        if int(length) > MAX_BODY_BYTES:
            raise RequestError(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413, code="too_large")
        self._table.begin_body(self._connection, int(length))
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        seconds = BODY_SECONDS + int(length) / BODY_BYTES_PER_SECOND
        self._reader.expect(int(length) + HEAD_BYTES, seconds)
        try:
            body = self.rfile.read(int(length))
        except TimeoutError:
            message = f"the body did not arrive within {seconds:.0f} seconds"
            raise RequestError(message, status=408, code="timeout") from None
        self._has_unread_body = False
        return body

    def _session(self, name: str | None) -> Session | None:
        return None if name is None else self._requests.session(name, create=True)

    def _send_health(self) -> None:
        engine_error = self._requests.engine.error
        if engine_error is not None:
            raise RequestError(
                f"the engine has died: {engine_error}", status=503, kind="server_error", code="engine_gone"
            )
        self._send_json({"status": "ok"})

    def _send_models(self, _: str | None) -> None:
        self._send_json(models_body(self._requests))

    def _send_load(self, _: str | None) -> None:
        self._send_json(load_status_body(self._requests.engine))

    def _send_sessions(self, _: str | None) -> None:
        self._send_json({"sessions": self._requests.sessions()})

    def _send_session(self, name: str | None) -> None:
        exchanges = self._requests.session(str(name)).exchanges
        self._send(200, "application/jsonl", "".join(f"{exchange.to_json()}\n" for exchange in exchanges).encode())

    def _end_session(self, name: str | None) -> None:
        self._requests.end_session(str(name))
        self._send_json({"deleted": name})

    def _reward(self, name: str | None) -> None:
        body = parse(RewardBody, self._body())
        self._requests.session(str(name)).reward(body.reward)
        self._send_json({"rewarded": name})

    def _complete_chat(self, session: str | None) -> None:
        self._run(parse(ChatBody, self._body()), session)

    def _complete(self, session: str | None) -> None:
        self._run(parse(CompletionBody, self._body()), session)

    def _generate(self, session: str | None) -> None:
        self._run(parse(GenerateBody, self._body()), session)

    def _run(self, body: ChatBody | CompletionBody | GenerateBody, session: str | None) -> None:
        """Complete a request, or abort it if the client disconnects."""
        job = self._requests.begin(body, self._session(session), self._connection.client)
        self._table.end_body(self._connection)
        try:
            if isinstance(body, OpenAiBody) and body.stream:
                self._stream(job)
            elif (choices := self._choices(job)) is not None:
                self._send_json(
                    completion_body(self._requests, job, choices)
                    if isinstance(body, OpenAiBody)
                    else generate_body(choices[0])
                )
        finally:
            self._requests.end(job)

    def _choices(self, job: PendingCompletion) -> list[CompletionChoice] | None:
        """Return the completions; None if the client has disconnected."""
        generations = wait_for_generations(job.pending, self._is_disconnected, self._poll_seconds)
        if generations is None:
            self.close_connection = True
            return None
        choices = [self._requests.choice(job, index, generation) for index, generation in enumerate(generations)]
        self._requests.record(job, choices)
        return choices

    @property
    def _poll_seconds(self) -> float:
        return max(POLL_SECONDS, len(self._table) / POLLS_PER_SECOND)

    def _is_disconnected(self) -> bool:
        """Return whether the client has closed the connection."""
        poll = select.poll()  # select() only supports file descriptors up to 1023
        poll.register(self.connection, select.POLLIN)
        if not poll.poll(0):
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _stream(self, job: PendingCompletion) -> None:
        """Send server-sent events, chunked for HTTP/1.1 clients."""
        with closing(cast("Any", iter_events(self._requests, job, self._poll_seconds))) as events:
            self._begin_stream()
            for message in _iter_lines(events, self._is_disconnected):
                self._send_chunk(message)
            self._send_chunk(b"")

    def _begin_stream(self) -> None:
        self._answered = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self._chunked = self.request_version == "HTTP/1.1"
        if self._chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()

    def _send_chunk(self, data: bytes) -> None:
        """Send a chunk of the stream; an empty one ends it."""
        if self._chunked:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        elif data:
            self.wfile.write(data)

    def _send_json(self, message: Mapping[str, Any], status: int = 200) -> None:
        self._send(status, "application/json", json.dumps(message).encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self._answered = True
        self._connection.end_computing()
        if self._has_unread_body and self.headers.get("Content-Length", "0") != "0":
            # the rest of the body would be parsed as the next request
            self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if status in (429, 503):
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _send_error(self, error: RequestError) -> None:
        """Send an error as the response, or as the last event of a stream."""
        try:
            if not self._answered:
                self._send_json(error.body(), error.status)
                return
            self.close_connection = True
            self._send_chunk(_event(error.body()))
            self._send_chunk(b"")
        except OSError:
            self.close_connection = True


Route = Mapping[str, Callable[[_Handler, str | None], None]]
_ROUTES: Mapping[str, Route] = {
    "/v1/models": {"GET": _Handler._send_models},
    "/v1/chat/completions": {"POST": _Handler._complete_chat},
    "/v1/completions": {"POST": _Handler._complete},
    "/generate": {"POST": _Handler._generate},
    "/load": {"GET": _Handler._send_load},
    "/sessions": {"GET": _Handler._send_sessions},
    "/session": {"GET": _Handler._send_session, "DELETE": _Handler._end_session},
    "/reward": {"POST": _Handler._reward},
}
_SESSION_ROUTES = frozenset({"/session", "/reward"})


def _event(message: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(message)}\n\n".encode()


def _iter_lines(events: Iterator[Mapping[str, Any] | None], is_disconnected: Callable[[], bool]) -> Iterator[bytes]:
    """Yield the bytes of a stream.

    Raises:
        ConnectionAbortedError: the client has disconnected.
    """
    for message in events:
        if message is not None:
            yield _event(message)
        elif is_disconnected():
            raise ConnectionAbortedError
    yield b"data: [DONE]\n\n"
