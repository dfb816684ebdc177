"""If these fail, `quintet status` shows a dead run as running, or `quintet stop` ends a process of somebody else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from quintet.tracking.progress import PlainProgress
from quintet.tracking.progress_file import PhaseProgress, RecordedProgress
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.run_processes import LOST_SECONDS, ProcessRecord, RunProcess, read_record
from quintet.tracking.run_status import find_runs, read_status


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that opens the file which it is told to open."""
    code = "import sys, time; opened = open(sys.stdin.readline().strip()); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def let_open(process: subprocess.Popen[bytes], path: Path) -> None:
    """Let a child open a file, as a process of a run does with its record."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{path}\n".encode())
    process.stdin.flush()
    process.stdout.readline()


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "runs/lake")
    run.create()
    run.write_state("running")
    return run


def test_a_later_process_with_the_same_number_is_not_the_run(
    directory: RunDirectory, child: subprocess.Popen[bytes]
) -> None:
    ours, path = RunProcess.of(child.pid, "rank 0", 1), directory.processes.rank(0)
    directory.processes.write(path, ours)
    let_open(child, path)
    assert ours.local_state() == "running"
    assert ours.start_ticks is not None
    earlier = replace(ours, start_ticks=ours.start_ticks - 1)
    assert earlier.local_state() == "ended"
    for other in (earlier, replace(ours, namespace="another machine"), replace(ours, pid=os.getpid())):
        ProcessRecord(path, other, 0.0).kill()
    assert child.poll() is None
    ProcessRecord(path, ours, 0.0).kill()
    assert child.wait(timeout=5) == -signal.SIGKILL
    assert ours.local_state() == "ended"
    ProcessRecord(path, ours, 0.0).kill()  # nothing is left to kill


def test_a_process_that_did_not_write_the_record_is_not_killed(
    directory: RunDirectory, child: subprocess.Popen[bytes]
) -> None:
    processes = directory.processes
    processes.write(processes.rank(0), RunProcess.of(child.pid, "rank 0", 1))
    record = read_record(processes.rank(0))
    assert record is not None
    let_open(child, directory.state)
    record.kill()
    time.sleep(0.05)
    assert child.poll() is None


def test_a_process_of_another_owner_than_the_record_is_not_killed(
    directory: RunDirectory, child: subprocess.Popen[bytes]
) -> None:
    processes = directory.processes
    processes.write(processes.rank(0), RunProcess.of(child.pid, "rank 0", 1))
    let_open(child, processes.rank(0))
    try:
        os.chown(processes.rank(0), os.getuid() + 1, -1)
    except PermissionError:
        pytest.skip("only root can give a file away")
    record = read_record(processes.rank(0))
    assert record is not None
    record.kill()
    time.sleep(0.05)
    assert child.poll() is None


def test_a_process_keeps_its_record_open_until_it_ends(directory: RunDirectory) -> None:
    processes = directory.processes

    def is_open() -> bool:
        record = read_record(processes.rank(0))
        return record is not None and record._is_open_in(Path("/proc/self"))

    processes.write(processes.rank(0), RunProcess.of(os.getpid(), "rank 0", 1))
    assert is_open()
    processes.end(processes.rank(0), "stopped")
    assert not is_open()


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"pid": -1}', "pid=0", "pid=-1", f"pid={1 << 62}", f"size={10**15}", "fifo", "link"]
)
def test_a_hostile_record_is_no_process(directory: RunDirectory, tmp_path: Path, content: str) -> None:
    processes = directory.processes
    path, ours = processes.rank(0), RunProcess.of(os.getpid(), "rank 0", 1)
    processes.write(path, ours)
    key, _, number = content.partition("=")
    if number:
        path.write_text(json.dumps({**asdict(ours), key: int(number)}))
    elif content == "fifo":
        path.unlink()
        os.mkfifo(path)
    elif content == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_text(content)
    assert [record.process.pid for record in read_status(directory.path).ranks] == ([ours.pid] if key == "size" else [])


def test_a_suspended_process_is_shown(child: subprocess.Popen[bytes]) -> None:
    process = RunProcess.of(child.pid, "rank 0", 1)
    child.send_signal(signal.SIGSTOP)
    end = time.monotonic() + 5
    while process.local_state() != "suspended":
        assert time.monotonic() < end
    child.send_signal(signal.SIGCONT)
    while process.local_state() != "running":
        assert time.monotonic() < end


def test_a_process_of_another_machine_is_lost_once_its_record_is_old(directory: RunDirectory) -> None:
    processes = directory.processes
    elsewhere = replace(RunProcess.of(1, "rank 0", 1), host="node2", namespace="another machine")
    processes.write(processes.rank(0), elsewhere)
    assert read_status(directory.path).state == "running"
    then = time.time() - LOST_SECONDS - 5
    os.utime(processes.rank(0), (then, then))
    status = read_status(directory.path)
    assert status.state == "died"
    assert status.message == "rank 0 on node2 ended without a message"


def test_records_of_an_earlier_start_with_more_ranks_are_not_shown(directory: RunDirectory) -> None:
    processes = directory.processes
    for rank, size in ((0, 2), (1, 2), (2, 4), (3, 4)):
        processes.write(processes.rank(rank), RunProcess.of(os.getpid(), f"rank {rank}", size))
    assert [record.process.role for record in read_status(directory.path).ranks] == ["rank 0", "rank 1"]


def test_the_state_of_a_run_follows_from_how_its_processes_ended(
    directory: RunDirectory, child: subprocess.Popen[bytes]
) -> None:
    processes, path = directory.processes, directory.path
    assert read_status(path).state == "unknown"
    processes.write(processes.launcher, RunProcess.of(child.pid, "Ray launcher", 1))
    assert read_status(path).state == "running"
    processes.request_stop(now=False)
    assert read_status(path).state == "stopping"
    processes.stop_request.unlink()
    child.kill()
    child.wait()
    assert read_status(path).state == "died"
    processes.write(processes.rank(0), RunProcess.of(os.getpid(), "rank 0", 1))
    assert read_status(path).state == "died"  # the rank of a dead launcher ends, too
    processes.end(processes.rank(0), "failed", "no memory\nmore")
    status = read_status(path)
    assert (status.state, status.message) == ("failed", "no memory")
    directory.write_state("finished")
    assert read_status(path).state == "finished"


def test_a_damaged_record_does_not_hide_a_run(directory: RunDirectory) -> None:
    processes = directory.processes
    processes.write(processes.rank(0), RunProcess.of(os.getpid(), "rank 0", 1))
    processes.rank(0).write_text("{")
    directory.progress.write_text("[]")
    assert read_status(directory.path).state == "unknown"
    assert find_runs(directory.path.parent) == [directory.path]


def test_progress_is_that_of_the_outermost_phase(directory: RunDirectory) -> None:
    display = PlainProgress(Console(file=StringIO()))
    progress = RecordedProgress(display, directory.progress)
    with progress.phase("learning", 10, done=2) as phase:
        phase.advance()
        with progress.phase("validation", 5, unit="episode") as inner:
            inner.advance(count=4)
        assert PhaseProgress.read(directory.progress) == PhaseProgress("learning", 3, 10, "step")
        written = directory.progress.stat().st_mtime_ns
        phase.advance()
        assert directory.progress.stat().st_mtime_ns == written  # at most once a second
    assert PhaseProgress.read(directory.progress) == PhaseProgress("learning", 4, 10, "step")
    assert read_status(directory.path).progress == PhaseProgress("learning", 4, 10, "step")
