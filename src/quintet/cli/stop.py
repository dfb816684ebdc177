"""`quintet stop`."""

from __future__ import annotations

import time
from pathlib import Path

from quintet.cli.status import RUNS, find_run, progress_text
from quintet.contained_files import contained_path
from quintet.errors import MachineError
from quintet.tracking.run_processes import ProcessRecord
from quintet.tracking.run_status import RunStatus, find_runs, read_status

POLL_SECONDS = 0.2
KILL_SECONDS = 5.0
"""Time in which the processes obey a request to end at once, after which those of this machine are killed."""


def run(target: str | None, *, timeout_seconds: float, now: bool) -> None:
    """Ask a run to end, and wait until its processes have ended.

    Raises:
        MachineError: there is no such run, or it still runs after `timeout_seconds`; without a target, if not exactly
            one is running.
    """
    path = _only_running() if target is None else find_run(target)
    status = read_status(path)
    if status.running:
        contained_path(path, status.directory.processes.stop_request.relative_to(path))
        status.directory.processes.request_stop(now=now)
        status = _wait(path, timeout_seconds, kill=now)
        print(f"{path}: {status.state} at {progress_text(status)}; the same command continues it")
    else:
        print(f"{path} is not running: {status.state}")


def _only_running() -> Path:
    """Return the run below `runs` that is running.

    Raises:
        MachineError: none is running, or several are.
    """
    running = [path for path in find_runs(RUNS) if read_status(path).running]
    if len(running) == 1:
        return running[0]
    message = f"{len(running)} runs are running in {RUNS}: {', '.join(path.name for path in running)}"
    raise MachineError(message if running else f"no run is running in {RUNS}", "name the run: quintet stop RUN")


def _wait(path: Path, timeout_seconds: float, *, kill: bool) -> RunStatus:
    started = time.monotonic()
    while running := (status := read_status(path)).running:
        seconds = time.monotonic() - started
        if kill and seconds > KILL_SECONDS:
            for record in running:
                record.kill()
        if seconds > timeout_seconds:
            raise _still_running(status, running, timeout_seconds, now=kill)
        time.sleep(POLL_SECONDS)
    return status


def _still_running(
    status: RunStatus, running: list[ProcessRecord], timeout_seconds: float, *, now: bool
) -> MachineError:
    names = ", ".join(
        f"{run_process.process.role} (process {run_process.process.pid} on {run_process.process.host})"
        for run_process in running
    )
    path = status.directory.path
    if now:
        return MachineError(f"{path}: {names} still run", f"run `quintet stop --now {path}` on their machine")
    return MachineError(
        f"{path} still runs after {timeout_seconds:g} seconds, at {progress_text(status)}: {names}",
        "it ends after its current step; --timeout waits longer, --now ends it at once",
    )
