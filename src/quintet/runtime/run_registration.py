"""Registration of a process in the directory of its run, and obedience to `quintet stop`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from quintet.config.torchrun import RankInfo, describe_rank
from quintet.errors import InterruptedRun, UserError
from quintet.runtime.signals import exit_at_once
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.run_processes import HEARTBEAT_SECONDS, LAUNCHED_BY_RAY, RunProcess, RunProcesses

POLL_SECONDS = 0.5
"""Interval at which a request to stop is looked for."""
LEADER_LOCK = ".leader.lock"
"""Lock of the process that obeys requests to stop."""


@contextmanager
def registered_launcher(directory: RunDirectory, ranks: RankInfo) -> Iterator[None]:
    """Register this process as the Ray launcher of a run; a request to stop sends it SIGTERM.

    Raises:
        MachineError: the run is in use by another process, or its directory cannot be written.
    """
    processes = directory.processes
    with directory.lock(LEADER_LOCK):
        processes.clear()
        with _recorded(processes, processes.launcher, "Ray launcher", ranks.size, is_leader=True):
            yield


@contextmanager
def registered_rank(directory: RunDirectory, rank: RankInfo, components: str = "") -> Iterator[None]:
    """Register this process as a rank of a run, with the names of its components. Without a Ray launcher, a request to
    stop sends SIGTERM to rank 0.

    Raises:
        MachineError: the run is in use by another process, or its directory cannot be written.
    """
    processes, is_leader = directory.processes, rank.rank == 0 and LAUNCHED_BY_RAY not in os.environ
    with ExitStack() as stack:
        if is_leader:
            stack.enter_context(directory.lock(LEADER_LOCK))
            processes.stop_request.unlink(missing_ok=True)
            processes.launcher.unlink(missing_ok=True)
            if "TORCHELASTIC_RUN_ID" in os.environ:
                processes.write(processes.launcher, RunProcess.of(os.getppid(), "torchrun", rank.size))
        path, role = processes.rank(rank.rank), describe_rank(rank.rank, components)
        stack.enter_context(_recorded(processes, path, role, rank.size, is_leader=is_leader))
        yield


@contextmanager
def _recorded(processes: RunProcesses, path: Path, role: str, size: int, *, is_leader: bool) -> Iterator[None]:
    """Record this process, and how it ends."""
    processes.write(path, RunProcess.of(os.getpid(), role, size))
    try:
        with _Watch(processes, path, is_leader=is_leader):
            yield
    except InterruptedRun as error:
        processes.end(path, "stopped", error.message)
        raise
    except UserError as error:
        processes.end(path, "failed", error.message)
        raise
    except BaseException as error:
        processes.end(path, "failed", f"{type(error).__name__}: {error}")
        raise
    processes.end(path, "ended")


@dataclass(slots=True)
class _Watch:
    """Thread that updates the time of the record and obeys requests to stop."""

    processes: RunProcesses
    record: Path
    is_leader: bool
    _parent: int = field(default_factory=os.getppid)
    _closed: threading.Event = field(default_factory=threading.Event)
    _is_stopping: bool = False
    _thread: threading.Thread | None = None

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()  # a thread that runs when the interpreter exits would abort the process

    def _run(self) -> None:
        updated = time.monotonic()
        while not self._closed.wait(POLL_SECONDS):
            if self.is_leader:
                self._obey()
            if time.monotonic() - updated >= HEARTBEAT_SECONDS:
                updated = time.monotonic()
                self._update()

    def _update(self) -> None:
        with suppress(OSError):  # the record was removed together with the run directory
            os.utime(self.record)
            if self.is_leader and self.record != self.processes.launcher and os.getppid() == self._parent:
                os.utime(self.processes.launcher)

    def _obey(self) -> None:
        request = self.processes.read_stop_request()
        if request == "now":
            self.processes.end(self.record, "stopped", "stopped at once")
            exit_at_once("stopped at once by quintet stop --now", signal.SIGTERM)
        if request is not None and not self._is_stopping:
            self._is_stopping = True
            os.kill(os.getpid(), signal.SIGTERM)
