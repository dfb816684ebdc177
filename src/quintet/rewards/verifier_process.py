"""Handle of a worker process that verifies responses; the worker itself is `quintet.rewards.verifier_worker`."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quintet.sandbox.json_lines import LineBuffer, decode, encode
from quintet.sandbox.sandboxed_process import receive_available


@dataclass(frozen=True, slots=True)
class ProcessKind:
    """Kind of process that a job needs: confined or not, and the modules to import before forking."""

    confined: bool = True
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifierJob:
    """Message to a worker with a time limit of `seconds`; `key` is the caller's."""

    key: int
    process_kind: ProcessKind
    message: Mapping[str, Any]
    seconds: float


@dataclass(slots=True, eq=False)
class VerifierProcess:
    """Worker process and its jobs, of which the first is running and the others are queued."""

    number: int
    connection: socket.socket
    process_kind: ProcessKind
    jobs: deque[VerifierJob] = field(default_factory=deque)
    ready: bool = False
    job_started: float = 0.0
    """Start of the running job, or later, on the monotonic clock."""
    slow: bool = False
    """The running job has exceeded `dispatcher.SLOW_SECONDS`."""
    retire: bool = False
    """Ends after the running job because its queued jobs were reassigned."""
    resume_at: float | None = None
    """Latest time at which a stopped process resumes."""
    last_sent: float = 0.0
    """Time of the last message to it."""
    num_sent: int = 0
    """Number of jobs in that message."""
    ended: bool = False
    """The connection has ended."""
    _lines: LineBuffer = field(default_factory=LineBuffer)

    @property
    def idle(self) -> bool:
        return self.ready and not self.jobs

    @property
    def deadline(self) -> float:
        """End of the running job's time limit."""
        return self.job_started + self.jobs[0].seconds

    def send(self, jobs: Iterable[VerifierJob], now: float) -> None:
        """Send jobs to an idle process.

        Raises:
            OSError: the process has ended.
        """
        self.jobs.extend(jobs)
        self.job_started = self.last_sent = now
        self.num_sent = len(self.jobs)
        self.connection.setblocking(True)
        self.connection.sendall(encode([job.message for job in self.jobs]))
        self.connection.setblocking(False)

    def replies(self) -> Iterator[Mapping[str, Any]]:
        """Yield the replies since the last call."""
        while chunk := receive_available(self.connection):
            yield from map(decode, self._lines.feed(chunk))
        self.ended = chunk is not None
