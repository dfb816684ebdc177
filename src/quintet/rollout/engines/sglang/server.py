"""SGLang behind HTTP: a server launched here on loopback, or a running one."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from torch import Tensor

from quintet.errors import ConfigError
from quintet.loopback import is_loopback
from quintet.rollout.engines.engine import EngineError
from quintet.rollout.engines.sglang.protocol import RequestRejectedError
from quintet.rollout.engines.sglang.weight_sync import weights_on_disk

LAUNCHER = Path(__file__).with_name("launch.py")
START_SECONDS = 3600.0
"""Loading a large model takes long; a server that fails exits earlier."""
CALL_SECONDS = 900.0
"""Timeout of a call; syncing large weights takes long."""
CHECK_SECONDS = 20.0
"""Time without a response after which the server is checked."""
SHUTDOWN_SECONDS = 5.0
EXIT_SECONDS = 2.0
"""Time after a broken connection within which a dying server can be waited for."""
STANDARD_ERROR = 2
LOG_LINES = 12
HTTP_ERROR = 400


class ServerAddress:
    """Address and keys of a server. Each request uses a new connection, without a proxy."""

    def __init__(self, url: str, key: str | None, admin_key: str | None) -> None:
        """Raises:
        ConfigError: `url` is not an http(s) URL.
        """
        self.url = url.rstrip("/")
        self._parts = urlsplit(self.url)
        self._key, self._admin = key, admin_key or key
        if self._parts.scheme not in ("http", "https") or not self._parts.hostname:
            raise ConfigError(
                f"rollout.engine_options.server_url = {url!r} is not an http(s) URL",
                key="rollout.engine_options.server_url",
                value=url,
                hint="use http://host:port",
            )

    @property
    def is_local(self) -> bool:
        """Whether the server runs on this machine."""
        return is_loopback(self._parts.hostname or "")

    def request(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = CALL_SECONDS) -> Any:
        """Send a GET, or with a body a POST request, and return the parsed response. `seconds=None` waits forever.

        Raises:
            RequestRejectedError: the server returned an error.
            OSError: the server cannot be reached, or the connection broke.
        """
        connection = _connect(self._parts, seconds)
        try:
            headers = {"Content-Type": "application/json"} | self._authorized(path)
            content = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", self._parts.path + path, content, headers)
            response = connection.getresponse()
            return _parse(response.status, response.read())
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _authorized(self, path: str) -> dict[str, str]:
        """With two keys, generation uses the plain one and everything else the admin key."""
        key = self._key if path in ("/generate", "/model_info", "/server_info") else self._admin
        return {"Authorization": f"Bearer {key}"} if key else {}


def _connect(parts: SplitResult, seconds: float | None) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=seconds)
    connection.connect()
    # detects a server that vanishes while a response is pending
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection


def _parse(status: int, text: bytes) -> Any:
    try:
        content = json.loads(text) if text else {}
    except ValueError:
        content = {"message": text.decode(errors="replace")[:500]}
    if status >= HTTP_ERROR or (isinstance(content, dict) and content.get("success") is False):
        raise RequestRejectedError(f"HTTP {status}", _message(content))
    return content


def _message(content: Any) -> str:
    """The message of an error, in any of its formats."""
    error = content.get("error", content) if isinstance(content, dict) else content
    return str(error.get("message", error) if isinstance(error, dict) else error)


class LaunchedServer:
    """A server launched here; `close` ends it and all of its child processes."""

    def __init__(self, arguments: Mapping[str, Any], python: str | None = None, *, show_output: bool = False) -> None:
        """`python` is the interpreter of an environment with SGLang (default: this one). The server writes to a log
        file, or to standard error with `show_output`.

        Raises:
            EngineError: the server does not start; with the end of its log.
        """
        key, port = secrets.token_urlsafe(32), _free_port()
        self.address = ServerAddress(f"http://127.0.0.1:{port}", key, None)
        self._folder = tempfile.TemporaryDirectory(prefix="quintet-sglang-")
        self._log = Path(self._folder.name, "server.log")
        self._process = _start(python or sys.executable, None if show_output else self._log)
        with contextlib.ExitStack() as stack:
            # also KeyboardInterrupt must not leave the server behind
            stack.callback(self.close)
            self._send_arguments({**arguments, "host": "127.0.0.1", "port": port, "api_key": key})
            self._wait_until_ready()
            stack.pop_all()

    @property
    def pid(self) -> int:
        """Id of the process and of its process group."""
        return self._process.pid

    def describe_exit(self, *, wait_seconds: float = 0) -> str | None:
        """Return how the server ended, with the end of its log; None if it still runs after `wait_seconds`.

        The sockets of a dying process close before its parent can wait for it: callers that saw a broken connection
        pass `EXIT_SECONDS`.
        """
        try:
            status = self._process.wait(wait_seconds)
        except subprocess.TimeoutExpired:
            return None
        outcome = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        cause = ", probably because the machine ran out of memory" if -status == signal.SIGKILL else ""
        return f"the SGLang server {outcome}{cause}. The end of its log:\n{self.log_tail()}"

    def log_tail(self) -> str:
        """Return the end of the server's log."""
        try:
            lines = self._log.read_text(errors="replace", encoding="utf-8").splitlines()
        except OSError:
            lines = []
        return "\n".join(f"  {line}" for line in lines[-LOG_LINES:]) or "  (no log file; see the output above)"

    def close(self) -> None:
        """End the server and all of its child processes."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            _signal_group(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SHUTDOWN_SECONDS)
        self._folder.cleanup()

    def _send_arguments(self, arguments: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        if stdin is None:
            raise EngineError("the SGLang server has no standard input")
        try:
            stdin.write(json.dumps(arguments).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            # `_wait_until_ready` reports how it ended
            self._process.wait(SHUTDOWN_SECONDS)

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if (message := self.describe_exit()) is not None:
                raise EngineError(message)
            try:
                self.address.request("/health", seconds=CHECK_SECONDS)
                return
            except (OSError, RequestRejectedError):
                time.sleep(0.1)
        raise EngineError(f"the SGLang server is not ready after {START_SECONDS:.0f} s:\n{self.log_tail()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(python: str, log: Path | None) -> subprocess.Popen[bytes]:
    """Start the launcher in a new session; it waits for its arguments."""
    output = STANDARD_ERROR if log is None else os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        return subprocess.Popen(  # noqa: S603 - no shell, and the interpreter is configured by the user
            [python, str(LAUNCHER)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
    finally:
        if log is not None:
            os.close(output)


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


class HttpConnection:
    """Transport to an SGLang server."""

    def __init__(self, address: ServerAddress, launched: LaunchedServer | None, weights_dir: Path | None) -> None:
        self._address = address
        self._launched = launched
        self._weights_dir = weights_dir
        self._responses: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._last_response = time.monotonic()

    def generate(self, rid: str, body: Mapping[str, Any]) -> None:
        """Send a request; `collect` returns its response."""
        request = {**body, "rid": rid}
        threading.Thread(target=self._generate, args=(rid, request), daemon=True, name=f"sglang-{rid}").start()

    def _generate(self, rid: str, body: Mapping[str, Any]) -> None:
        try:
            self._responses.put((rid, self._address.request("/generate", body, seconds=None)))
        except (RequestRejectedError, OSError) as error:
            self._responses.put((rid, error))

    def collect(self, seconds: float) -> list[tuple[str, Any]]:
        """Return the responses or errors since the last call; wait up to `seconds` for the first one.

        Raises:
            EngineError: the server died or cannot be reached.
        """
        responses: list[tuple[str, Any]] = []
        try:
            responses.append(self._responses.get(timeout=seconds))
            while True:
                responses.append(self._responses.get_nowait())
        except queue.Empty:
            self._check_server(responses)
        return responses

    def _check_server(self, responses: list[tuple[str, Any]]) -> None:
        """Raise if the server died; probe it after connection errors and long silence."""
        if self._launched is not None and (message := self._launched.describe_exit()) is not None:
            raise EngineError(message)
        now = time.monotonic()
        broken = [error for _, error in responses if isinstance(error, OSError)]
        if broken or now > self._last_response + CHECK_SECONDS:
            self._probe()
        if responses or now > self._last_response + CHECK_SECONDS:
            self._last_response = time.monotonic()

    def _probe(self) -> None:
        try:
            self._address.request("/model_info", seconds=CHECK_SECONDS)
        except OSError as error:
            message = self._exit_after_broken_connection()
            unreachable = f"the SGLang server at {self._address.url} cannot be reached: {error}"
            raise EngineError(message or unreachable) from error
        except RequestRejectedError:
            # the server is reachable
            return

    def _exit_after_broken_connection(self) -> str | None:
        return None if self._launched is None else self._launched.describe_exit(wait_seconds=EXIT_SECONDS)

    def call(self, name: str, **fields: Any) -> None:
        """Send a control request and wait until it is done.

        Raises:
            EngineError: it failed.
        """
        try:
            self._address.request(f"/{name}", fields)
        except (RequestRejectedError, OSError) as error:
            message = self._exit_after_broken_connection() if isinstance(error, OSError) else None
            raise EngineError(message or f"{name} failed in SGLang: {error}") from error

    def load(self, version: int, buckets: Iterable[Mapping[str, Tensor]]) -> None:
        """Load new weights through a directory that the server reads.

        Raises:
            EngineError: it failed.
        """
        with weights_on_disk(buckets, self._weights_dir) as folder:
            self.call(
                "update_weights_from_disk",
                model_path=str(folder),
                load_format="safetensors",
                weight_version=str(version),
                flush_cache=True,
            )

    def close(self) -> None:
        """End the server if it was launched here."""
        if self._launched is not None:
            self._launched.close()
