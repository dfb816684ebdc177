"""HTTP requests to a server of an environment service, over one connection with retries."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from quintet.envs.hosted_envs import HostLostError
from quintet.envs.service.payload import CONTENT_TYPES, JSON, Format, decode_payload, encode_payload
from quintet.errors import MachineError

CONNECT_SECONDS = 3.0
FIRST_PAUSE_SECONDS = 0.1
"""Pause before the first retry; it doubles with each further one."""
MAX_RESPONSE_BYTES, READ_BYTES = 1 << 30, 1 << 20
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Time until a machine that no longer answers is noticed, seconds and probes."""
OVERLOADED = (429, 503)
"""Statuses of a server that has not executed a request, and may do so later."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request that may be repeated."""

    method: str
    path: str
    body: bytes | None
    is_repeatable: bool
    """Whether executing it twice has the effect of executing it once."""


class RefusedRequestError(MachineError):
    """The server has refused a request; its answer will not change."""

    def __init__(self, status: int, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.status = status


class ServiceClient:
    """HTTP client of an environment service, for one request at a time: `send`, wait until `fileno` is readable,
    `receive`."""

    def __init__(self, url: str, token: str | None, timeout: float, max_retries: int, form: Format = JSON) -> None:
        """`timeout` of a request in seconds; responses of Quintet's own routes are in `form`."""
        self.url = url.rstrip("/")
        self._parts = urlsplit(self.url)
        self._timeout, self._max_retries, self._form = timeout, max_retries, form
        self._headers = {"Accept": CONTENT_TYPES[form]} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._connection: http.client.HTTPConnection | None = None
        self._request: Request | None = None
        self._num_attempts = 0
        self._deadline = 0.0

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        if self._connection is None or self._connection.sock is None:
            return -1
        return int(self._connection.sock.fileno())

    def check_deadline(self) -> None:
        """
        Raises:
            HostLostError: the request has exceeded its time limit.
        """
        if time.monotonic() > self._deadline:
            raise HostLostError(f"{self.url} has not answered within {self._timeout:g} s (env.service.timeout_seconds)")

    def send(self, method: str, path: str, message: Any = None, *, is_repeatable: bool = True) -> None:
        """Send a request.

        Raises:
            HostLostError: the server cannot be reached.
        """
        body = None if message is None else encode_payload(message, JSON)
        self._request = Request(method, path, body, is_repeatable)
        self._num_attempts = 0
        self._deadline = time.monotonic() + self._timeout
        self._attempt()

    def receive(self) -> Any:
        """Return the body of the response.

        Raises:
            HostLostError: the server cannot be reached, fails, or its response is invalid.
            RefusedRequestError: the server has refused the request.
        """
        while True:
            try:
                status, headers, body = self._read()
            except (OSError, http.client.HTTPException) as error:
                self._retry(f"{type(error).__name__}: {error}", is_executed=True)
                continue
            if status not in OVERLOADED:
                return self._decoded(status, headers, body)
            self._retry(_error_text(body), is_executed=False)

    def call(self, method: str, path: str, message: Any = None, *, is_repeatable: bool = True) -> Any:
        """Send a request and return the body of its response; raises as `send` and `receive` do."""
        self.send(method, path, message, is_repeatable=is_repeatable)
        return self.receive()

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _attempt(self) -> None:
        """Send the current request, if need be over a new connection."""
        if self._request is None:
            raise AssertionError("no request to send")
        while True:
            try:
                connection = self._connect()
                content = {} if self._request.body is None else {"Content-Type": CONTENT_TYPES[JSON]}
                path = self._parts.path + self._request.path
                connection.request(self._request.method, path, self._request.body, self._headers | content)
            except (OSError, http.client.HTTPException) as error:
                self._pause(f"{type(error).__name__}: {error}")
                continue
            return

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is None:
            is_https = self._parts.scheme == "https"
            kind = http.client.HTTPSConnection if is_https else http.client.HTTPConnection
            connection = kind(self._parts.hostname or "", self._parts.port, timeout=CONNECT_SECONDS)
            connection.connect()
            connection.sock.settimeout(self._timeout)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            self._connection = connection
        return self._connection

    def _read(self) -> tuple[int, Mapping[str, str], bytes]:
        if self._connection is None:
            raise ConnectionError("the connection was closed")
        with _shut_down_after(self._connection.sock, self._deadline - time.monotonic()):
            response = self._connection.getresponse()
            body = bytearray()
            while (response.length or 0) <= MAX_RESPONSE_BYTES and (chunk := response.read(READ_BYTES)):
                body += chunk
                if len(body) > MAX_RESPONSE_BYTES:
                    break
        if len(body) + (response.length or 0) > MAX_RESPONSE_BYTES:
            raise HostLostError(f"{self.url} sent more than {MAX_RESPONSE_BYTES / (1 << 30):g} GiB")
        if response.length:  # with a size, `read` does not notice that the connection ended too early
            raise http.client.IncompleteRead(bytes(body), response.length)
        return response.status, {name.lower(): value for name, value in response.headers.items()}, bytes(body)

    def _retry(self, problem: str, *, is_executed: bool) -> None:
        """Send the request again over a new connection, unless it may have been executed and must not be twice."""
        if is_executed and self._request is not None and not self._request.is_repeatable:
            self.close()
            raise HostLostError(f"{self.url}: {problem}")
        self._pause(problem)
        self._attempt()

    def _pause(self, problem: str) -> None:
        """
        Raises:
            HostLostError: there have been too many attempts.
        """
        self.close()
        self.check_deadline()
        self._num_attempts += 1
        if self._num_attempts > self._max_retries:
            raise HostLostError(f"{self.url}: {problem}")
        time.sleep(FIRST_PAUSE_SECONDS * 2 ** (self._num_attempts - 1))

    def _decoded(self, status: int, headers: Mapping[str, str], body: bytes) -> Any:
        if status >= http.client.INTERNAL_SERVER_ERROR:
            raise HostLostError(f"{self.url} has failed with status {status}: {_error_text(body)}")
        if status >= http.client.BAD_REQUEST:
            is_token = status == http.client.UNAUTHORIZED
            hint = "set the variable named by env.service.token_env" if is_token else "see docs/env-service.md"
            raise RefusedRequestError(status, f"{self.url} refuses a request: {_error_text(body)}", hint)
        is_json = headers.get("content-type", "").startswith(CONTENT_TYPES[JSON])
        try:
            return decode_payload(body, JSON if is_json else self._form)
        except ValueError as error:
            raise HostLostError(f"{self.url} sent an invalid response: {error}") from error


@contextmanager
def _shut_down_after(connection: socket.socket, seconds: float) -> Iterator[None]:
    """End the connection if the block takes longer: a server may send byte after byte, or 100 Continue for ever."""

    def shut_down() -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(seconds, 0.0), shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _error_text(body: bytes) -> str:
    """Return the error of a body, or its beginning."""
    try:
        message = decode_payload(body, JSON)
        return str(message["error"] if isinstance(message, dict) else message)[:500]
    except (KeyError, ValueError):
        return body[:200].decode(errors="replace") or "no message"
