"""Pool of killable verifier processes: one that hangs or dies only costs its own response.

The time limit of a response starts when its process begins with it. A process that exceeds the limit is killed with all
its descendants, and the response has failed. With built-in verifiers, other processes take over the responses behind a
slow one.
"""

from __future__ import annotations

import os
import threading
import weakref

from quintet.errors import UserError
from quintet.rewards.dispatcher import Dispatcher, PoolConfig, VerifierResult
from quintet.rewards.verifier_process import ProcessKind, VerifierJob

START_SECONDS = 120.0
"""Time limit of importing a user's function."""


class VerifierPool:
    """Pool that accepts jobs and returns results in order of completion. Ends with the run, however the run ends."""

    def __init__(self, config: PoolConfig) -> None:
        self._results = _ResultQueue()
        dispatcher = Dispatcher(config, self._results.deliver, self._results.report)
        self._dispatcher = dispatcher
        # a forked child of the run has this object, but neither the thread nor the processes
        self._close = weakref.finalize(self, _stop, dispatcher, os.getpid())

    def start(self, process_kind: ProcessKind, *, wait: bool = False) -> None:
        """Start processes before there are jobs; `wait` until one is ready.

        Raises:
            ConfigError: the user's function cannot be loaded.
        """
        self._dispatcher.start_processes(process_kind)
        if wait:
            self._results.wait_for_start(START_SECONDS)

    def submit(self, job: VerifierJob) -> None:
        """Queue a job."""
        if not self._close.alive:
            raise RuntimeError("the pool is closed")
        self._results.expect()
        self._dispatcher.put(job)

    def ready(self) -> list[VerifierResult]:
        """Return the results since the last call, without waiting.

        Raises:
            UserError: no further jobs can be done.
        """
        return self._results.take()

    def drain(self) -> list[VerifierResult]:
        """Wait for all jobs and return the results that were not returned yet.

        Raises:
            UserError: no further jobs can be done.
        """
        return self._results.take_all()

    def close(self) -> None:
        """End all processes, busy or not."""
        self._close()


def _stop(dispatcher: Dispatcher, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        dispatcher.stop()


class _ResultQueue:
    """Results and errors passed between two threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._results: list[VerifierResult] = []
        self._num_pending = 0
        self._started = False
        self._error: UserError | None = None

    def expect(self) -> None:
        with self._changed:
            self._num_pending += 1

    def deliver(self, result: VerifierResult) -> None:
        with self._changed:
            self._num_pending -= 1
            self._results.append(result)
            if self._num_pending == 0:
                self._changed.notify_all()

    def report(self, error: UserError | None) -> None:
        with self._changed:
            if error is None:
                self._started = True
            else:
                self._error = error
            self._changed.notify_all()

    def wait_for_start(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._started or self._error is not None, seconds)
            self._raise_error()

    def take(self) -> list[VerifierResult]:
        with self._changed:
            self._raise_error()
            results, self._results = self._results, []
            return results

    def take_all(self) -> list[VerifierResult]:
        with self._changed:
            self._changed.wait_for(lambda: self._num_pending == 0 or self._error is not None)
        return self.take()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
