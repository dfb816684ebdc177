"""Scheduling of jobs over worker processes and their time limits, in a separate thread."""

from __future__ import annotations

import math
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from quintet.errors import ConfigError, MachineError, UserError
from quintet.records import Failure
from quintet.rewards.verifier_process import ProcessKind, VerifierJob, VerifierProcess
from quintet.rewards.verifier_worker import Setup
from quintet.sandbox.worker_processes import MAX_FAILED_STARTS, ProcessEnd, WorkerProcesses

WORKER = "quintet.rewards.verifier_worker:work"
SLOW_SECONDS = 0.08
"""Jobs that take longer no longer delay the jobs behind them, if further processes are allowed."""
MAX_STOP_SECONDS, MAX_STOP_SHARE = 1.0, 0.2
"""Maximum time, absolute and as a share of its time limit, for which a slow process is suspended while other jobs wait:
ten responses that never end would otherwise take the CPU cores from a hundred quick ones."""
MAX_JOBS_PER_MESSAGE = 16
TARGET_MESSAGE_SECONDS = 0.02
"""Work in one message, estimated from the last ones."""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Kind and number of worker processes.

    While some are slow, up to `overflow` further processes take over waiting jobs; 0 runs one job after another in
    `workers` processes. Jobs begin at least `interval_seconds` apart.
    """

    setup: Setup
    workers: int
    overflow: int = 0
    interval_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class VerifierResult:
    """Reply of a worker to a job, or the failure of the job."""

    key: int
    reply: Mapping[str, Any] | None
    failure: Failure | None = None


class Dispatcher:
    """Thread that dispatches jobs; `put`, `warm` and `stop` may be called from other threads."""

    def __init__(
        self, config: PoolConfig, deliver: Callable[[VerifierResult], None], report: Callable[[UserError | None], None]
    ) -> None:
        """`deliver` receives results; `report` receives None once a process is ready, and fatal errors. Both are called
        in the thread of the dispatcher."""
        self._config, self._deliver, self._report = config, deliver, report
        self._inbox: deque[VerifierJob | ProcessKind] = deque()
        self._queues: dict[ProcessKind, deque[VerifierJob]] = {}
        self._was_ready = False
        self._num_failed_starts = 0
        self._next_start = 0.0
        self._seconds_per_job: dict[ProcessKind, float] = {}
        self._stopping = False
        self._processes = WorkerProcesses(WORKER, self._receive, self._process_ended, self._server_died)
        self._processes.start_fork_server()
        self._wakeup, self._wakeup_writer = socket.socketpair()
        for end in (self._wakeup, self._wakeup_writer):
            end.setblocking(False)
        self._processes.selector.register(self._wakeup, selectors.EVENT_READ, self._drain_wakeup)
        self._thread = threading.Thread(target=self._run, name="quintet-rewards", daemon=True)
        self._thread.start()

    def put(self, job: VerifierJob) -> None:
        """Queue a job."""
        self._inbox.append(job)
        self._wake()

    def start_processes(self, process_kind: ProcessKind) -> None:
        """Start the processes of a kind before there are jobs."""
        self._inbox.append(process_kind)
        self._wake()

    def stop(self) -> None:
        """End all processes, busy or not."""
        self._stopping = True
        self._wake()
        # a finalizer may run in this very thread
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        try:
            self._wakeup_writer.send(b".")
        except (BlockingIOError, OSError):
            # full: the thread is awake already; closed: the thread has ended
            return

    # ---- in the thread of the dispatcher from here on

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._iterate()
        except BaseException:
            self._report(MachineError("the dispatcher of the verifier processes has failed"))
            raise
        finally:
            self._processes.close()
            for end in (self._wakeup, self._wakeup_writer):
                end.close()
            self._processes.selector.close()

    def _iterate(self) -> None:
        self._processes.wait(max(min(self._timers(), default=math.inf) - time.monotonic(), 0.0))
        self._read_inbox()
        now = time.monotonic()
        self._handle_slow(now)
        self._assign(now)
        self._resume_stopped(now)

    def _timers(self) -> Iterator[float]:
        """Yield the times at which there is something to do besides the deadlines of the processes."""
        for process in self._processes:
            if process.jobs:
                if self._config.overflow and not process.slow:
                    yield process.job_started + SLOW_SECONDS
                if process.resume_at is not None:
                    yield process.resume_at
        if self._config.interval_seconds and any(self._queues.values()):
            yield max(self._next_start, time.monotonic() + 0.001)

    def _drain_wakeup(self) -> None:
        self._wakeup.recv(4096)

    def _read_inbox(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, ProcessKind):
                for _ in range(self._config.workers - len(self._processes)):
                    self._fork(item)
            else:
                self._queues.setdefault(item.process_kind, deque()).append(item)

    # ---- assigning jobs

    def _assign(self, now: float) -> None:
        for process_kind, queue in self._queues.items():
            while queue and self._may_start(now) and (idle := self._idle(process_kind)):
                self._send(idle[0], queue, now)
            if queue and self._may_start(now):
                self._add_processes(process_kind, len(queue))
        if not any(self._queues.values()):
            idle = [process for process in self._processes if process.idle]
            for process in idle[self._config.workers :]:
                self._processes.kill(process)

    def _may_start(self, now: float) -> bool:
        return self._num_working() < self._config.workers and now >= self._next_start

    def _num_working(self) -> int:
        """Return the number of processes with jobs that are not slow."""
        return sum(bool(process.jobs) and not process.slow for process in self._processes)

    def _idle(self, process_kind: ProcessKind) -> list[VerifierProcess]:
        return [process for process in self._processes if process.idle and process.process_kind == process_kind]

    def _send(self, process: VerifierProcess, queue: deque[VerifierJob], now: float) -> None:
        pace = self._seconds_per_job.get(process.process_kind, TARGET_MESSAGE_SECONDS)
        count = int(TARGET_MESSAGE_SECONDS / max(pace, 1e-6))
        count = min(count, MAX_JOBS_PER_MESSAGE, len(queue) // (2 * self._config.workers))
        count = 1 if self._config.interval_seconds else max(count, 1)
        self._next_start = now + self._config.interval_seconds
        jobs = [queue.popleft() for _ in range(count)]
        if not process.send_jobs(jobs, now):
            # it ended while it was idle
            self._processes.kill(process)
            queue.extendleft(reversed(jobs))

    def _add_processes(self, process_kind: ProcessKind, num_waiting: int) -> None:
        """Fork processes for waiting jobs, in place of idle ones of other kinds if the limit is reached."""
        starting = sum(not process.ready for process in self._processes)
        for _ in range(min(num_waiting, self._config.workers - self._num_working()) - starting):
            is_full = len(self._processes) >= self._config.workers + self._config.overflow
            others = [process for process in self._processes if process.idle and process.process_kind != process_kind]
            if is_full and not others:
                return
            if is_full:
                self._processes.kill(others[0])
            self._fork(process_kind)

    def _fork(self, process_kind: ProcessKind) -> None:
        setup = {**asdict(self._config.setup), "confined": process_kind.confined}
        self._processes.fork(partial(VerifierProcess, process_kind=process_kind), setup, process_kind.modules)

    # ---- receiving

    def _receive(self, process: VerifierProcess) -> None:
        for reply in process.receive_messages():
            self._handle(process, reply)
            if process not in self._processes:
                return

    def _handle(self, process: VerifierProcess, reply: Mapping[str, Any]) -> None:
        if "broken" in reply:
            error = reply["broken"]
            failure = Failure("reward", error["kind"], error["message"])
            self._processes.kill(process)
            self._start_failed(process.process_kind, failure, error["hint"], is_final=True)
        elif "ready" in reply:
            self._processes.mark_ready(process)
            self._was_ready, self._num_failed_starts = True, 0
            self._report(None)
        elif process.jobs:
            self._complete_job(process, reply)

    def _complete_job(self, process: VerifierProcess, reply: Mapping[str, Any]) -> None:
        job = process.jobs.popleft()
        process.begin_job(time.monotonic())
        # it may have been suspended as it replied
        self._resume(process)
        error = reply.get("failure")
        failure = None if error is None else Failure("reward", error["kind"], error["message"])
        self._deliver(VerifierResult(job.key, None if failure else reply, failure))
        if process.retire:
            self._processes.kill(process)
        elif process.idle:
            seconds = (process.job_started - process.last_sent) / process.num_sent
            self._seconds_per_job[process.process_kind] = (
                self._seconds_per_job.get(process.process_kind, seconds) + seconds
            ) / 2

    # ---- failures

    def _process_ended(self, process: VerifierProcess, end: ProcessEnd) -> None:
        """Fail the running job of a process and requeue the others."""
        if end.timed_out:
            problem = f"no result after {process.jobs[0].seconds:g} s: its process was killed"
            failure = Failure("reward", "Timeout", problem)
        else:
            failure = Failure("reward", "ProcessDied", end.describe("the verifier processes"))
        if not process.ready and not end.with_server:
            self._start_failed(process.process_kind, failure)
            return
        if process.jobs:
            self._deliver(VerifierResult(process.jobs.popleft().key, None, failure))
        self._requeue(process.process_kind, process.jobs)

    def _requeue(self, process_kind: ProcessKind, jobs: deque[VerifierJob] | list[VerifierJob]) -> None:
        self._queues.setdefault(process_kind, deque()).extendleft(reversed(jobs))

    def _handle_slow(self, now: float) -> None:
        """Requeue the jobs behind slow jobs and suspend slow processes for a while if others wait."""
        if not self._config.overflow:
            return
        for process in self._processes:
            if process.jobs and not process.slow and now - process.job_started >= SLOW_SECONDS:
                process.slow = True
                running, *others = process.jobs
                process.jobs, process.retire = deque([running]), process.retire or bool(others)
                self._requeue(process.process_kind, others)
                if process.process_kind.confined and any(self._queues.values()):
                    process.resume_at = now + min(MAX_STOP_SECONDS, MAX_STOP_SHARE * running.seconds)
                    self._processes.signal(process, signal.SIGSTOP)

    def _resume_stopped(self, now: float) -> None:
        is_waiting = any(self._queues.values())
        for process in self._processes:
            if process.resume_at is not None and (now >= process.resume_at or not is_waiting):
                self._resume(process)

    def _resume(self, process: VerifierProcess) -> None:
        """Continue a process if it is suspended."""
        if process.resume_at is not None:
            process.resume_at = None
            self._processes.signal(process, signal.SIGCONT)

    def _start_failed(
        self, process_kind: ProcessKind, failure: Failure, hint: str | None = None, *, is_final: bool = False
    ) -> None:
        """Handle a process that failed to start: if no process has ever started, or several in a row fail, fail the
        waiting jobs."""
        self._num_failed_starts += 1
        if self._was_ready and not is_final and self._num_failed_starts < MAX_FAILED_STARTS:
            return
        function = self._config.setup.function
        is_known = failure.error_type in ("ConfigError", "ProcessDied")
        message = failure.message if is_known else f"{failure.error_type}: {failure.message}"
        if function is None:
            self._report(MachineError(f"verifier processes do not start: {message}"))
        elif failure.error_type == "ConfigError":
            self._report(ConfigError(message, key="reward.function", value=function, hint=hint))
        else:
            message = f"reward.function = {function!r} cannot be loaded: {message}"
            self._report(ConfigError(message, key="reward.function", value=function, hint=hint))
        queue = self._queues.setdefault(process_kind, deque())
        while queue:
            self._deliver(VerifierResult(queue.popleft().key, None, failure))

    def _server_died(self) -> None:
        if self._processes.num_failed_servers < MAX_FAILED_STARTS:
            self._processes.start_fork_server()
            return
        self._stopping = True
        self._report(MachineError("cannot start verifier processes", "see their output above"))
