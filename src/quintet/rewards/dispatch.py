"""Who judges what, and for how long: a thread that hands jobs to processes and ends those that take too long."""

from __future__ import annotations

import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quintet.errors import ConfigError, MachineError, UserError
from quintet.processes.kept import KeeperProcess, how_it_ended
from quintet.records import Failure
from quintet.rewards.processes import Job, JudgeProcess, Lane
from quintet.rewards.worker import Setup

__all__ = ["Crew", "Dispatcher", "Result"]

PATIENCE_SECONDS = 0.08
"""An answer that takes longer no longer holds up those behind it, where more processes may be made."""
PAUSE_SECONDS, PAUSE_SHARE = 1.0, 0.2
"""For so long at most, and for so much of its time, it is stopped while others wait: ten answers that never end would
take the processors from a hundred that end at once."""
MOST_AT_ONCE = 16
"""Jobs in one message."""
MESSAGE_SECONDS = 0.02
"""Work in one message, by what the last ones took."""
MOST_BAD_STARTS = 3
"""Processes or keepers in a row that end before they have done anything."""
WORKER = "quintet.rewards.worker:work"
"""What they do."""


@dataclass(frozen=True, slots=True)
class Crew:
    """How many processes judge, and what they are.

    While some are slow, up to `overflow` more take over what waits; 0 keeps to `workers`, one job after another.
    Jobs begin at least `interval_seconds` apart.
    """

    setup: Setup
    workers: int
    overflow: int = 0
    interval_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a job: a process's `reply`, or why there is none."""

    key: int
    reply: Mapping[str, Any] | None
    failure: Failure | None = None


class Dispatcher:
    """Runs in a thread of its own; `put` and `stop` may be called from others, `deliver` is called in its own."""

    def __init__(
        self, crew: Crew, deliver: Callable[[Result], None], report: Callable[[UserError | None], None]
    ) -> None:
        """`deliver` takes results; `report` is told once a process is ready (None), and what stops all of them."""
        self._crew, self._deliver, self._report = crew, deliver, report
        self._inbox: deque[Job | Lane] = deque()
        self._queues: dict[Lane, deque[Job]] = {}
        self._processes: dict[int, JudgeProcess] = {}
        self._born = 0
        self._begun = False
        self._bad_starts = 0
        self._bad_keepers = 0
        self._next_start = 0.0
        self._pace: dict[Lane, float] = {}
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._wake)
        self._keeper = self._new_keeper()
        self._thread = threading.Thread(target=self._run, name="quintet-rewards", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Have a job done."""
        self._inbox.append(job)
        self._stir()

    def warm(self, lane: Lane) -> None:
        """Make processes of a lane before there is anything to do."""
        self._inbox.append(lane)
        self._stir()

    def stop(self) -> None:
        """End all processes, at work or not."""
        self._stopping = True
        self._stir()
        # whoever collects garbage may be this very thread
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _stir(self) -> None:
        try:
            self._wakes.send(b".")
        except (BlockingIOError, OSError):
            # full: it is awake already; closed: there is nobody to wake
            return

    # ---- in its own thread from here on

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException:
            self._report(MachineError("what hands answers to the processes that judge has failed"))
            raise
        finally:
            self._end()

    def _end(self) -> None:
        self._keeper.close()
        for process in self._processes.values():
            process.connection.close()
        for end in (self._woken, self._wakes):
            end.close()
        self._selector.close()

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._seconds_to_wait()):
            key.data()
        self._sort_inbox()
        now = time.monotonic()
        self._end_overdue(now)
        self._relieve_slow(now)
        self._hand_out(now)
        self._resume_paused(now)

    def _seconds_to_wait(self) -> float | None:
        times = list(self._times())
        return max(min(times) - time.monotonic(), 0.0) if times else None

    def _times(self) -> Iterator[float]:
        """When something is to be looked at, although nobody says a word."""
        for process in self._processes.values():
            if process.jobs:
                yield process.ends
                if self._crew.overflow and not process.slow:
                    yield process.since + PATIENCE_SECONDS
                if process.resumes is not None:
                    yield process.resumes
        if self._crew.interval_seconds and any(self._queues.values()):
            yield max(self._next_start, time.monotonic() + 0.001)

    def _wake(self) -> None:
        self._woken.recv(4096)

    def _sort_inbox(self) -> None:
        while self._inbox:
            found = self._inbox.popleft()
            if isinstance(found, Lane):
                self._staff(found)
            else:
                self._queues.setdefault(found.lane, deque()).append(found)

    # ---- handing out

    def _hand_out(self, now: float) -> None:
        for lane, queue in self._queues.items():
            while queue and self._free(now) and (process := self._idle(lane)) is not None:
                self._give(process, queue, now)
            if queue and self._free(now):
                self._hire(lane, len(queue))
        if not any(self._queues.values()):
            self._dismiss_surplus()

    def _free(self, now: float) -> bool:
        """Whether one more job may begin."""
        at_work = sum(bool(one.jobs) and not one.slow for one in self._processes.values())
        return at_work < self._crew.workers and now >= self._next_start

    def _idle(self, lane: Lane) -> JudgeProcess | None:
        return next((one for one in self._processes.values() if one.idle and one.lane == lane), None)

    def _give(self, process: JudgeProcess, queue: deque[Job], now: float) -> None:
        several = int(MESSAGE_SECONDS / max(self._pace.get(process.lane, MESSAGE_SECONDS), 1e-6))
        several = min(several, MOST_AT_ONCE, len(queue) // (2 * self._crew.workers))
        count = 1 if self._crew.interval_seconds else max(several, 1)
        self._next_start = now + self._crew.interval_seconds
        jobs = [queue.popleft() for _ in range(count)]
        try:
            process.send(jobs, now)
        except OSError:
            # it ended while it had nothing to do
            self._forget(process)
            queue.extendleft(reversed(jobs))

    def _staff(self, lane: Lane) -> None:
        """As many processes of a lane as there may be."""
        for _ in range(self._crew.workers - len(self._processes)):
            self._fork(lane)

    def _hire(self, lane: Lane, waiting: int) -> None:
        """Make room for what waits: new processes, in place of idle ones of other lanes where there are enough."""
        starting = sum(not one.ready for one in self._processes.values())
        at_work = sum(bool(one.jobs) and not one.slow for one in self._processes.values())
        for _ in range(min(waiting, self._crew.workers - at_work) - starting):
            if len(self._processes) >= self._crew.workers + self._crew.overflow and not self._dismiss_other(lane):
                return
            self._fork(lane)

    def _dismiss_other(self, lane: Lane) -> bool:
        other = next((one for one in self._processes.values() if one.idle and one.lane != lane), None)
        if other is not None:
            self._forget(other)
        return other is not None

    def _dismiss_surplus(self) -> None:
        """Nothing waits: those beyond what there should be go."""
        idle = [one for one in self._processes.values() if one.idle]
        for process in idle[self._crew.workers :]:
            self._forget(process)

    def _fork(self, lane: Lane) -> None:
        self._born += 1
        try:
            self._keeper.load(lane.modules)
            connection = self._keeper.fork(self._born, {**asdict(self._crew.setup), "seal": lane.seal})
        except OSError:
            # the keeper's end is noticed by itself, and another one asked
            return
        process = JudgeProcess(self._born, lane, connection)
        self._processes[process.number] = process
        self._selector.register(process.connection, selectors.EVENT_READ, lambda: self._listen(process))

    # ---- listening

    def _listen(self, process: JudgeProcess) -> None:
        if process.number not in self._processes:
            return
        for reply in process.replies():
            self._hear(process, reply)
            if process.number not in self._processes:
                return
        if process.ended:
            # how, the keeper says; until then the connection would wake us for nothing
            self._unregister(process)

    def _hear(self, process: JudgeProcess, reply: Mapping[str, Any]) -> None:
        if "broken" in reply:
            told = reply["broken"]
            failure = Failure("reward", told["kind"], told["message"])
            self._forget(process)
            self._start_failed(process.lane, failure, told["hint"], for_good=True)
        elif "ready" in reply:
            process.ready = self._begun = True
            self._bad_starts = self._bad_keepers = 0
            self._report(None)
        elif process.jobs:
            self._answered(process, reply)

    def _answered(self, process: JudgeProcess, reply: Mapping[str, Any]) -> None:
        job = process.jobs.popleft()
        process.since, process.slow = time.monotonic(), False
        # it may have been stopped as it answered
        self._resume(process)
        told = reply.get("failure")
        failure = None if told is None else Failure("reward", told["kind"], told["message"])
        self._deliver(Result(job.key, None if failure else reply, failure))
        if process.last:
            self._forget(process)
        elif process.idle:
            took = (process.since - process.sent) / process.count
            self._pace[process.lane] = (self._pace.get(process.lane, took) + took) / 2

    def _attend(self) -> None:
        """What the keeper has to say."""
        try:
            for word in self._keeper.news():
                process = self._processes.get(word["died"])
                if process is not None:
                    self._died(process, word["status"])
        except OSError:
            self._replace_keeper()

    def _died(self, process: JudgeProcess, status: int) -> None:
        # what it said last may still lie in the connection
        self._listen(process)
        if process.number not in self._processes:
            return
        failure = Failure("reward", "ProcessDied", how_it_ended(status))
        if process.ready:
            self._give_up(process, failure)
        else:
            self._forget(process)
            self._start_failed(process.lane, failure)

    # ---- ending

    def _end_overdue(self, now: float) -> None:
        for process in [one for one in self._processes.values() if one.jobs and now >= one.ends]:
            seconds = process.jobs[0].seconds
            self._give_up(
                process, Failure("reward", "Timeout", f"no verdict after {seconds:g} s: its process was killed")
            )

    def _give_up(self, process: JudgeProcess, failure: Failure) -> None:
        """The job that a process is at has failed; what it was to do next goes back to the others."""
        self._forget(process)
        if process.jobs:
            self._deliver(Result(process.jobs.popleft().key, None, failure))
        self._queues.setdefault(process.lane, deque()).extendleft(reversed(process.jobs))

    def _relieve_slow(self, now: float) -> None:
        """What waits behind a slow job goes to others, and one more process may be made."""
        if not self._crew.overflow:
            return
        for process in self._processes.values():
            if process.jobs and not process.slow and now - process.since >= PATIENCE_SECONDS:
                process.slow = True
                current, *others = process.jobs
                process.jobs, process.last = deque([current]), process.last or bool(others)
                self._queues.setdefault(process.lane, deque()).extendleft(reversed(others))
                if process.lane.seal and any(self._queues.values()):
                    process.resumes = now + min(PAUSE_SECONDS, PAUSE_SHARE * current.seconds)
                    self._signal(process, signal.SIGSTOP)

    def _resume_paused(self, now: float) -> None:
        waiting = any(self._queues.values())
        for process in self._processes.values():
            if process.resumes is not None and (now >= process.resumes or not waiting):
                self._resume(process)

    def _resume(self, process: JudgeProcess) -> None:
        if process.resumes is not None:
            process.resumes = None
            self._signal(process, signal.SIGCONT)

    def _signal(self, process: JudgeProcess, what: signal.Signals) -> None:
        try:
            self._keeper.signal(process.number, what)
        except OSError:
            # it ended with its keeper
            return

    def _forget(self, process: JudgeProcess) -> None:
        """End a process, whatever it is at."""
        del self._processes[process.number]
        self._unregister(process)
        process.connection.close()
        self._signal(process, signal.SIGKILL)

    def _unregister(self, process: JudgeProcess) -> None:
        if process.connection in self._selector.get_map():
            self._selector.unregister(process.connection)

    def _start_failed(self, lane: Lane, failure: Failure, hint: str | None = None, *, for_good: bool = False) -> None:
        """A process can't begin; where none ever has, or some in a row can't, nobody waits for the next."""
        self._bad_starts += 1
        if self._begun and not for_good and self._bad_starts < MOST_BAD_STARTS:
            return
        function = self._crew.setup.function
        known = failure.kind in ("ConfigError", "ProcessDied")
        message = failure.message if known else f"{failure.kind}: {failure.message}"
        if function is None:
            self._report(MachineError(f"processes that judge answers don't start: {message}"))
        elif failure.kind == "ConfigError":
            self._report(ConfigError(message, key="reward.function", value=function, hint=hint))
        else:
            told = f"reward.function = {function!r} can't be loaded: {message}"
            self._report(ConfigError(told, key="reward.function", value=function, hint=hint))
        self._fail_all(lane, failure)

    def _fail_all(self, lane: Lane, failure: Failure) -> None:
        queue = self._queues.setdefault(lane, deque())
        while queue:
            self._deliver(Result(queue.popleft().key, None, failure))

    # ---- the keeper

    def _new_keeper(self) -> KeeperProcess:
        keeper = KeeperProcess(WORKER)
        self._selector.register(keeper.connection, selectors.EVENT_READ, self._attend)
        return keeper

    def _replace_keeper(self) -> None:
        """The keeper has died, and all its processes with it."""
        self._bad_keepers += 1
        self._selector.unregister(self._keeper.connection)
        self._keeper.close()
        failure = Failure("reward", "ProcessDied", "the process that keeps those that judge has died")
        for process in list(self._processes.values()):
            self._give_up(process, failure)
        if self._bad_keepers < MOST_BAD_STARTS:
            self._keeper = self._new_keeper()
            return
        self._stopping = True
        self._report(MachineError("processes that judge answers can't be started", "see what they wrote above"))
