"""If these fail, curves in the viewer stop, skip spikes, or show steps that a resumed run has undone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quintet.viewer.metrics_file import ColumnBudget, Curve, Headline, MetricsFile


def append(path: Path, *rows: object) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_that_are_appended_are_read_and_an_incomplete_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    assert len(metrics.columns()) == 0
    append(path, {"step": 1, "loss": 2.0})
    assert metrics.curve("loss") == Curve((1,), (0.0,), (2.0,))
    with path.open("a") as file:
        file.write('{"step": 2, "time_seconds": 4.0, "lo')
    assert len(metrics.columns()) == 1
    with path.open("a") as file:
        file.write('ss": 1.0}\n')
    assert metrics.curve("loss") == Curve((1, 2), (0.0, 4.0), (2.0, 1.0))


def test_a_run_that_resumed_from_an_earlier_step_does_not_keep_the_undone_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, *({"step": step, "loss": float(step)} for step in range(5)))
    metrics = MetricsFile(path)
    assert len(metrics.columns()) == 5
    assert metrics.curve("loss").steps == (0, 1, 2, 3, 4)
    replacement = tmp_path / "replacement"
    append(replacement, {"step": 0, "loss": 0.0}, {"step": 1, "loss": 9.0})
    replacement.replace(path)
    assert metrics.curve("loss").values == (0.0, 9.0)


def test_values_that_are_missing_or_not_numbers_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, {"step": 1, "loss": None}, {"step": 2, "kl": 0.1}, {"step": 3, "loss": 0.5}, "text")
    assert MetricsFile(path).curve("loss") == Curve((3,), (0.0,), (0.5,))
    assert MetricsFile(path).names() == ["kl", "loss"]


def test_a_spike_of_one_step_stays_visible_in_a_long_run() -> None:
    values = [0.0] * 10_000
    values[4321], values[4322] = 7.0, -3.0
    steps = list(range(10_000))
    curve = Curve(steps, steps, values).downsampled(200)
    assert len(curve.values) <= 202
    assert (curve.steps[0], curve.steps[-1]) == (0, 9999)
    assert (4321, 7.0) in zip(curve.steps, curve.values, strict=True)
    assert (4322, -3.0) in zip(curve.steps, curve.values, strict=True)
    assert list(curve.steps) == sorted(curve.steps)


def test_the_columns_of_many_runs_share_a_budget(tmp_path: Path) -> None:
    """Two runs of 100 lines with 2 columns and their steps: 2,400 bytes each."""
    budget = ColumnBudget(limit=3000)
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path in paths:
        append(path, *({"step": step, "loss": float(step), "kl": 0.5} for step in range(100)))
    files = [MetricsFile(path, budget) for path in paths]
    first = files[0].columns()
    assert first.nbytes == 2400
    assert files[0].columns() is first, "nothing is read twice"
    files[1].columns()
    again = files[0].columns()
    assert again is not first
    assert list(again.steps) == list(first.steps)


@pytest.mark.parametrize(
    ("lines", "name", "values"),
    [
        ([{"critic/score/mean": 1.0}, {"critic/score/mean": -2e-3}], "critic/score/mean", [1.0, -0.002]),
        ([{"critic/score/mean": 1.0}, {"val/lake/success_rate": 0.25}], "val/lake/success_rate", [0.25]),
        ([{"val/lake/success_rate": None}, {"train/loss": 3.0}], "train/loss", [3.0]),
        ([{"val/b/reward": 3.0, "val/a/reward": 1.0}, {"val/a/reward": 2.0}], "val/a/reward", [1.0, 2.0]),
        ([{"actor/lr": 1.0}], "", []),
    ],
)
def test_the_headline_is_the_first_metric_that_a_run_has(
    tmp_path: Path, lines: list[dict[str, float]], name: str, values: list[float]
) -> None:
    path = tmp_path / "metrics.jsonl"
    headline = Headline(path)
    for step, line in enumerate(lines):
        append(path, {"step": step, "time_seconds": 2.0 * step, **line})
        headline.refresh()
    assert (headline.name, headline.values(60)) == (name, values)
    assert (headline.step, headline.seconds) == (len(lines) - 1, 2.0 * (len(lines) - 1))
    path.write_text('{"step": 7, "val/loss": 0.5}\n')
    headline.refresh()
    assert (headline.name, headline.values(60), headline.step) == ("val/loss", [0.5], 7)


def test_the_headline_of_a_long_run_keeps_its_spikes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, *({"step": step, "val/loss": 9.0 if step == 4321 else 1.0} for step in range(6000)))
    headline = Headline(path)
    headline.refresh()
    assert len(headline._values) <= 514
    assert max(headline.values(60)) == 9.0
