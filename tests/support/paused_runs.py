"""Runs that pause at a step until the test sends them a signal, so that they cannot end before it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fork_server import PAUSE_BEFORE
from warm_processes import Popen

SECONDS = 240


def stop_run(arguments: list[str], directory: Path, before: str, how: signal.Signals) -> tuple[int, str]:
    """Run `quintet …` in `directory` until it begins a file or completes a checkpoint, and send it a signal.

    The process stops itself before it opens the path `before`, relative to `directory`, or renames something to it. It
    continues with the signal.

    Returns:
        The exit status and the output.
    """
    log = directory / "stopped.log"
    with log.open("w") as output:
        process = Popen(
            [sys.executable, "-m", "quintet", *arguments],
            cwd=directory,
            env=os.environ | {PAUSE_BEFORE: str(directory / before)},
            stdout=output,
            stderr=output,
        )
    try:
        wait_until_paused(process, log)
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)
        return process.wait(timeout=SECONDS), log.read_text()
    finally:
        process.kill()
        process.wait()


def wait_until_paused(process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < end:
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "T":
            return
        time.sleep(0.02)
    raise AssertionError(f"the run has not paused:\n{log.read_text()[-3000:]}")


def wait_for(path: Path, process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Wait until a path exists, and fail if the process ends before."""
    end = time.monotonic() + SECONDS
    while not path.exists() and time.monotonic() < end and process.poll() is None:
        time.sleep(0.02)
    assert path.exists(), f"{path} does not exist; exit status of the run: {process.poll()}"
