"""If these fail, tests that leave processes running pass."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import session_processes

LEAVES_A_PROCESS = """
import subprocess, sys
def test_that_leaves_a_process():
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']).pid)"
    command = [sys.executable, "-c", code]
    with open("pid", "w") as file:
        subprocess.run(command, stdout=file, check=True)
"""
LEAVES_NONE = """
import subprocess, sys
def test_that_waits_for_its_process():
    subprocess.run([sys.executable, "-c", ""], check=True)
"""


def run_session(directory: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_processes.py").write_text(test)
    (directory / "conftest.py").write_text("import session_processes\nsession_processes.SECONDS_TO_END = 0.5\n")
    environment = os.environ | {"PYTHONPATH": str(Path(session_processes.__file__).parent)}
    command = [sys.executable, "-m", "pytest", "-p", "session_processes", "-c", os.devnull, *options, str(directory)]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)


def test_a_process_that_outlives_its_test_fails_the_session_and_is_killed(tmp_path: Path) -> None:
    done = run_session(tmp_path, LEAVES_A_PROCESS, "-n", "2")
    process = int((tmp_path / "pid").read_text())
    try:
        assert done.returncode == 1
        assert "1 passed" in done.stdout
        assert f"FAILED: a test left process {process} running: {sys.executable}" in done.stdout
        assert not is_running(process)
    finally:
        if is_running(process):
            os.kill(process, signal.SIGKILL)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_session_that_leaves_none_passes(tmp_path: Path) -> None:
    done = run_session(tmp_path, LEAVES_NONE, "-n", "2")
    assert done.returncode == 0, done.stdout
