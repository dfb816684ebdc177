"""If these fail, `quintet stop` does not stop a run, or `quintet status` does not know how a run ended."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quintet.config.torchrun import RankInfo
from quintet.errors import MachineError
from quintet.runtime.run_registration import registered_launcher, registered_rank
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.run_processes import LAUNCHED_BY_RAY
from quintet.tracking.run_status import read_status

RUN = """
import sys, time
from pathlib import Path
from quintet.config.torchrun import RankInfo
from quintet.errors import InterruptedRun
from quintet.runtime.run_registration import registered_launcher, registered_rank
from quintet.runtime.signals import stop_on_signals
from quintet.tracking.run_directory import RunDirectory

with {registered}(RunDirectory(Path(sys.argv[1])), RankInfo()), stop_on_signals() as stop:
    print("ready", flush=True)
    while not stop:
        time.sleep(0.02)
    raise InterruptedRun(f"stopped by {{stop.number.name}}")
"""


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.write_state("running")
    return run


@pytest.fixture
def start(directory: RunDirectory) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    started = []

    def start(registered: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", RUN.format(registered=registered), str(directory.path)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        assert started[0].stdout is not None
        assert started[0].stdout.readline() == "ready\n"
        return started[0]

    yield start
    for process in started:
        process.kill()
        process.communicate()


Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.mark.parametrize("registered", ["registered_launcher", "registered_rank"])
def test_a_request_to_stop_is_sigterm(start: Start, directory: RunDirectory, registered: str) -> None:
    process = start(registered)
    assert read_status(directory.path).state == "running"
    directory.processes.request_stop(now=False)
    _, errors = process.communicate(timeout=5)
    assert "InterruptedRun: stopped by SIGTERM" in errors
    status = read_status(directory.path)
    assert (status.state, status.message) == ("stopped", "stopped by SIGTERM")


def test_a_request_to_stop_now_ends_the_process_at_once(start: Start, directory: RunDirectory) -> None:
    process = start("registered_rank")
    directory.processes.request_stop(now=True)
    _, errors = process.communicate(timeout=5)
    assert process.returncode == 143
    assert errors == "quintet: stopped at once by quintet stop --now\n"
    assert read_status(directory.path).state == "stopped"


def test_a_killed_launcher_is_noticed_and_the_run_can_be_started_again(start: Start, directory: RunDirectory) -> None:
    process = start("registered_launcher")
    process.kill()
    process.wait()
    assert read_status(directory.path).state == "died"
    directory.processes.request_stop(now=False)  # of this start, not of the next one
    with registered_rank(directory, RankInfo(), "Trainers"):
        assert directory.processes.read_stop_request() is None
        status = read_status(directory.path)
        assert (status.state, status.launcher) == ("running", None)
        assert [record.process.role for record in status.ranks] == ["rank 0 (Trainers)"]


def test_a_second_start_is_refused_and_does_not_hide_the_first(start: Start, directory: RunDirectory) -> None:
    process = start("registered_launcher")
    for register in (registered_launcher, registered_rank):
        refused = pytest.raises(MachineError, match=f"is in use by another run .process {process.pid}")
        with refused, register(directory, RankInfo()):
            pass
    assert read_status(directory.path).state == "running"


def test_a_rank_leaves_requests_to_its_ray_launcher(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, start: Start
) -> None:
    monkeypatch.setenv(LAUNCHED_BY_RAY, "1")
    process = start("registered_rank")
    directory.processes.request_stop(now=False)
    time.sleep(1.5)
    assert process.poll() is None


def test_the_error_that_ended_a_run_is_shown(directory: RunDirectory) -> None:
    for error, message in ((MachineError("no memory", "add some"), "no memory"), (OSError("x"), "OSError: x")):
        with pytest.raises(type(error)), registered_rank(directory, RankInfo()):
            raise error
        status = read_status(directory.path)
        assert (status.state, status.message) == ("failed", message)
