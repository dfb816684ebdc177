"""If these fail, a run that is stopped in its warm start repeats it, or ends with other weights."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from quintet.config.compose import load_experiment
from quintet.errors import ConfigError, InterruptedRun, MachineError
from quintet.pipelines import setup, warm_start_updates
from quintet.pipelines.export import export
from quintet.pipelines.rl import train
from quintet.tracking.loggers import JsonlLogger
from quintet.tracking.metrics import without_timing

Start = Callable[..., Path]
OVERRIDES = (
    "training={steps: 1, groups_per_step: 2, samples_per_group: 2, mini_batches: 1, threads: 1}",
    "warm_start={episodes: 20, updates: 6, turns_per_update: 8, until_success: null}",
    "rollout.max_turns=2",
    "validation={episodes: 2, every_steps: -1}",
    "checkpoint={every_steps: 2, keep: 9}",
    "tracking.loggers=[jsonl]",
)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start or continue a run; return its directory. A run with `stop_at` is stopped after that update."""

    def run(*overrides: str, name: str, stop_at: int | None = None) -> Path:
        class StoppingLogger(JsonlLogger):
            def log(self, step: int, *args: Any) -> None:
                super().log(step, *args)
                if step == stop_at:
                    os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(warm_start_updates, "JsonlLogger", StoppingLogger)
        composed = load_experiment(None, (*OVERRIDES, f"output_dir={tmp_path}", f"name={name}", *overrides))
        if stop_at is None:
            train(composed, Console(file=io.StringIO()))
        else:
            with pytest.raises(InterruptedRun, match=f"SIGTERM after update {stop_at} of the warm start"):
                train(composed, Console(file=io.StringIO()))
        return tmp_path / name

    return run


def metrics(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [without_timing(json.loads(line)) for line in (run / file).read_text().splitlines()]


def weights(run: Path) -> dict[str, bytes]:
    checkpoints = run / "checkpoints"
    return {str(path.relative_to(checkpoints)): path.read_bytes() for path in checkpoints.rglob("*.safetensors")}


def check_equal(run: Path, undisturbed: Path) -> None:
    assert weights(run) == weights(undisturbed)
    for file in ("metrics.jsonl", "warm_start.jsonl"):
        assert metrics(run, file) == metrics(undisturbed, file)
    assert not (run / "warm_start").exists()


@pytest.mark.parametrize(
    "choice",
    [
        "algorithm.advantage.name=gae;algorithm.kl={coefficient: 0.1}",
        "policy.lora={rank: 2};policy.dtype=bfloat16;warm_start.optimizer.kind=muon",
    ],
)
def test_a_stopped_warm_start_continues_exactly_with_the_same_episodes(
    start: Start, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = choice.split(";")
    undisturbed = start(*words, name="undisturbed")
    stopped = start(*words, name="stopped", stop_at=3)
    monkeypatch.setattr(setup, "solve_episodes", None)
    start(*words, name="stopped")
    check_equal(stopped, undisturbed)


def test_a_warm_start_that_succeeded_is_not_repeated(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "MIN_LIKELY_TOKENS", -1.0)
    monkeypatch.setattr(setup, "_wins_enough", lambda components, config, update: update == 4)
    undisturbed = start(name="undisturbed")
    assert len(metrics(undisturbed, "warm_start.jsonl")) == 4
    stopped = start(name="stopped", stop_at=4)
    monkeypatch.setattr(setup, "_wins_enough", lambda components, config, update: False)
    start(name="stopped")
    check_equal(stopped, undisturbed)


def test_a_checkpoint_of_the_warm_start_is_not_taken_for_one_of_the_run(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, stopped = start(name="undisturbed"), start(name="stopped", stop_at=3)
    assert not (stopped / "checkpoints").exists()
    with pytest.raises(MachineError, match="no model at"):
        export(str(stopped), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"warm_start\.turns_per_update = 4") as error:
        start("warm_start.turns_per_update=4", name="stopped")
    assert "resume=never" in str(error.value.hint)
    checkpoint = stopped / "warm_start/global_step_3"
    branch = start(f"resume={checkpoint}", name="branch")
    assert weights(branch) == weights(undisturbed)
    assert metrics(branch, "warm_start.jsonl") == metrics(undisturbed, "warm_start.jsonl")[3:]
    os.chdir(tmp_path)
    monkeypatch.chdir(tmp_path)
    start("output_dir=.", f"resume={checkpoint.relative_to(tmp_path)}", name="stopped")
    check_equal(stopped, undisturbed)


def test_a_damaged_checkpoint_of_the_warm_start_is_skipped(start: Start) -> None:
    undisturbed, stopped = start(name="undisturbed"), start(name="stopped", stop_at=5)
    (stopped / "warm_start/global_step_5/expert_episodes.json").write_text("[]")
    start(name="stopped")
    check_equal(stopped, undisturbed)
    shutil.rmtree(stopped)
    start(name="stopped", stop_at=3)
    for file in (stopped / "warm_start").glob("*/state.json"):
        file.unlink()
    with pytest.raises(MachineError, match=r"global_step_3: state\.json is missing"):
        start(name="stopped")
    start("resume=never", name="stopped")
    check_equal(stopped, undisturbed)
