"""Handle of a worker process that verifies responses; the worker itself is `quintet.rewards.verifier_worker`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quintet.sandbox.json_lines import encode
from quintet.sandbox.worker_processes import WorkerProcess


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
class VerifierProcess(WorkerProcess):
    """Worker process and its jobs, of which the first is running, up to the deadline, and the others are queued."""

    process_kind: ProcessKind
    jobs: deque[VerifierJob] = field(default_factory=deque)
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

    @property
    def idle(self) -> bool:
        return self.ready and not self.jobs

    def begin_job(self, now: float) -> None:
        """Note that the first job, if there is one, begins now."""
        self.job_started, self.slow = now, False
        self.deadline = now + self.jobs[0].seconds if self.jobs else math.inf

    def send_jobs(self, jobs: Iterable[VerifierJob], now: float) -> bool:
        """Send jobs to an idle process; return whether it still runs."""
        self.jobs.extend(jobs)
        self.begin_job(now)
        self.last_sent = now
        self.num_sent = len(self.jobs)
        return self.send(encode([job.message for job in self.jobs]))
