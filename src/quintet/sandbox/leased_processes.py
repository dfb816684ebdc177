"""Worker processes that each answer the requests of one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from quintet.errors import MachineError
from quintet.sandbox.worker_processes import MAX_FAILED_STARTS, WorkerProcess, WorkerProcesses


@dataclass(slots=True, eq=False)
class LeasedProcess(WorkerProcess):
    """Handle of a process that one thread uses at a time. `ended` is set by the exchange that notices it."""

    is_spent: bool = False
    """The process has exceeded a limit and is not used again."""


P = TypeVar("P", bound=LeasedProcess)
R = TypeVar("R")


class LeasedProcesses(Generic[P]):
    """Processes that are started when they are needed, up to a maximum number. Thread-safe."""

    def __init__(self, worker: str, create: Callable[..., P], max_processes: int, purpose: str) -> None:
        """`worker` is the `module:function` of a process, `create` makes its handle, and `purpose` says what it does in
        an error."""
        self._create, self._purpose = create, purpose
        self._slots = threading.BoundedSemaphore(max_processes)
        self._lock = threading.Lock()
        self._idle: list[P] = []
        # processes are read by the threads that have taken them; the lock guards the pool
        self._pool: WorkerProcesses[P] = WorkerProcesses(worker, None, lambda *_: None)

    def call(self, exchange: Callable[[P], R]) -> R:
        """Return the result of an exchange with a process, which is repeated once with another one if it has died.

        Raises:
            MachineError: no process starts.
        """
        with self._slots:
            process = self._idle_process() or self._fork()
            result = exchange(process)
            if process.ended and not process.is_spent:
                # perhaps earlier, while it was idle
                self._kill(process)
                process = self._fork()
                result = exchange(process)
            if process.ended or process.is_spent:
                self._kill(process)
            else:
                self._idle.append(process)
            return result

    def _idle_process(self) -> P | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _fork(self) -> P:
        with self._lock:
            for _ in range(MAX_FAILED_STARTS):
                # notices a fork server that has ended, and takes its messages, because it waits until they are read
                self._pool.wait(0.0)
                process = self._pool.fork(self._create, {})
                if process is not None:
                    return process
        raise MachineError(f"the processes that {self._purpose} do not start", "see their output above")

    def _kill(self, process: P) -> None:
        with self._lock:
            self._pool.kill(process)
