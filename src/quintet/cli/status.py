"""`quintet status`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.cli.example_files import with_installed_examples
from quintet.errors import MachineError, nearest
from quintet.tracking.progress import duration
from quintet.tracking.run_processes import ProcessRecord
from quintet.tracking.run_status import RunStatus, find_runs, is_run_directory, read_status, status_as_json

if TYPE_CHECKING:
    from rich.table import Table

RUNS = Path("runs")
"""Default of `output_dir`."""


def run(target: str | None, *, as_json: bool) -> None:
    """Print the runs in a directory, or one run in detail."""
    path = RUNS if target is None else find_run(target, with_parents=True)
    if target is not None and is_run_directory(path):
        status = read_status(path)
        print(json.dumps(status_as_json(status), indent=1)) if as_json else _print_details(status)
        return
    statuses = [read_status(run) for run in find_runs(path)]
    if as_json:
        print(json.dumps([status_as_json(status) for status in statuses], indent=1))
    elif statuses:
        from rich.console import Console

        Console().print(_table(statuses))
    else:
        print(f"no runs in {path}")


def find_run(target: str, *, with_parents: bool = False) -> Path:
    """Return the run directory with this path, or name below `runs`; `with_parents`, also a directory of runs.

    Raises:
        MachineError: there is none.
    """
    path = Path(with_installed_examples(target))
    for candidate in (path, RUNS / target):
        if is_run_directory(candidate) or (with_parents and find_runs(candidate)):
            return candidate
    names = [run.name for run in find_runs(RUNS)]
    close = nearest(target, names)
    hint = f"did you mean {close}?" if close else "`quintet status` lists the runs below runs/; or name a run directory"
    raise MachineError(f"no run at {path} or {RUNS / target}", hint)


def _table(statuses: Sequence[RunStatus]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "progress", "last progress", "launcher", "ranks", "last checkpoint"):
        table.add_column(column, overflow="fold")
    for status in statuses:
        leader = next(iter(status.processes), None)
        table.add_row(
            str(status.directory.path),
            status.state,
            progress_text(status),
            _age(status.progress_age_seconds),
            _process_and_host(leader) if leader else "–",
            f"{sum(rank.state != 'ended' for rank in status.ranks)} of {len(status.ranks)}",
            status.checkpoint.path.name if status.checkpoint else "–",
        )
    return table


def _print_details(status: RunStatus) -> None:
    print(f"{status.directory.path}: {status.state}" + (f" ({status.message})" if status.message else ""))
    print(f"progress: {progress_text(status)}, last {_age(status.progress_age_seconds)}")
    for record in status.processes:
        print(f"{record.process.role}: {_process_and_host(record)}, {_condition(record)}")
    if status.checkpoint:
        print(f"last checkpoint: {status.checkpoint.path}, {_age(status.checkpoint.age_seconds)}")
    for log in status.logs:
        print(f"log: {log}")


def progress_text(status: RunStatus) -> str:
    """Return for example `learning 3/100`."""
    progress = status.progress
    return "–" if progress is None else f"{progress.phase} {progress.done}/{progress.total}"


def _age(seconds: float | None) -> str:
    return "–" if seconds is None else f"{duration(max(0.0, seconds))} ago"


def _process_and_host(record: ProcessRecord) -> str:
    return f"process {record.process.pid} on {record.process.host}"


def _condition(record: ProcessRecord) -> str:
    if record.process.is_local or record.state == "ended":
        return record.state
    return f"{record.state} {_age(record.age_seconds)}"
