"""Status of a run, read from its directory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quintet.errors import MachineError
from quintet.tracking.progress_file import PhaseProgress
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.run_processes import ProcessRecord

RunState = Literal["running", "stopping", "finished", "stopped", "failed", "died", "unknown"]
"""A run that died was killed, or its machine was lost; the state is unknown without records of its processes."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """Checkpoint of a run."""

    path: Path
    age_seconds: float


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Status of a run from the files of its directory."""

    directory: RunDirectory
    state: RunState
    message: str
    """Why it stopped or failed."""
    progress: PhaseProgress | None
    progress_age_seconds: float | None
    """Time since the last progress of any phase."""
    launcher: ProcessRecord | None
    """Process that started the ranks; None in a single process."""
    ranks: Sequence[ProcessRecord]
    checkpoint: StoredCheckpoint | None
    logs: Sequence[Path]

    @property
    def leader(self) -> ProcessRecord | None:
        """Process without which the run does not go on."""
        return _leader(self.launcher, self.ranks)

    @property
    def running(self) -> list[ProcessRecord]:
        """Processes that have not ended. Without the leader, ranks of other machines end as well."""
        records = [record for record in (self.leader, *self.ranks) if record and record.state != "ended"]
        if self.leader in records:
            return list(dict.fromkeys(records))
        return [record for record in records if record.process.is_local]

    @property
    def processes(self) -> list[ProcessRecord]:
        """Launcher and ranks."""
        return [*([self.launcher] if self.launcher else []), *self.ranks]


def is_run_directory(path: Path) -> bool:
    """Return whether a directory belongs to a run of `quintet train` or `quintet sft`."""
    directory = RunDirectory(path)
    # also if the state is damaged: no file, or a link to nothing
    return os.path.lexists(directory.state) or directory.processes.path.is_dir()


def find_runs(parent: Path) -> list[Path]:
    """Return the run directories in a directory, the most recently started first."""
    paths = [path for path in parent.iterdir() if is_run_directory(path)] if parent.is_dir() else []
    return sorted(paths, key=lambda path: -max(_modified(path), _modified(RunDirectory(path).processes.path)))


def read_status(path: Path) -> RunStatus:
    """Return the status of the run in a directory; unknown, with the reason, if its state file is damaged."""
    directory = RunDirectory(path)
    launcher, ranks = directory.processes.records()
    state, message = _state(directory, launcher, ranks)
    progress = _newest(directory.progress, path / "sft" / directory.progress.name)
    checkpoint = max(_checkpoints(directory), key=_modified, default=None)
    return RunStatus(
        directory,
        state,
        message,
        None if progress is None else PhaseProgress.read(progress),
        None if progress is None else time.time() - _modified(progress),
        launcher,
        ranks,
        None if checkpoint is None else StoredCheckpoint(checkpoint, time.time() - _modified(checkpoint)),
        [log for log in (directory.metrics, *sorted(directory.logs.glob("*.log"))) if log.exists()],
    )


def _state(
    directory: RunDirectory, launcher: ProcessRecord | None, ranks: Sequence[ProcessRecord]
) -> tuple[RunState, str]:
    """Return the state, and why the run stopped or failed."""
    request = directory.processes.read_stop_request()
    leader = _leader(launcher, ranks)
    if leader is not None and leader.state != "ended":
        return ("running" if request is None else "stopping"), ""
    try:
        if directory.read_state().get("status") == "finished":
            return "finished", ""
    except MachineError as error:
        return "unknown", error.message
    if leader is None:
        return "unknown", ""
    for process in (leader.process, *(record.process for record in ranks)):
        if process.outcome in ("stopped", "failed"):
            return process.outcome, process.message
    if request is not None:
        return "stopped", "stopped at once"
    return "died", f"{leader.process.role} on {leader.process.host} ended without a message"


def _leader(launcher: ProcessRecord | None, ranks: Sequence[ProcessRecord]) -> ProcessRecord | None:
    """Return the Ray launcher, else rank 0: it obeys requests to stop, and may outlive torchrun."""
    if launcher is not None and launcher.process.role != "torchrun":
        return launcher
    return ranks[0] if ranks else None


def _newest(*paths: Path) -> Path | None:
    return max((path for path in paths if path.exists()), key=_modified, default=None)


def _modified(path: Path) -> float:
    """Return the time of a file or directory, 0 if it does not exist any more."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _checkpoints(directory: RunDirectory) -> Iterator[Path]:
    """Yield the checkpoints of a run, and of its warm start and fine-tuning."""
    for root in (directory.checkpoints, directory.warm_start_checkpoints, directory.path / "sft/checkpoints"):
        yield from root.glob("global_step_*")


def status_as_json(status: RunStatus) -> dict[str, Any]:
    """Return a status as JSON values."""
    progress, checkpoint = status.progress, status.checkpoint
    return {
        "path": str(status.directory.path),
        "state": status.state,
        "message": status.message,
        "phase": progress.phase if progress else None,
        "done": progress.done if progress else None,
        "total": progress.total if progress else None,
        "unit": progress.unit if progress else None,
        "progress_age_seconds": status.progress_age_seconds,
        "launcher": _process_as_json(status.launcher) if status.launcher else None,
        "ranks": [_process_as_json(rank) for rank in status.ranks],
        "checkpoint": str(checkpoint.path) if checkpoint else None,
        "checkpoint_age_seconds": checkpoint.age_seconds if checkpoint else None,
        "logs": [str(log) for log in status.logs],
    }


def _process_as_json(record: ProcessRecord) -> dict[str, Any]:
    process = record.process
    return {"role": process.role, "host": process.host, "pid": process.pid, "state": record.state}
