"""A pytest plugin that runs tests in forks, with one field of the configuration forced back to its default in each.

`QUINTET_FORCED_CASES` names a JSON file with `cases`, fields by test, or, to search, `fields`, dotted keys by field:
for each, the few tests are run that most probably set it. The file also names that of the `results`, lines
`[test, field, result]`. The result is `PROVES` if the test fails, and passes without force. See
`scripts/check_proofs.py`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from field_access import FORCED
from fork_server import MODULES

CASES = "QUINTET_FORCED_CASES"
PROVES = "proves"
MAX_TESTS = 3
"""Tests that are run for a field in one search."""


class ForcedFields:
    def __init__(self, file: Path) -> None:
        request = json.loads(file.read_text())
        self.cases: dict[str, list[str]] = request.get("cases", {})
        self.keys: dict[str, str] = request.get("fields", {})
        self.seconds: float = request["seconds"]
        self.results = Path(request["results"])

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.keys:
            self.cases = probable_tests(self.keys, items)
        items[:] = [item for item in items if item.nodeid in self.cases]

    def pytest_collection_finish(self, session: Any) -> None:
        """Import what tests import late, and make the directory of temporary files, once for all forks."""
        for module in MODULES:
            importlib.import_module(module)
        session.config._tmp_path_factory.getbasetemp()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """Run the forks of a test in place of the test."""
        alone = ""
        for field in self.cases[item.nodeid]:
            if self.keys and field not in self.keys:
                continue  # another test has proved it
            result = self._run(item, field)
            if result == "fails":
                alone = alone or self._run(item, "")
                result = PROVES if alone == "passes" else f"{alone} by itself"
            if result == PROVES:
                self.keys.pop(field, None)
            with self.results.open("a") as file:
                file.write(json.dumps([item.nodeid, field, result]) + "\n")
        return True

    def _run(self, item: pytest.Item, field: str) -> str:
        process = os.fork()
        if process == 0:
            os.setpgid(0, 0)
            os.environ[FORCED] = field
            reports = runtestprotocol(item, nextitem=None, log=False)
            failed = any(report.failed for report in reports)
            os._exit(1 if failed else 0 if any(report.passed for report in reports[1:2]) else 2)
        deadline = time.monotonic() + self.seconds
        while time.monotonic() < deadline:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return {0: "passes", 2: "skips"}.get(os.waitstatus_to_exitcode(status), "fails")
            time.sleep(0.005)
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        return f"takes more than {self.seconds:g} s"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ForcedFields(Path(os.environ[CASES])))


def probable_tests(keys: dict[str, str], items: list[pytest.Item]) -> dict[str, list[str]]:
    """Return fields by the tests to run for them."""
    texts = [(item, *_texts(item)) for item in items]
    chosen: dict[str, list[str]] = defaultdict(list)
    for field, key in keys.items():
        scores = {item.nodeid: score for item, *text in texts if (score := _score(field, key, *text))}
        best = max(score[0] for score in scores.values()) if scores else 0
        named = [test for test, score in scores.items() if score[0] > 0 or not best]
        for test in sorted(named, key=scores.__getitem__, reverse=True)[:MAX_TESTS]:
            chosen[test].append(field)
    return chosen


def _texts(item: Any) -> Iterator[str]:
    """Yield the parameters, the code and the file of a test."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    yield repr(params)
    source = inspect.getsource(item.function)
    yield source[source.index("def ") :] if params else source
    yield _file_text(item.path)


@cache
def _file_text(path: Path) -> str:
    return path.read_text()


@cache
def _sets(name: str, text: str) -> bool:
    return name in text and bool(re.search(rf"\b{name}(?:[=:]|['\"])", text))


def _score(field: str, key: str, params: str, code: str, file: str) -> tuple[int, ...]:
    """Return how probable it is that a test sets a field; empty if its file does not."""
    owner, _, name = field.partition(".")
    if not _sets(name, file):
        return ()
    section = key.replace(".*", "").rpartition(".")[0].rpartition(".")[2] or owner
    related = bool(re.search(rf"\b(?:{owner}|{section})\b", params + code)) or owner in file
    return 2 * _sets(name, params) + _sets(name, code), related, -len(params + code)
