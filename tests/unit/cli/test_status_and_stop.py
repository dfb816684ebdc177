"""If these fail, users cannot see or stop their runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from quintet.cli import stop
from quintet.cli.main import app
from quintet.errors import MachineError
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.run_processes import RunProcess


def quintet(*arguments: str) -> None:
    app(list(arguments), standalone_mode=False)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    run = RunDirectory(Path("runs/lake"))
    run.create()
    run.write_state("running")
    run.progress.write_text('{"phase": "learning", "done": 3, "total": 10, "unit": "step"}')
    run.metrics.touch()
    (run.checkpoints / "global_step_2").mkdir(parents=True)
    return run


@pytest.fixture
def process(run: RunDirectory) -> Iterator[subprocess.Popen[bytes]]:
    """A run that does not obey."""
    record = run.processes.rank(0)
    record.parent.mkdir()
    record.touch()
    with record.open("r+") as file:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdin=file)
    record.write_text(json.dumps(asdict(RunProcess.of(child.pid, "rank 0", 1))))
    yield child
    child.kill()
    child.wait()


def test_runs_are_listed_with_their_progress(
    process: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    quintet("status")
    line = next(line for line in capsys.readouterr().out.splitlines() if "lake" in line)
    assert "running" in line
    assert "learning 3/10" in line
    assert f"process {process.pid} on {os.uname().nodename}" in line
    assert "1 of 1" in line
    assert "global_step_2" in line


@pytest.mark.parametrize("name", ["lake", "runs/lake"])
def test_one_run_is_shown_in_detail(
    process: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    quintet("status", name)
    lines = re.sub(r"\d+ s ago", "0 s ago", capsys.readouterr().out).splitlines()
    assert lines[:2] == ["runs/lake: running", "progress: learning 3/10, last 0 s ago"]
    assert f"rank 0: process {process.pid} on {os.uname().nodename}, running" in lines
    assert "last checkpoint: runs/lake/checkpoints/global_step_2, 0 s ago" in lines
    assert "log: runs/lake/metrics.jsonl" in lines


def test_status_as_json_is_complete(process: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    quintet("status", "--json")
    (listed,) = json.loads(capsys.readouterr().out)
    quintet("status", "lake", "--json")
    shown = json.loads(capsys.readouterr().out)
    ages = ("progress_age_seconds", "checkpoint_age_seconds")
    assert all(0 <= run.pop(age) < 60 for run in (listed, shown) for age in ages)
    assert listed == shown
    assert shown == {
        "path": "runs/lake",
        "state": "running",
        "message": "",
        "phase": "learning",
        "done": 3,
        "total": 10,
        "unit": "step",
        "launcher": None,
        "ranks": [{"role": "rank 0", "host": os.uname().nodename, "pid": process.pid, "state": "running"}],
        "checkpoint": "runs/lake/checkpoints/global_step_2",
        "logs": ["runs/lake/metrics.jsonl"],
    }


def test_stopping_a_run_that_has_ended_is_no_error(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.processes.write(run.processes.rank(0), RunProcess.of(os.getpid(), "rank 0", 1))
    run.processes.end(run.processes.rank(0), "failed", "no memory")
    quintet("stop", "lake")
    assert capsys.readouterr().out == "runs/lake is not running: failed\n"
    assert run.processes.read_stop_request() is None


def test_a_run_that_does_not_stop_in_time_is_named(run: RunDirectory, process: subprocess.Popen[bytes]) -> None:
    with pytest.raises(MachineError) as error:
        quintet("stop", "--timeout", "0.3")
    assert "runs/lake still runs after 0.3 seconds, at learning 3/10: rank 0 (process" in str(error.value)
    assert run.processes.read_stop_request() == "after step"
    assert process.poll() is None


def test_a_suspended_run_is_killed_by_now(
    run: RunDirectory,
    process: subprocess.Popen[bytes],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop, "KILL_SECONDS", 0.3)
    process.send_signal(signal.SIGSTOP)
    quintet("stop", "lake", "--now", "--timeout", "5")
    assert process.wait(timeout=5) == -signal.SIGKILL
    assert "runs/lake: stopped at learning 3/10" in capsys.readouterr().out


def test_without_a_name_the_only_running_run_is_stopped(run: RunDirectory, process: subprocess.Popen[bytes]) -> None:
    other = RunDirectory(Path("runs/other"))
    other.create()
    other.write_state("finished")
    assert stop._only_running() == run.path
    other.processes.write(other.processes.rank(0), RunProcess.of(os.getpid(), "rank 0", 1))
    with pytest.raises(MachineError, match="2 runs are running in runs: "):
        stop._only_running()
