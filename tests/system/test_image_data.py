"""If these fail, a documented command on data files with images does not run as written."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from image_files import question_rows, write_rows

Command = Any
DOCS = Path(__file__).parents[2] / "docs"
SMALL = (
    "training.threads=1",
    "tracking.loggers=[jsonl]",
    "validation.every_steps=-1",
    "validation.before_training=false",
)


def command(page: str, beginning: str) -> list[str]:
    """The arguments of a command of a page, with the rest of its lines."""
    (line,) = re.findall(rf"^\$ quintet ({re.escape(beginning)}.*geometry.*)$", (DOCS / page).read_text(), re.M)
    return shlex.split(line)


@pytest.fixture(autouse=True)
def _rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "geometry.parquet", question_rows(12))


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_prompts_with_images_are_planned_and_trained_on(quintet: Command, tmp_path: Path) -> None:
    words = command("data.md", "train")[1:]
    small = ("name=run", "training={steps: 2, groups_per_step: 2, samples_per_group: 2, mini_batches: 1}", *SMALL)
    plan = quintet("plan", *words, *small).stdout
    assert "2 steps" in plan
    assert "grid-vl" in plan
    quintet("train", *words, *small)
    differences = [row.get("training/rollout_probs_diff_max") for row in metrics(tmp_path / "runs/run")]
    assert len([value for value in differences if value is not None and value < 1e-4]) == 2


def test_conversations_with_images_are_planned_and_fine_tuned_on(quintet: Command, tmp_path: Path) -> None:
    words = command("sft.md", "sft")[1:]
    small = ("name=run", "sft.batch=6", "sft.epochs=1", *SMALL)
    assert "grid-vl" in quintet("plan", *words, *small).stdout
    quintet("sft", *words, *small)
    assert len([row for row in metrics(tmp_path / "runs/run") if "train/loss" in row]) == 2
