"""If these fail, a run on robots that is stopped ends with another policy, or trains on other chunk steps than it
should."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console
from robot_datasets import lerobot
from robot_policies import robot_experiment
from scripted_simulator import REFERENCE

from quintet.config.compose import load_experiment
from quintet.config.native.algorithm import KlConfig
from quintet.data.robot_demonstrations.dataset import RobotDemonstration
from quintet.embodied_records import RobotObservation
from quintet.errors import ConfigError, InterruptedRun
from quintet.pipelines import warm_start_updates
from quintet.pipelines.embodied.components import RobotComponents
from quintet.pipelines.embodied.training import add_reference_log_probs, update_policy
from quintet.pipelines.rl import train
from quintet.runtime.learners.optimizer_schedules import OptimizerSchedules
from quintet.tracking.loggers import JsonlLogger
from quintet.tracking.metrics import without_timing
from quintet.training.chunk_learner import ChunkRates

Start = Callable[..., Path]
CONSTANT = "{learning_rate: 0.01, schedule: constant, warmup_steps: 0}"
OVERRIDES = (
    f"env={{name: simulator, simulator: '{REFERENCE}', max_steps: 4, options: {{success: {{0: [3], 2: [2]}}}}}}",
    "policy={preset: state-mlp, overrides: {hidden: 8, action_chunk: 2}}",
    "algorithm={advantage: {name: gae}, kl: {coefficient: 0.1}}",
    f"actor.optimizer={CONSTANT}",
    f"critic={{shares_policy: true, warmup_steps: 1, optimizer: {CONSTANT}}}",
    "rollout.recompute_logprobs=true",
    "training={steps: 3, groups_per_step: 2, samples_per_group: 2, mini_batches: 2, epochs: 2, threads: 1}",
    "validation={episodes: 2, every_steps: -1}",
    "checkpoint={every_steps: 1, keep: 9}",
    "tracking={loggers: [jsonl], trajectories_every_steps: 2}",
)
WARM_START = "{updates: 4, turns_per_update: 4, until_success: 1.0, check_every_updates: 2}"


def demonstration(number: int) -> RobotDemonstration:
    rng = np.random.default_rng(number)
    images, state = np.zeros((6, 1, 4, 4, 3), np.uint8), rng.normal(size=(6, 3)).astype(np.float32)
    actions = rng.uniform(-1, 1, (6, 2)).astype(np.float32)
    return RobotDemonstration(RobotObservation(images, state, ("reach 0",) * 6), actions)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start or continue a run; return its directory. A run with `stop_at` is stopped after that update of its warm
    start."""
    lerobot(tmp_path / "demonstrations", [demonstration(number) for number in range(2)])

    def run(*overrides: str, name: str, stop_at: int | None = None) -> Path:
        class StoppingLogger(JsonlLogger):
            def log(self, step: int, *args: Any) -> None:
                super().log(step, *args)
                if step == stop_at:
                    os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(warm_start_updates, "JsonlLogger", StoppingLogger)
        files = (f"warm_start={WARM_START}", f"warm_start.files=[{tmp_path}/demonstrations]")
        composed = load_experiment(None, (*OVERRIDES, *files, f"output_dir={tmp_path}", f"name={name}", *overrides))
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
    last = run / "checkpoints" / "global_step_3"
    return {str(path.relative_to(last)): path.read_bytes() for path in last.rglob("*.safetensors")}


def test_a_run_that_is_stopped_in_its_warm_start_and_between_steps_ends_with_the_same_weights(start: Start) -> None:
    whole = start(name="whole")
    stopped = start(name="stopped", stop_at=3)
    start("training.steps=2", name="stopped")
    start(name="stopped")
    assert len(metrics(whole, "warm_start.jsonl")) == 4
    for file in ("warm_start.jsonl", "metrics.jsonl"):
        assert metrics(stopped, file) == metrics(whole, file)
    assert any(name.startswith("reference/") for name in weights(whole))
    assert weights(stopped) == weights(whole)
    by_step = {line["step"]: line for line in metrics(whole)}
    # only the value head is trained in the first step
    assert by_step[1]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-12)
    assert by_step[1]["critic/vf_loss"] > 0
    assert by_step[3]["actor/kl_loss"] > by_step[2]["actor/kl_loss"] > 0
    # the checks of the warm start, two steps of four robots each, are in no file
    stored = sorted(path.name for path in (whole / "trajectories").rglob("*.jsonl") if "train" in str(path))
    assert len(stored) == 1
    assert "2" in stored[0]


class RecordingCalls:
    """Learners that only note what they are asked."""

    def __init__(self) -> None:
        self.updates: list[tuple[torch.Tensor, ChunkRates]] = []
        self.asked: list[str] = []

    def update(self, chunk_steps: torch.Tensor, rates: ChunkRates) -> dict[str, float]:
        self.updates.append((chunk_steps, rates))
        return {"actor/pg_loss": float(len(self.updates))}

    def snapshot_reference(self) -> None:
        self.asked.append("snapshot")

    def add_reference_log_probs(self) -> None:
        self.asked.append("log-probs")


def components(*, has_critic: bool = True, **sections: Any) -> tuple[RobotComponents, RecordingCalls]:
    config = robot_experiment({"preset": "state-mlp"}, has_critic=has_critic, **sections)
    calls = RecordingCalls()
    parts = SimpleNamespace(config=config, schedules=OptimizerSchedules(config), workers=SimpleNamespace(calls=calls))
    return cast(RobotComponents, parts), calls


def test_a_divergence_from_a_reference_that_no_checkpoint_has_is_refused_on_resume(start: Start) -> None:
    run = start("warm_start=null", "algorithm.kl=null", "training.steps=1", name="plain")
    resumed = f"resume={run}/checkpoints/global_step_1"
    with pytest.raises(ConfigError, match=r"algorithm\.kl"):
        start("warm_start=null", "training.steps=2", resumed, name="other")


def test_a_policy_that_is_only_evaluated_is_not_saved_again(start: Start) -> None:
    for _ in range(2):
        run = start("warm_start=null", "validation.only=true", name="evaluated")
        assert [line["step"] for line in metrics(run)] == [0]
        assert not list(run.glob("checkpoints/global_step_*"))


def test_every_epoch_trains_on_each_chunk_step_once() -> None:
    parts, calls = components(training={"epochs": 3, "mini_batches": 2})
    result = update_policy(parts, 1, 10)
    assert [len(chunk_steps) for chunk_steps, _ in calls.updates] == [5] * 6
    for epoch in range(3):
        both = torch.cat([calls.updates[2 * epoch + number][0] for number in range(2)])
        assert both.sort().values.tolist() == list(range(10))
    assert result["actor/pg_loss"] == 3.5


def test_the_policy_is_not_trained_while_the_critic_warms_up() -> None:
    for has_critic, expected in ((True, [False, False, True]), (False, [True, True, True])):
        critic = {"shares_policy": has_critic, "warmup_steps": 2}
        parts, calls = components(has_critic=has_critic, critic=critic, training={"steps": 4, "mini_batches": 1})
        for step in (1, 2, 3):
            update_policy(parts, step, 4)
        assert [rates.trains_policy for _, rates in calls.updates] == expected


def test_the_reference_is_renewed_every_few_steps_before_its_log_probs() -> None:
    parts, calls = components()
    for step in (1, 2, 3):
        add_reference_log_probs(parts, KlConfig(refresh_every_steps=2), step)
    add_reference_log_probs(parts, KlConfig(), 4)
    assert calls.asked == ["log-probs", "snapshot", "log-probs", "log-probs", "log-probs"]
