"""If these fail, `quintet diagnose` raises alarms about runs that are well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from healthy_metrics import healthy_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.diagnosis.diagnose import diagnose_metrics

REAL = sorted((Path(__file__).parent / "healthy").glob("*.jsonl"))


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_metrics_of_real_runs_that_learned_look_well(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) > 10
    assert diagnose_metrics(rows) == []


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_a_real_run_looks_well_at_every_step(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for end in range(len(rows)):
        assert diagnose_metrics(rows[:end]) == []


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 240),
    seed=st.integers(0, 10**6),
    noise=st.floats(0, 0.06),
    first=st.floats(0.05, 0.5),
    gain=st.floats(0.3, 0.5),
    critic=st.booleans(),
)
def test_noise_of_healthy_runs_is_no_finding(
    steps: int, seed: int, noise: float, first: float, gain: float, critic: bool
) -> None:
    rows = healthy_rows(steps, seed=seed, noise=noise, first=first, last=first + gain, critic=critic)
    assert diagnose_metrics(rows) == []


def test_a_run_that_solves_everything_may_lose_its_entropy() -> None:
    rows = healthy_rows(100, last=1.0)
    for row in rows[60:]:
        row |= {"actor/entropy": 0.001, "trajectory/success_rate": 0.98, "training/groups_with_signal": 0.1}
    assert diagnose_metrics(rows) == []


def test_empty_metrics_are_no_finding() -> None:
    assert diagnose_metrics([]) == []
    assert diagnose_metrics([{"step": 0, "val/lake/success_rate": 0.5}]) == []
