"""A run directory with metrics, settings and episodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quintet.records import FinishReason, Outcome, Trajectory, Turn
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.trajectories import EpisodeTokens, write_trajectories


def turn(text: str = "<answer> Right </answer>", tokens: int = 2) -> Turn:
    """Return a turn on a FrozenLake map of 2 × 2."""
    return Turn(
        observation=" P G\n _ O",
        prompt=(1, 2, 3),
        continues=False,
        tokens=tuple(range(4, 4 + tokens)),
        logprobs=(-0.5,) * tokens,
        weight_version=1,
        text=text,
        actions=("Right",),
        valid_format=True,
        reward=1.0,
        finish_reason=FinishReason.STOP,
        frames=(" _ √\n _ O",),
    )


def episode(seed: int, *turns: Turn, group: int = 0, sample: int = 0, solved: bool = True) -> Trajectory:
    """Return a FrozenLake episode with its reward."""
    outcome = Outcome.SUCCESS if solved else Outcome.TERMINATED
    return Trajectory("frozenlake", seed, group, sample, turns or (turn(),), outcome)


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    """A finished run of three steps with validations at steps 0 and 3."""
    run = RunDirectory(tmp_path / "runs" / "lake")
    run.path.mkdir(parents=True)
    run.write_state("finished")
    run.config.write_text("name: lake  # command line\nseed: 0  # default\ntraining:\n  steps: 3  # lake.yaml:4\n")
    rows = [
        {
            "step": step,
            "time_seconds": 2.0 * step,
            "actor/entropy": 0.5 - 0.1 * step,
            "timing_s/step": 1.0,
            "timing_s/gen": 0.75,
            "response/stop_reason/stop": 1.0,
            "val/frozenlake/success_rate": 0.25 * step,
        }
        for step in range(1, 4)
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, solved in ((0, (True, False, False)), (3, (False, True, False))):
        played = [episode(seed, group=seed, solved=solved[seed]) for seed in range(3)]
        write_trajectories(run.trajectories("validation", step), step, "validation", played)
    samples = [
        episode(7, turn("first"), turn("second <b>bold</b>", tokens=5), group=1, sample=sample, solved=sample == 0)
        for sample in range(2)
    ]
    statistics = [EpisodeTokens(1, 0, {0: {"advantages": [0.5, 0.5]}, 1: {"advantages": [0.5] * 5}})]
    write_trajectories(run.trajectories("train", 2), 2, "train", samples, tokens=statistics)
    return run.path
