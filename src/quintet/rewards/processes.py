"""The processes that judge, as the run sees them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from quintet.rewards.wire import Lines, decoded, encoded
from quintet.rewards.worker import Setup

__all__ = ["Job", "JudgeProcess", "KeeperProcess", "Lane", "how_it_ended"]

ENDING_SECONDS = 2.0
"""Time the keeper has to end its processes."""


@dataclass(frozen=True, slots=True)
class Lane:
    """What a process must be for a job: sealed or not, and the modules that are loaded before."""

    seal: bool = True
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """One message to be judged within `seconds`; `key` is the caller's own."""

    key: int
    lane: Lane
    message: Mapping[str, Any]
    seconds: float


@dataclass(slots=True, eq=False)
class JudgeProcess:
    """One process: the jobs that it was sent and hasn't answered, the first being the one it is at."""

    number: int
    lane: Lane
    connection: socket.socket
    jobs: deque[Job] = field(default_factory=deque)
    ready: bool = False
    since: float = 0.0
    """When the job it is at began, on the monotonic clock, or later."""
    slow: bool = False
    last: bool = False
    """It ends with the job it is at: others have been given what it was to do next."""
    resumes: float | None = None
    """It is stopped, at most until then."""
    sent: float = 0.0
    """When it was last sent something, and how much."""
    count: int = 0
    ended: bool = False
    """It says no more."""
    _lines: Lines = field(default_factory=Lines)

    @property
    def idle(self) -> bool:
        return self.ready and not self.jobs

    @property
    def ends(self) -> float:
        """When the job it is at has taken too long."""
        return self.since + self.jobs[0].seconds

    def send(self, jobs: Iterable[Job], now: float) -> None:
        """Give it something to do.

        Raises:
            OSError: it has ended.
        """
        self.jobs.extend(jobs)
        self.since = self.sent = now
        self.count = len(self.jobs)
        self.connection.setblocking(True)
        self.connection.sendall(encoded([job.message for job in self.jobs]))
        self.connection.setblocking(False)

    def replies(self) -> Iterator[Mapping[str, Any]]:
        """What it has said since."""
        while True:
            try:
                piece = self.connection.recv(1 << 16)
            except BlockingIOError:
                return
            except ConnectionResetError:
                piece = b""
            if not piece:
                self.ended = True
                return
            yield from map(decoded, self._lines.feed(piece))


class KeeperProcess:
    """Makes and ends the others, see `quintet.rewards.keeper`."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "quintet.rewards.keeper", str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"},
            )
        self._lines = Lines()
        self._loaded: set[str] = set()

    def fork(self, number: int, lane: Lane, setup: Setup) -> JudgeProcess:
        """A new process, not yet ready.

        Raises:
            OSError: the keeper has ended.
        """
        if missing := [name for name in lane.modules if name not in self._loaded]:
            self._loaded.update(missing)
            self.connection.sendall(encoded({"load": missing}))
        ours, theirs = socket.socketpair()
        with theirs:
            request = encoded({"fork": number, "setup": {**asdict(setup), "seal": lane.seal}})
            sent = socket.send_fds(self.connection, [request], [theirs.fileno()])
            self.connection.sendall(request[sent:])
        ours.setblocking(False)
        return JudgeProcess(number, lane, ours)

    def signal(self, process: JudgeProcess, what: signal.Signals) -> None:
        """End (SIGKILL), stop or continue a process and all that it started.

        Raises:
            OSError: the keeper has ended.
        """
        self.connection.sendall(encoded({"signal": what.value, "to": process.number}))

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


def how_it_ended(status: int) -> str:
    """A status in words, with the likely cause of a signal."""
    if status >= 0:
        return f"its process ended with status {status}"
    name = next((known.name for known in signal.Signals if known == -status), f"signal {-status}")
    causes = {"SIGKILL": "out of memory?", "SIGSEGV": "a fault in compiled code", "SIGABRT": "it gave up"}
    cause = f" ({causes[name]})" if name in causes else ""
    return f"its process died of {name}{cause}"
