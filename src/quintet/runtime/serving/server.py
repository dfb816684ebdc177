"""The HTTP server: who may ask, what the routes are, and what becomes of a client that goes away."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from quintet.errors import ConfigError, MachineError
from quintet.rollout.served import EngineGone, finished
from quintet.rollout.sessions import Session
from quintet.runtime.serving.desk import Choice, Desk, Job
from quintet.runtime.serving.replies import generated, load, models, reply, streamed
from quintet.runtime.serving.schema import (
    ChatBody,
    CompletionBody,
    GenerateBody,
    OpenAiBody,
    Refusal,
    RewardBody,
    parse,
)

__all__ = ["Address", "Service"]

LONGEST_BODY = 16 << 20
"""Bytes of a request's body."""
LOOK_AGAIN = 0.25
"""Seconds between looks whether a client that waits is still there."""
PATIENCE = 60.0
"""Seconds within which a client has to send what it began to send, or take what it is sent."""
SESSION_HEADER = "X-Quintet-Session"
SESSION_PATH = re.compile(r"/sessions/([^/]+)(/.*)?")


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. Beyond this machine only those may ask who know the `token`."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    token: str | None = None

    @property
    def is_here(self) -> bool:
        """Nobody but this machine's own processes can reach it."""
        return _is_here(self.host)

    def check(self) -> None:
        """
        Raises:
            ConfigError: it is open to others and no token is asked for.
        """
        if self.token is None and not self.is_here:
            raise ConfigError(
                f"--host {self.host} lets others in, and there is no token",
                key="--host",
                value=self.host,
                hint="set the environment variable QUINTET_TOKEN (or --token), or listen on 127.0.0.1",
            )
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token.strip()):
            raise ConfigError("--token: ASCII letters, digits and signs", key="--token")


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Service:
    """A server that runs, until it is closed. It closes nothing of the desk's."""

    def __init__(self, desk: Desk, address: Address) -> None:
        """
        Raises:
            ConfigError: it would be open to others without a token.
            MachineError: the address can't be listened on.
        """
        address.check()
        try:
            self._server = _Server(desk, address)
        except (OSError, OverflowError) as error:
            told = f"can't listen on {address.host}:{address.port}: {error}"
            raise MachineError(told, "give another --port; 0 takes a free one") from error
        self._host = address.host
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where its routes begin."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_address[1]}"

    def close(self) -> None:
        """Take no more requests."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, desk: Desk, address: Address) -> None:
        self.desk = desk
        self.address = address
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        super().__init__((address.host, address.port), _Handler)

    def server_bind(self) -> None:
        """Bind, and look no name up: what HTTPServer does besides waits for a name server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no error."""
        logging.getLogger(__name__).debug("a connection from %s broke", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One connection, one request after another."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "quintet", ""
    timeout = PATIENCE
    disable_nagle_algorithm = True
    _answered = False

    _unread = False

    def parse_request(self) -> bool:
        """As inherited; a body that comes along is still unread then."""
        self._unread = True
        return super().parse_request()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What isn't HTTP, or a method that no route has, is told in the same form as all else."""
        self._unread, self.close_connection = False, True
        told = message or explain or self.responses[HTTPStatus(code)][0]
        self._say(Refusal(told, code="bad_request").body(), code)

    def log_message(self, *_: Any) -> None:
        """Nothing: what goes on is under `/load`."""

    @property
    def _desk(self) -> Desk:
        return cast("_Server", self.server).desk

    @property
    def _address(self) -> Address:
        return cast("_Server", self.server).address

    def _act(self) -> None:
        """Carry a request of any method out, or say why not."""
        self._answered = False
        try:
            self._carry_out()
        except Refusal as error:
            self._refuse(error)
        except ValueError as error:
            self._refuse(Refusal(str(error)))
        except EngineGone as error:
            self._refuse(Refusal(str(error), state=503, kind="server_error", code="engine_gone"))
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            logging.getLogger(__name__).exception("a request failed")
            self._refuse(Refusal(f"{type(error).__name__}: {error}", state=500, kind="server_error"))
            raise

    do_GET = do_POST = do_DELETE = _act  # noqa: N815 - names that http.server looks for

    def _carry_out(self) -> None:
        path = unquote(urlsplit(self.path).path).rstrip("/") or "/"
        if path == "/health" and self.command == "GET":
            self._say_health()
            return
        self._check_caller()
        session = self.headers.get(SESSION_HEADER)
        if inside := SESSION_PATH.fullmatch(path):
            session, path = inside[1], inside[2] or "/session"
        route = _ROUTES.get(path)
        if route is None or (path in _OF_A_SESSION and session is None):
            raise Refusal(f"there is no {path} here", state=404, code="not_found")
        if self.command not in route:
            raise Refusal(f"{path} takes {' or '.join(route)}", state=405, code="method_not_allowed")
        route[self.command](self, session)

    def _check_caller(self) -> None:
        """
        Raises:
            Refusal: it lacks the token; or a browser asks in the name of some page.
        """
        token = self._address.token
        if token is not None:
            sent = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(sent.encode(errors="replace"), token.encode()):
                told = "the token is missing or wrong: Authorization: Bearer …"
                raise Refusal(told, state=401, kind="authentication_error", code="invalid_api_key")
        elif not _is_here(urlsplit(f"//{self.headers.get('Host', 'localhost')}").hostname or ""):
            # another site's name that leads here: a page in a browser would ask so
            raise Refusal("the Host header names another machine", state=403, code="wrong_host")

    def _body(self) -> bytes:
        """
        Raises:
            Refusal: it isn't JSON, has no length, or is too long.
        """
        kind = self.headers.get_content_type()
        if self.headers.get("Content-Type") is None or kind != "application/json":
            raise Refusal("the Content-Type has to be application/json", state=415, code="unsupported_media_type")
        if self.headers.get("Content-Encoding", "identity") != "identity":
            raise Refusal("send the body as it is, not compressed", state=415, code="unsupported_media_type")
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"\d{1,15}", length):
            raise Refusal("send a Content-Length", state=411, code="length_required")
        if int(length) > LONGEST_BODY:
            raise Refusal(f"a body of more than {LONGEST_BODY >> 20} MiB", state=413, code="too_large")
        self._unread = False
        return self.rfile.read(int(length))

    def _session(self, name: str | None) -> Session | None:
        return None if name is None else self._desk.session(name, make=True)

    def _say_health(self) -> None:
        gone = self._desk.engine.fault
        if gone is not None:
            raise Refusal(f"the engine is gone: {gone}", state=503, kind="server_error", code="engine_gone")
        self._say({"status": "ok"})

    def _say_models(self, _: str | None) -> None:
        self._say(models(self._desk))

    def _say_load(self, _: str | None) -> None:
        self._say(load(self._desk.engine))

    def _say_sessions(self, _: str | None) -> None:
        self._say({"sessions": self._desk.sessions()})

    def _say_session(self, name: str | None) -> None:
        exchanges = self._desk.session(str(name)).exchanges
        self._send(200, "application/jsonl", "".join(f"{known.line()}\n" for known in exchanges).encode())

    def _end_session(self, name: str | None) -> None:
        self._desk.end_session(str(name))
        self._say({"deleted": name})

    def _reward(self, name: str | None) -> None:
        body = parse(RewardBody, self._body())
        self._desk.session(str(name)).reward(body.reward)
        self._say({"rewarded": name})

    def _chat(self, session: str | None) -> None:
        self._answer(parse(ChatBody, self._body()), session)

    def _complete(self, session: str | None) -> None:
        self._answer(parse(CompletionBody, self._body()), session)

    def _generate(self, session: str | None) -> None:
        self._answer(parse(GenerateBody, self._body()), session)

    def _answer(self, body: ChatBody | CompletionBody | GenerateBody, session: str | None) -> None:
        """Have it answered, unless the client goes away before: then its requests are dropped."""
        job = self._desk.begin(body, self._session(session))
        try:
            if isinstance(body, OpenAiBody) and body.stream:
                self._stream(job)
            elif (choices := self._choices(job)) is not None:
                self._say(reply(self._desk, job, choices) if isinstance(body, OpenAiBody) else generated(choices[0]))
        finally:
            self._desk.end(job)

    def _choices(self, job: Job) -> list[Choice] | None:
        """The answers; None where nobody waits for them any more."""
        generations = finished(job.errand, self._has_gone, LOOK_AGAIN)
        if generations is None:
            self.close_connection = True
            return None
        choices = [self._desk.choice(job, place, generation) for place, generation in enumerate(generations)]
        self._desk.keep(job, choices)
        return choices

    def _has_gone(self) -> bool:
        """The client closed its end."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        if not readable:
            return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _stream(self, job: Job) -> None:
        """Events as server-sent events, in chunks where the client knows HTTP/1.1."""
        with closing(cast("Any", streamed(self._desk, job, LOOK_AGAIN))) as events:
            self._begin_stream()
            for told in _lines(events, self._has_gone):
                self._send_chunk(told)
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
        """A chunk of the stream; an empty one ends it."""
        if self._chunked:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        elif data:
            self.wfile.write(data)

    def _say(self, told: Mapping[str, Any], state: int = 200) -> None:
        self._send(state, "application/json", json.dumps(told).encode())

    def _send(self, state: int, kind: str, data: bytes) -> None:
        self._answered = True
        if self._unread and self.headers.get("Content-Length", "0") != "0":
            # what the client still sends would be read as its next request
            self.close_connection = True
        self.send_response(state)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, refusal: Refusal) -> None:
        """Say no: as the answer, or as the last event of one that has begun."""
        try:
            if not self._answered:
                self._say(refusal.body(), refusal.state)
                return
            self.close_connection = True
            self._send_chunk(_event(refusal.body()))
            self._send_chunk(b"")
        except OSError:
            self.close_connection = True


Route = Mapping[str, Callable[[_Handler, str | None], None]]
_ROUTES: Mapping[str, Route] = {
    "/v1/models": {"GET": _Handler._say_models},
    "/v1/chat/completions": {"POST": _Handler._chat},
    "/v1/completions": {"POST": _Handler._complete},
    "/generate": {"POST": _Handler._generate},
    "/load": {"GET": _Handler._say_load},
    "/sessions": {"GET": _Handler._say_sessions},
    "/session": {"GET": _Handler._say_session, "DELETE": _Handler._end_session},
    "/reward": {"POST": _Handler._reward},
}
_OF_A_SESSION = frozenset({"/session", "/reward"})


def _event(told: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(told)}\n\n".encode()


def _lines(events: Iterator[Mapping[str, Any] | None], gone: Callable[[], bool]) -> Iterator[bytes]:
    """A stream's bytes, until nobody listens any more.

    Raises:
        ConnectionAbortedError: nobody does.
    """
    for told in events:
        if told is not None:
            yield _event(told)
        elif gone():
            raise ConnectionAbortedError
    yield b"data: [DONE]\n\n"
