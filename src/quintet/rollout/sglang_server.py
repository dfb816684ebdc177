"""SGLang behind HTTP: its server, started here on loopback or running already at an address."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
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
from quintet.rollout.engine import EngineFault
from quintet.rollout.sglang_protocol import Refused
from quintet.rollout.sglang_weights import on_disk

__all__ = ["Address", "OwnServer", "ServerLink"]

LAUNCHER = Path(__file__).with_name("sglang_launch.py")
START_SECONDS = 3600.0
"""A server that loads a large model takes its time; one that fails ends by itself."""
CALL_SECONDS = 900.0
"""An update of large weights takes long, everything else a moment."""
SILENCE_SECONDS = 20.0
"""After so long without an answer it is looked whether the server is still there."""
ENDING_SECONDS = 5.0
STANDARD_ERROR = 2
LAST_LINES = 12
FAILURE = 400


class Address:
    """Where a server is, and how it is spoken to: a connection for each request, and no way round by a proxy."""

    def __init__(self, url: str, key: str | None, admin_key: str | None) -> None:
        """Raises:
        ConfigError: that isn't an address.
        """
        self.url = url.rstrip("/")
        self._place = urlsplit(self.url)
        self._key, self._admin = key, admin_key or key
        if self._place.scheme not in ("http", "https") or not self._place.hostname:
            raise ConfigError(
                f"rollout.engine_options.server_url = {url!r} is no address",
                key="rollout.engine_options.server_url",
                value=url,
                hint="give http://host:port",
            )

    @property
    def here(self) -> bool:
        """Whether that is this machine."""
        host = self._place.hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def ask(self, path: str, body: Mapping[str, Any] | None = None, *, seconds: float | None = CALL_SECONDS) -> Any:
        """What it answers, read as JSON where it is some; a body is posted. null waits for ever.

        Raises:
            Refused: it says no.
            OSError: it can't be reached, or breaks off.
        """
        connection = _connect(self._place, seconds)
        try:
            headers = {"Content-Type": "application/json"} | self._authorized(path)
            told = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", self._place.path + path, told, headers)
            response = connection.getresponse()
            return _read(response.status, response.read())
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _authorized(self, path: str) -> dict[str, str]:
        """Only generation goes by the plain key, where there are two."""
        key = self._key if path in ("/generate", "/model_info", "/server_info") else self._admin
        return {"Authorization": f"Bearer {key}"} if key else {}


def _connect(place: SplitResult, seconds: float | None) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    connection = kind(place.hostname or "", place.port, timeout=seconds)
    connection.connect()
    # the other end may vanish without a word while an answer is waited for
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection


def _read(status: int, text: bytes) -> Any:
    try:
        said = json.loads(text) if text else {}
    except ValueError:
        said = {"message": text.decode(errors="replace")[:500]}
    if status >= FAILURE or (isinstance(said, dict) and said.get("success") is False):
        raise Refused(f"HTTP {status}", _message(said))
    return said


def _message(said: Any) -> str:
    """The reason in whichever of its forms an error comes."""
    found = said.get("error", said) if isinstance(said, dict) else said
    return str(found.get("message", found) if isinstance(found, dict) else found)


class OwnServer:
    """A server that was started here, with everything that it started: ended for sure by `close`."""

    def __init__(self, arguments: Mapping[str, Any], python: str | None = None, *, shown: bool = False) -> None:
        """`python` is the interpreter of an environment that has SGLang; null is this one. What the server says is
        kept for the case that it fails, or `shown` on this process's standard error.

        Raises:
            EngineFault: it doesn't come up; with its last words.
        """
        key, port = secrets.token_urlsafe(32), _free_port()
        self.address = Address(f"http://127.0.0.1:{port}", key, None)
        self._folder = tempfile.TemporaryDirectory(prefix="quintet-sglang-")
        self._log = Path(self._folder.name, "server.log")
        self._process = _start(python or sys.executable, None if shown else self._log)
        try:
            told = {**arguments, "host": "127.0.0.1", "port": port, "api_key": key}
            self._tell(told)
            self._await()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process and of its group."""
        return self._process.pid

    def fault(self) -> str | None:
        """How it ended; null while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        cause = "; that is what a machine without memory left does" if -status == signal.SIGKILL else ""
        return f"the SGLang server {how}{cause}. Its last words:\n{self.last_words()}"

    def last_words(self) -> str:
        """The end of its log."""
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return "\n".join(f"  {line}" for line in lines[-LAST_LINES:]) or "  (they are above, if there were any)"

    def close(self) -> None:
        """End it and all of its processes."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            _signal_group(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDING_SECONDS)
        self._folder.cleanup()

    def _tell(self, arguments: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        if stdin is None:
            raise EngineFault("the SGLang server takes no arguments")
        try:
            stdin.write(json.dumps(arguments).encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            # how it ended is told by who waits for it
            self._process.wait(ENDING_SECONDS)

    def _await(self) -> None:
        """Until it answers."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if (fault := self.fault()) is not None:
                raise EngineFault(fault)
            try:
                self.address.ask("/health", seconds=SILENCE_SECONDS)
                return
            except (OSError, Refused):
                time.sleep(0.1)
        raise EngineFault(f"the SGLang server isn't ready after {START_SECONDS:.0f} s:\n{self.last_words()}")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _start(python: str, log: Path | None) -> subprocess.Popen[bytes]:
    """The process, leader of a group of its own, waiting for its arguments."""
    output = STANDARD_ERROR if log is None else os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        return subprocess.Popen(  # noqa: S603 - no shell, and a Python that the user named
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


class ServerLink:
    """What the engine does through a server."""

    def __init__(self, address: Address, own: OwnServer | None, weights_dir: Path | None) -> None:
        self._address = address
        self._own = own
        self._place = weights_dir
        self._answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._heard = time.monotonic()

    def generate(self, rid: str, body: Mapping[str, Any]) -> None:
        """Send a request; its answer comes by `collect`."""
        told = {**body, "rid": rid}
        threading.Thread(target=self._generate, args=(rid, told), daemon=True, name=f"sglang-{rid}").start()

    def _generate(self, rid: str, body: Mapping[str, Any]) -> None:
        try:
            self._answers.put((rid, self._address.ask("/generate", body, seconds=None)))
        except (Refused, OSError) as error:
            self._answers.put((rid, error))

    def collect(self, seconds: float) -> list[tuple[str, Any]]:
        """Answers, or why there are none, since the last call; waits for the first one so long.

        Raises:
            EngineFault: the server is gone.
        """
        found: list[tuple[str, Any]] = []
        try:
            found.append(self._answers.get(timeout=seconds))
            while True:
                found.append(self._answers.get_nowait())
        except queue.Empty:
            self._look(found)
        return found

    def _look(self, found: list[tuple[str, Any]]) -> None:
        """Whether the server is still there, where there is a reason to ask."""
        if self._own is not None and (fault := self._own.fault()) is not None:
            raise EngineFault(fault)
        now = time.monotonic()
        broken = [error for _, error in found if isinstance(error, OSError)]
        if broken or now > self._heard + SILENCE_SECONDS:
            self._reach()
        if found or now > self._heard + SILENCE_SECONDS:
            self._heard = time.monotonic()

    def _reach(self) -> None:
        try:
            self._address.ask("/model_info", seconds=SILENCE_SECONDS)
        except OSError as error:
            fault = self._own.fault() if self._own is not None else None
            told = fault or f"the SGLang server at {self._address.url} can't be reached: {error}"
            raise EngineFault(told) from error
        except Refused:
            # it is there, and that is all that was asked
            return

    def call(self, name: str, **fields: Any) -> None:
        """Ask for something besides generation, and wait until it is done.

        Raises:
            EngineFault: it isn't done.
        """
        try:
            self._address.ask(f"/{name}", fields)
        except (Refused, OSError) as error:
            fault = self._own.fault() if self._own is not None else None
            raise EngineFault(fault or f"SGLang didn't do {name}: {error}") from error

    def load(self, version: int, bundles: Iterable[Mapping[str, Tensor]]) -> None:
        """New weights, by way of a directory that the server reads.

        Raises:
            EngineFault: it couldn't.
        """
        with on_disk(bundles, self._place) as folder:
            self.call(
                "update_weights_from_disk",
                model_path=str(folder),
                load_format="safetensors",
                weight_version=str(version),
                flush_cache=True,
            )

    def close(self) -> None:
        """End the server, if it is ours."""
        if self._own is not None:
            self._own.close()
