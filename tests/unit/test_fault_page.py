"""If these fail, docs/faults.md shows another outcome of the fault drill than its results, or it injects no faults."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def drill(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("fault_drill")


def test_the_page_shows_the_results_of_every_run(drill: Any) -> None:
    """`python benchmarks/fault_drill.py --docs` writes the table."""
    results = drill.json.loads(drill.RESULT.read_text())
    assert drill.table(results) in (ROOT / "docs/faults.md").read_text()
    expected = {(kind, number) for kind, cases in drill.CASES.items() for number in range(len(cases))}
    assert {(row["kind"], row["number"]) for row in results["runs"] if row["passed"]} == expected
    assert results["lost_steps"] == 0


def test_faults_occur_in_methods_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in a method that was renamed would never occur, and the run would pass."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/fault_hooks"))
    monkeypatch.delitem(sys.modules, "sitecustomize", raising=False)
    for module, owner, name in importlib.import_module("sitecustomize").METHODS.values():
        target = importlib.import_module(module)
        assert callable(getattr(getattr(target, owner) if owner else target, name))
