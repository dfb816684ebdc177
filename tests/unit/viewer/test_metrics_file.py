"""If these fail, curves in the viewer stop, skip spikes, or show steps that a resumed run has undone."""

from __future__ import annotations

import json
from pathlib import Path

from quintet.viewer.metrics_file import Curve, MetricsFile


def append(path: Path, *rows: object) -> None:
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_that_are_appended_are_read_and_an_incomplete_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    assert metrics.rows() == []
    append(path, {"step": 1, "loss": 2.0})
    assert metrics.curve("loss") == Curve((1,), (0.0,), (2.0,))
    with path.open("a") as file:
        file.write('{"step": 2, "time_seconds": 4.0, "lo')
    assert len(metrics.rows()) == 1
    with path.open("a") as file:
        file.write('ss": 1.0}\n')
    assert metrics.curve("loss") == Curve((1, 2), (0.0, 4.0), (2.0, 1.0))


def test_a_run_that_resumed_from_an_earlier_step_does_not_keep_the_undone_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append(path, *({"step": step, "loss": float(step)} for step in range(5)))
    metrics = MetricsFile(path)
    assert len(metrics.rows()) == 5
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
