"""Killable worker processes, seen from the run: their fork server, exit statuses, and errors as messages."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from quintet.errors import ConfigError
from quintet.sandbox.json_lines import LineBuffer, decode, encode

SHUTDOWN_SECONDS = 2.0
"""Time the fork server has to end its processes."""
MAX_MESSAGE_CHARS = 2000
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class ForkServer:
    """Process that forks and kills worker processes; see `quintet.sandbox.forkserver`."""

    def __init__(self, worker: str, environment: Mapping[str, str] | None = None) -> None:
        """`worker` is the `module:function` that each new process calls; `environment` replaces the run's."""
        self.connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "quintet.sandbox.forkserver", str(theirs.fileno()), worker, *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={**THREADS, **(os.environ if environment is None else environment), "PYTHONUNBUFFERED": "1"},
            )
        self._lines = LineBuffer()
        self._loaded: set[str] = set()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def load(self, names: Sequence[str]) -> None:
        """Import modules, or users' `file.py:name`, before further processes are forked.

        Raises:
            OSError: the fork server has died.
        """
        if missing := [name for name in names if name not in self._loaded]:
            self._loaded.update(missing)
            self.connection.sendall(encode({"load": missing}))

    def fork(self, number: int, setup: Mapping[str, Any]) -> socket.socket:
        """Fork a process and return a non-blocking connection to it.

        Raises:
            OSError: the fork server has died.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            request = encode({"fork": number, "setup": setup})
            sent = socket.send_fds(self.connection, [request], [theirs.fileno()])
            self.connection.sendall(request[sent:])
        ours.setblocking(False)
        return ours

    def signal(self, number: int, signum: signal.Signals) -> None:
        """Send a signal (SIGKILL, SIGSTOP, SIGCONT) to a process and all its descendants.

        Raises:
            OSError: the fork server has died.
        """
        self.connection.sendall(encode({"signal": signum.value, "to": number}))

    def exits(self) -> Iterator[Mapping[str, Any]]:
        """Yield `{"died": number, "status": …}` for each process that has ended since the last call.

        Raises:
            ConnectionError: the fork server has died.
        """
        chunk = self.connection.recv(1 << 16)
        if not chunk:
            raise ConnectionError("the fork server has died")
        yield from map(decode, self._lines.feed(chunk))

    def close(self) -> None:
        """End the fork server and all its processes."""
        self.connection.close()
        try:
            self._process.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            # its processes end with it
            self._process.kill()
            self._process.wait()


def serve(connection: socket.socket, prepare: Callable[[], Callable[[Any], Iterable[Any]]]) -> None:
    """Serve requests in a worker process until the connection ends; `prepare` returns the function of the replies.

    Sends `{"ready": true}` or `{"broken": error}` before the replies.
    """
    try:
        replies = prepare()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of a user's file is reported to the run
        connection.sendall(encode({"broken": error_message(error)}))
        return
    connection.sendall(encode({"ready": True}))
    for line in LineBuffer().read(connection):
        for reply in replies(decode(line)):
            connection.sendall(encode(reply))


def describe_exit(status: int) -> str:
    """Describe an exit status, with the likely cause of a signal."""
    if status >= 0:
        return f"its process ended with status {status}"
    name = next((each.name for each in signal.Signals if each == -status), f"signal {-status}")
    causes = {"SIGKILL": "out of memory?", "SIGSEGV": "a fault in compiled code", "SIGABRT": "it aborted"}
    cause = f" ({causes[name]})" if name in causes else ""
    return f"its process died of {name}{cause}"


def error_message(error: BaseException) -> dict[str, str | None]:
    """Return an error as a JSON object: its type, message with the line of the user's file, and hint."""
    if isinstance(error, ConfigError):
        return {"kind": "ConfigError", "message": error.message, "hint": error.hint}
    frames = traceback.extract_tb(error.__traceback__)
    line = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return {"kind": type(error).__name__, "message": f"{str(error)[:MAX_MESSAGE_CHARS]}{line}", "hint": None}
