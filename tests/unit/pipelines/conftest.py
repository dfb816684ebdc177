"""What tests of supervised fine-tuning share: rows to learn from, and whole runs on them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from quintet.config.compose import load_experiment
from quintet.pipelines.sft import fine_tuning as sft


@pytest.fixture
def rows(tmp_path: Path) -> tuple[str, str]:
    """Twenty rows to learn from and six held-out ones."""
    answers = ["Up", "Down", "Left", "Right"]
    for name, numbers in {"train": range(20), "held": range(20, 26)}.items():
        talks = [{"prompt": f"user {n}", "response": f"<answer> {answers[n % 4]} </answer>"} for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, talks)))
    return f"data.train_files=[{tmp_path}/train.jsonl]", f"data.validation_files=[{tmp_path}/held.jsonl]"


@pytest.fixture
def tune(
    request: pytest.FixtureRequest, tmp_path: Path, rows: tuple[str, str], policy_directory: Path
) -> Callable[..., Path]:
    """A whole run with the words that the module has in COMMON; gives its directory. What it said lies in `said`."""

    def run(*overrides: str, name: str = "a") -> Path:
        own = (f"sft.path={policy_directory}", f"output_dir={tmp_path}", f"name={name}", *rows)
        console = io.StringIO()
        try:
            composed = load_experiment(None, (*own, *request.module.COMMON, *overrides))
            sft.fine_tune(composed, Console(file=console, width=200))
        finally:
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "said").write_text(console.getvalue())
        return tmp_path / name

    return run
