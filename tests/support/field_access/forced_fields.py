"""A pytest plugin that runs each test in forks: once as it is, then once per field that is forced back to its default.

`QUINTET_FORCED_CASES` names a JSON file with `cases`, fields by test, or, to search, `fields`: of these, a test that
sets one by name is tried with those that it reads, until some test has failed for a field. Results go beside the file,
with suffix `.results`, as lines `[test, field, failed]`; the field is empty for the run without force. See
`scripts/check_proofs.py`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from field_access import FORCED, READS
from fork_server import MODULES

CASES = "QUINTET_FORCED_CASES"
MAX_TESTS = 8
"""Tests that are tried for a field in one search."""
FORCED_SECONDS = 60
"""Time limit of a test with a forced field, which may wait for what does not come."""


class ForcedFields:
    def __init__(self, file: Path) -> None:
        request = json.loads(file.read_text())
        self.cases: dict[str, list[str]] | None = request.get("cases")
        self.missing: set[str] = set(request.get("fields", ()))
        self.seconds: float = request["seconds"]
        self.results = Path(f"{file}.results")
        self.tried: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.cases is not None:
            items[:] = [item for item in items if item.nodeid in self.cases]
        else:
            names = "|".join({field.rpartition(".")[2] for field in self.missing})
            setting = re.compile(rf"\b(?:{names})(?:[=:]|['\"]:)|['\"](?:{names})['\"]")
            items[:] = [item for item in items if setting.search(_source(item))]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """Run the forks of a test in place of the test."""
        with tempfile.TemporaryDirectory() as reads:
            failed = _fails_in_fork(item, self.seconds, {READS: reads})
            read = {field for file in Path(reads).iterdir() for field in file.read_text().split()}
        self._add(item, "", failed)
        if not failed:
            for field in self._fields(item, read):
                self.tried[field] += 1
                failed = _fails_in_fork(item, FORCED_SECONDS, {FORCED: field})
                self._add(item, field, failed)
                self.missing -= {field} if failed else set()
        return True

    def _fields(self, item: pytest.Item, read: set[str]) -> Iterable[str]:
        if self.cases is not None:
            return self.cases[item.nodeid]
        return sorted(field for field in read & self.missing if self.tried[field] < MAX_TESTS)

    def _add(self, item: pytest.Item, field: str, failed: bool) -> None:
        with self.results.open("a") as file:
            file.write(json.dumps([item.nodeid, field, failed]) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ForcedFields(Path(os.environ[CASES])))


def pytest_collection_finish(session: Any) -> None:
    """Import what tests import late, and make the directory of temporary files, once for all forks."""
    for module in MODULES:
        importlib.import_module(module)
    session.config._tmp_path_factory.getbasetemp()


def _source(item: Any) -> str:
    """Return the code and the parameters of a test."""
    return f"{inspect.getsource(item.function)}{vars(getattr(item, 'callspec', item)).get('params')}"


def _fails_in_fork(item: pytest.Item, seconds: float, variables: dict[str, str]) -> bool:
    """Return whether a test fails, is skipped or takes too long."""
    process = os.fork()
    if process == 0:
        os.setpgid(0, 0)
        os.environ.update(variables)
        reports = runtestprotocol(item, nextitem=None, log=False)
        os._exit(any(report.failed for report in reports) or not any(report.passed for report in reports[1:2]))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status != 0
        time.sleep(0.005)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return True
