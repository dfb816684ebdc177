"""A pytest plugin that fails a session whose tests leave processes running: they hold memory, ports and CPUs.

Every process that a session starts inherits a variable of its environment. At the end of the session, when the workers
of pytest-xdist have ended, none may have it. Without workers only processes whose parents have ended count: others, as
multiprocessing's resource tracker, may end with this process.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from pathlib import Path

import pytest

VARIABLE = "QUINTET_TEST_SESSION"
SECONDS_TO_END = 20


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ[VARIABLE] = str(uuid.uuid4())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    end = time.monotonic() + SECONDS_TO_END
    while (left := left_processes(os.environ[VARIABLE])) and time.monotonic() < end:
        time.sleep(0.1)
    if not left:
        return
    session.exitstatus = pytest.ExitCode.TESTS_FAILED
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    for process, command in left.items():
        reporter.write_line(f"FAILED: a test left process {process} running: {command}", red=True)
        os.kill(process, signal.SIGKILL)


def left_processes(value: str) -> dict[int, str]:
    """Return the command lines of processes that inherited this value of `VARIABLE` and do not descend from this
    process, by process id."""
    left = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            inherited = f"{VARIABLE}={value}".encode() in (directory / "environ").read_bytes().split(b"\0")
            if inherited and not _descends_from_here(int(directory.name)):
                left[int(directory.name)] = (directory / "cmdline").read_text().replace("\0", " ")[:200]
        except OSError:  # it has ended, or another user's
            continue
    return left


def _descends_from_here(process: int) -> bool:
    while process > 1:
        if process == os.getpid():
            return True
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return False
