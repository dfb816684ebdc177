"""If these fail, who asks what a step costs is told nothing, or something else."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from quintet.config.compose import load_experiment
from quintet.config.dialects.registry import DIALECTS
from quintet.pipelines.rl import train

OVERRIDES = (
    "training.steps=1",
    "training.groups_per_step=2",
    "training.samples_per_group=2",
    "training.mini_batches=1",
    "training.threads=1",
    "policy.preset=grid-1m",
    "warm_start={episodes: 20, updates: 1, turns_per_update: 8, until_success: null}",
    "rollout.max_turns=2",
    "validation.every_steps=-1",
    "validation.before_training=false",
    "tracking.loggers=[jsonl]",
)


def lines(directory: Path, *overrides: str) -> dict[str, float]:
    train(
        load_experiment(None, (*OVERRIDES, f"output_dir={directory}", "name=run", *overrides)),
        Console(file=io.StringIO()),
    )
    parsed: dict[str, float] = json.loads((directory / "run/metrics.jsonl").read_text().splitlines()[-1])
    return parsed


@pytest.mark.proves("rlinf", "actor.calculate_flops")
def test_flops_are_logged_if_configured(tmp_path: Path) -> None:
    (row,) = (
        row
        for reference in DIALECTS["rlinf"].references
        for row in reference.load()
        if row.key == "actor.calculate_flops"
    )
    assert row.native == ("tracking.flops",)
    plain = lines(tmp_path / "plain")
    records = lines(tmp_path / "told", "tracking.flops=true")
    assert "perf/tflops/actor" not in plain
    operations = records["perf/tflops/actor"] * 1e12 * records["timing_s/update_actor"]
    # about six for each of a million weights and each token
    assert 3e6 < operations / records["perf/total_num_tokens"] < 9e6


def test_checkpoint_time_is_logged_in_the_next_step(tmp_path: Path) -> None:
    overrides = (f"output_dir={tmp_path}", "name=run", "training.steps=3", "checkpoint.every_steps=2")
    train(load_experiment(None, (*OVERRIDES, *overrides)), Console(file=io.StringIO()))
    steps = {line["step"]: line for line in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())}
    assert [step for step in (1, 2, 3) if "timing_s/save_checkpoint" in steps[step]] == [3]
    assert steps[3]["timing_s/save_checkpoint"] > 0


def test_a_run_without_a_group_to_train_on_ends_early(tmp_path: Path) -> None:
    """It stores a checkpoint of its last step, and says why it ended."""
    console = io.StringIO()
    overrides = (f"output_dir={tmp_path}", "name=run", "training.steps=5", "checkpoint.every_steps=0")
    never = "algorithm.filter={min_mean: 1000.0, stop_after_empty_steps: 2}"
    train(load_experiment(None, (*OVERRIDES, *overrides, never)), Console(file=console, width=500))
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 2
    assert (tmp_path / "run/checkpoints/global_step_2").is_dir()
    assert "training ended after step 2: in 2 steps in a row algorithm.filter has kept no group" in console.getvalue()
