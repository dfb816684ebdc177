"""The processes that judge, as the run sees them."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quintet.processes.kept import heard
from quintet.processes.wire import Lines, decoded, encoded

__all__ = ["Job", "JudgeProcess", "Lane"]


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
        while piece := heard(self.connection):
            yield from map(decoded, self._lines.feed(piece))
        self.ended = piece is not None
