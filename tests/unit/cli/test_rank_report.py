"""If these fail, torchrun does not say which rank died, or how to continue."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from quintet.cli import ranks
from quintet.config.native.experiment import Experiment
from quintet.config.torchrun import RankInfo

CONFIG = Experiment(name="lake")


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    ranks._error_file.cache_clear()
    return path


def test_torchrun_shows_the_report_of_a_killed_rank(error_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["quintet", "train", "name=lake", "env.goal=a b"])
    rank = RankInfo(rank=3, size=4, local_rank=1, local_size=2)
    ranks.write_rank_report(ranks.sudden_death_report(rank, CONFIG))
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=-9, error_file=str(error_file))
    summary = str(ChildFailedError("quintet", {3: failure}))
    assert "rank 3 ended before the run was complete" in summary
    assert "Its log: runs/lake/logs/rank_3.log" in summary
    assert "torchrun --nnodes 2 --nproc-per-node 2 -m quintet train name=lake 'env.goal=a b'\n" in summary


def test_the_rank_that_died_is_the_cause_also_if_rank_0_failed_earlier(
    error_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = {}
    for number, delay in ((0, 60), (1, 0)):
        ranks.write_rank_report(f"rank {number}", delay=delay)
        failures[number] = ProcessFailure(local_rank=number, pid=7, exitcode=1, error_file=str(error_file))
    assert ChildFailedError("quintet", failures).get_first_failure()[0] == 1


def test_runs_that_never_resume_are_told_how_to() -> None:
    config = CONFIG.model_copy(update={"resume": "never"})
    assert ranks.continue_command(RankInfo(0, 2, 0, 2), config).endswith("resume=auto")


def test_the_file_is_used_after_its_variable_is_gone(error_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.write_rank_report("first")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    ranks.write_rank_report("second")
    assert json.loads(error_file.read_text())["message"]["message"] == "second"
