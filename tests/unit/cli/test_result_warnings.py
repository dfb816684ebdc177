"""If these fail, a run starts without a word about settings of which `quintet plan` warns."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.cli import result_warnings, sft, train
from quintet.config.torchrun import RankInfo

SHORT = ["training.steps=4", "actor.optimizer.warmup_steps=9", "rollout.max_concurrent=4096"]


def test_train_prints_the_warnings_about_its_result_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "run_on_all_ranks", lambda composed, run: 0)
    assert train.run(None, [f"output_dir={tmp_path}", *SHORT], None, "refuse") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: actor.optimizer.warmup_steps = 9 (command line): the warm-up outlasts the 4 steps")
    monkeypatch.setattr(result_warnings, "current_rank", lambda: RankInfo(rank=1, size=2))
    train.run(None, [f"output_dir={tmp_path}", *SHORT], None, "refuse")
    assert capsys.readouterr().err == ""


def test_fine_tuning_prints_the_warnings_about_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sft, "run_on_all_ranks", lambda composed, run: 0)
    words = [f"output_dir={tmp_path}", "sft.episodes={}", "sft.optimizer.learning_rate=1e-6"]
    assert sft.run(None, words, None, "refuse") == 0
    assert "a new policy learns almost nothing with it" in capsys.readouterr().err
