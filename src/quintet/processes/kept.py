"""Killable processes as the run sees them: their keeper, how they ended, and their faults as data."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quintet.errors import ConfigError
from quintet.processes.wire import Lines, decoded, encoded

__all__ = ["KeeperProcess", "heard", "how_it_ended", "told"]

ENDING_SECONDS = 2.0
"""Time the keeper has to end its processes."""
LONGEST_MESSAGE = 2000


class KeeperProcess:
    """Makes and ends the others, see `quintet.processes.keeper`."""

    def __init__(self, worker: str) -> None:
        """`worker` is the `module:function` that each new process calls."""
        self.connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "quintet.processes.keeper", str(theirs.fileno()), worker, *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"},
            )
        self._lines = Lines()
        self._loaded: set[str] = set()

    def load(self, names: Sequence[str]) -> None:
        """Have modules, or users' `file.py:name`, imported before more processes are made.

        Raises:
            OSError: the keeper has ended.
        """
        if missing := [name for name in names if name not in self._loaded]:
            self._loaded.update(missing)
            self.connection.sendall(encoded({"load": missing}))

    def fork(self, number: int, setup: Mapping[str, Any]) -> socket.socket:
        """A new process; gives the connection to it, which doesn't block.

        Raises:
            OSError: the keeper has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            request = encoded({"fork": number, "setup": setup})
            sent = socket.send_fds(self.connection, [request], [theirs.fileno()])
            self.connection.sendall(request[sent:])
        ours.setblocking(False)
        return ours

    def signal(self, number: int, what: signal.Signals) -> None:
        """End (SIGKILL), stop or continue a process and all that it started.

        Raises:
            OSError: the keeper has ended.
        """
        self.connection.sendall(encoded({"signal": what.value, "to": number}))

    def news(self) -> Iterator[Mapping[str, Any]]:
        """Who died since.

        Raises:
            ConnectionError: the keeper has ended.
        """
        piece = self.connection.recv(1 << 16)
        if not piece:
            raise ConnectionError("the keeper has ended")
        yield from map(decoded, self._lines.feed(piece))

    def close(self) -> None:
        """End it and all that it keeps."""
        self.connection.close()
        try:
            self._process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            # those it keeps end with it
            self._process.kill()
            self._process.wait()


def heard(connection: socket.socket) -> bytes | None:
    """What has come over a connection since: nothing yet is None, its end is empty."""
    try:
        return connection.recv(1 << 16)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""


def how_it_ended(status: int) -> str:
    """A status in words, with the likely cause of a signal."""
    if status >= 0:
        return f"its process ended with status {status}"
    name = next((known.name for known in signal.Signals if known == -status), f"signal {-status}")
    causes = {"SIGKILL": "out of memory?", "SIGSEGV": "a fault in compiled code", "SIGABRT": "it gave up"}
    cause = f" ({causes[name]})" if name in causes else ""
    return f"its process died of {name}{cause}"


def told(error: BaseException) -> dict[str, str | None]:
    """An error as data: its kind, its message, and the place in a user's file."""
    if isinstance(error, ConfigError):
        return {"kind": "ConfigError", "message": error.message, "hint": error.hint}
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return {"kind": type(error).__name__, "message": f"{str(error)[:LONGEST_MESSAGE]}{place}", "hint": None}
