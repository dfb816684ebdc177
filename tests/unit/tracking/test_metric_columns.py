"""If these fail, curves, findings and reports miss values, or a long run takes gigabytes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quintet.tracking import metric_columns
from quintet.tracking.metric_columns import MetricColumns, read_columns


def block(*lines: dict[str, Any]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def test_metrics_that_begin_and_end_keep_their_steps() -> None:
    columns = MetricColumns()
    columns.add_block(block({"step": 0, "val/loss": 4}, {"step": 1, "time_seconds": 2.5, "kl": 0.5}))
    columns.add_block(block({"step": 2, "kl": 1e-7, "lr": 3.0}))
    assert columns.names == ["kl", "lr", "val/loss"]
    assert columns.points("val/loss") == (columns.steps[:1], columns.points("val/loss")[1])
    assert [list(part) for part in columns.points("kl")] == [[1, 2], [0.5, 1e-7]]
    assert list(columns.seconds) == [0.0, 2.5, 0.0]
    assert columns.line(1) == {"step": 1, "time_seconds": 2.5, "kl": 0.5}
    assert list(columns.lines_with("lr".__eq__)) == [{"step": 2, "kl": 1e-7, "lr": 3.0}]
    assert columns.nbytes == 3 * 8 * 5, "three lines of a step, the time and three metrics"


def test_a_value_that_was_not_finite_is_told_from_one_that_is_missing() -> None:
    columns = MetricColumns()
    columns.add_block(block({"step": 5, "a": None, "b": 1.0}, {"step": 6, "b": None}, {"step": 7, "a": 2.0}))
    columns.add({"step": 8, "a": math.inf})
    assert (columns.null_steps("a"), columns.null_steps("b")) == ([5, 8], [6])
    assert [list(part) for part in columns.points("a")] == [[7], [2.0]]


@pytest.mark.parametrize(
    "damaged",
    [
        b"text\n",
        b'{"step": 2, "a": "text"}\n',
        b'{"step": 2.5, "a": 1}\n',
        b'{"a": 1}\n',
        b'{"step": 2, "a": NaN}\n',
        b'{"step": 2, "a": {"b": 1}}\n',
        b"\n",
        b'{"step": 2, "a": 1e999}\n',
        b'[{"step": 2}]\n',
    ],
)
def test_a_damaged_line_is_left_out_and_named(tmp_path: Path, damaged: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(block({"step": 1, "a": 1.0}) + damaged + block({"step": 3, "a": True}) + b'{"step": 4, "a"')
    rejected: list[str] = []
    columns = read_columns(path, rejected.append)
    assert [list(part) for part in columns.points("a")] == [[1, 3], [1.0, 1.0]]
    assert rejected == ["metrics.jsonl:2 is not a line of metrics"]


def test_lines_are_read_across_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_columns, "BLOCK_BYTES", 50)
    lines = [{"step": step, "loss": step / 7, f"m{step % 3}": float(step)} for step in range(30)]
    (tmp_path / "m.jsonl").write_bytes(block(*lines))
    columns = read_columns(tmp_path / "m.jsonl")
    assert [columns.line(number) for number in range(30)] == lines


def test_arrow_parses_healthy_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other parser is for damaged lines; it takes much longer."""
    columns = MetricColumns()
    columns.add_block(block({"step": 0, "a": 1}))
    monkeypatch.setattr(metric_columns, "parse_metrics", None)
    columns.add_block(block({"step": 1, "a": 0.5, "new": 7}, {"step": 2, "a": None}))
    assert columns.line(1) == {"step": 1, "a": 0.5, "new": 7.0}


def test_reading_imports_no_pandas(tmp_path: Path) -> None:
    """It takes 50 MB and half a second, more than the metrics of most runs."""
    (tmp_path / "m.jsonl").write_bytes(block({"step": 1, "a": 1.0}, {"step": 2, "b": 3}, {"step": 3, "b": None}))
    code = (
        "import sys; from pathlib import Path; from quintet.tracking.metric_columns import read_columns\n"
        "columns = read_columns(Path(sys.argv[1]))\n"
        "print(list(columns.points('b')[1]), columns.null_steps('b'), 'pandas' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m.jsonl")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[3.0] [3] False\n"


def test_values_of_every_line_are_not_copied() -> None:
    columns = MetricColumns()
    columns.add_block(block({"step": 1, "a": 1.0, "b": 2.0}, {"step": 2, "a": 0.5}))
    assert columns.points("a")[0] is columns.steps
    assert columns.points("a")[1] is columns.points("a")[1]
    assert [list(part) for part in columns.points("b")] == [[1], [2.0]]
