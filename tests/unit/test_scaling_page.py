"""If these fail, docs/scaling.md shows figures that the planner does not compute."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "benchmarks/scaling.py"))
RESULTS = json.loads(SCRIPT["RESULTS"].read_text())
CASES = RESULTS["cases"]


@pytest.mark.parametrize("table", SCRIPT["TABLES"], ids=lambda table: table.__name__)
def test_the_page_shows_the_figures_of_the_file(table: object) -> None:
    """`python benchmarks/scaling.py --tables` prints what belongs on the page."""
    assert callable(table)
    assert f"\n{table(CASES)}\n" in (ROOT / "docs/scaling.md").read_text()


def test_the_page_says_why_the_large_model_has_adapters_on_eight_devices() -> None:
    (refusal,) = filter(None, (case["refusal_without_lora"] for case in CASES))
    assert refusal.split(",")[0] in (ROOT / "docs/scaling.md").read_text()


def test_the_file_has_the_figures_of_the_planner(tmp_path: Path) -> None:
    """`python benchmarks/scaling.py` writes it anew; here the search for settings is left out."""
    assert tuple(RESULTS["run"]) == SCRIPT["RUN"]
    paths = SCRIPT["write_models"](tmp_path)
    for case in CASES:
        path, overrides = paths[case["model"]], case["overrides"]
        assert case.items() >= SCRIPT["evaluate"](path, overrides).items()
        assert case["small_engines"] == SCRIPT["with_small_engines"](path, overrides)
        assert case["groups"] == list(SCRIPT["groups"](path, case["devices"], overrides))
        assert case["synchronous_seconds"] == SCRIPT["step_with_mean_length"](case, asynchronous=False)
        if case["asynchronous"]:
            figures = SCRIPT["evaluate"](path, case["asynchronous"]["overrides"])
            seconds = SCRIPT["step_with_mean_length"](figures, asynchronous=True)
            assert case["asynchronous"]["seconds"] == seconds
        basis = case["asynchronous"]["overrides"] if case["asynchronous"] else overrides
        assert case["separate"] == SCRIPT["with_separate_devices"](path, case["devices"], basis)
