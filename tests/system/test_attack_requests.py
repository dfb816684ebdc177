"""If this fails, hostile requests end a server, or get the status of a defect."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_hostile_requests_neither_end_a_server_nor_find_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python benchmarks/attack_requests.py` sends 10,000."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attack_requests

    for server, result in attack_requests.results(count=150, seed=0):
        assert result["deaths"] == 0, server
        assert result["failed_requests"] == [], server
        assert result["honest_requests_under_attack"], server
