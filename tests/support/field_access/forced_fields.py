"""A pytest plugin that runs each test in forks, once as it is and once per field that is forced back to its default.

`QUINTET_FORCED_CASES` names a JSON file of fields by test. Its results go beside it, with suffix `.results`,
as lines `[test, field, failed]`. The field is empty for the run without force. See `scripts/check_proofs.py`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from functools import cache
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from field_access import FORCED

CASES = "QUINTET_FORCED_CASES"
SECONDS = 120
"""Time limit of a fork. A test that does not end in time without force is no proof."""


@cache
def _cases() -> dict[str, list[str]]:
    return json.loads(Path(os.environ[CASES]).read_text())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool:
    """Run the forks of a test in place of the test."""
    for field in ["", *_cases()[item.nodeid]]:
        failed = _fails_in_fork(item, field)
        with Path(f"{os.environ[CASES]}.results").open("a") as file:
            file.write(json.dumps([item.nodeid, field, failed]) + "\n")
        if failed and not field:
            break
    return True


def _fails_in_fork(item: pytest.Item, field: str) -> bool:
    process = os.fork()
    if process == 0:
        os.setpgid(0, 0)
        os.environ[FORCED] = field
        reports = runtestprotocol(item, nextitem=None, log=False)
        os._exit(any(report.failed for report in reports) or not any(report.passed for report in reports[1:2]))
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status != 0
        time.sleep(0.01)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return True
