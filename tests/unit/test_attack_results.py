"""If these fail, an attack that succeeds goes unnoticed, or a part that is measured again loses the others."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def measured(monkeypatch: pytest.MonkeyPatch, out: Path, counts: dict[str, Any], *arguments: str) -> int:
    """Run the part `workers`, which counts so."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    part = SimpleNamespace(run=lambda count, seed: {"count": count, "seed": seed, **counts})
    monkeypatch.setitem(sys.modules, "attack_workers", part)
    monkeypatch.setattr(sys, "argv", ["attacks.py", "--parts", "workers", "--out", str(out), *arguments])
    status: int = importlib.import_module("attacks").main()
    return status


@pytest.mark.parametrize(
    ("counts", "status"),
    [
        ({"deaths": 0, "effects": 0, "accepted": 0, "refused": 7}, 0),
        ({"deaths": 1}, 1),
        ({"effects": ["a file"]}, 1),
        ({"effects": []}, 0),
        ({"serve": {"effects": 0}, "environments": {"deaths": 2}}, 1),
    ],
)
def test_an_attack_that_succeeds_is_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counts: dict[str, Any], status: int
) -> None:
    assert measured(monkeypatch, tmp_path / "attacks.json", counts) == status


def test_a_part_keeps_the_results_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "attacks.json"
    out.write_text(json.dumps({"programs": {"counts": {}}, "workers": {"counts": {"old": 1}}}))
    assert measured(monkeypatch, out, {"deaths": 0}, "--scale", "0.01", "--seed", "5") == 0
    results = json.loads(out.read_text())
    assert results["programs"] == {"counts": {}}
    assert results["workers"]["counts"] == {"count": 20, "seed": 5, "deaths": 0}
    assert results["workers"]["machine"]["processor"]


def test_pieces_are_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "attacks.json"
    counts = {"deaths": 0, "effects": ["a file"], "statuses": {"200": 3}}
    assert measured(monkeypatch, out, counts, "--scale", "0.01", "--seed", "5", "--pieces", "4") == 1
    result = json.loads(out.read_text())["workers"]
    assert (result["attacks"], result["seed"]) == (20, [5, 6, 7, 8])
    assert result["counts"]["count"] == 20
    assert (result["counts"]["effects"], result["counts"]["statuses"]) == (["a file"] * 4, {"200": 12})
