"""If these fail, a robot arm isn't trained by the shipped commands, or not the same on several devices or after a
restart, or the exported policy acts differently."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_processes

from quintet.tracking.metrics import without_timing

pytest.importorskip("mujoco")

ARM = """\
env: {name: simulator, simulator: arm, task: reach, max_steps: 8, camera_height: 16, camera_width: 16}
policy:
  preset: arm-vla
  overrides: {hidden: 32, layers: 1, heads: 4, mlp: 64, bins: 21, patch: 4, merge: 2, image: 16}
  vla: {action_chunk: 4, use_proprioception: true}
algorithm: {advantage: {name: gae}, loss: {name: ppo}, level: chunk, reward_level: chunk}
critic: {shares_policy: true}
training: {steps: 3, groups_per_step: 4, samples_per_group: 4, mini_batches: 2, threads: 1}
validation: {episodes: 8, every_steps: 3}
warm_start: {episodes: 8, updates: 2, turns_per_update: 16, until_success: null}
tracking: {loggers: [jsonl]}
checkpoint: {every_steps: 1}
"""
QUINTET = [sys.executable, "-m", "quintet"]


def ranks(count: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "-m", "quintet"]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("robots")
    (directory / "arm.yaml").write_text(ARM)
    return directory


def train(workdir: Path, name: str, *overrides: str, command: list[str] = QUINTET) -> list[dict[str, Any]]:
    """Train and return the metrics of each step."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = warm_processes.run(
        [*command, "train", "arm.yaml", f"name={name}", *overrides],
        cwd=workdir,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in (workdir / "runs" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def single(workdir: Path) -> list[dict[str, Any]]:
    return train(workdir, "single")


def assert_same(left: list[dict[str, Any]], right: list[dict[str, Any]], tolerance: float) -> None:
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert without_timing(other) == pytest.approx(without_timing(one), rel=tolerance, abs=tolerance)


def test_steps_update_policy_and_value_head(single: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in single] == [0, 1, 2, 3]
    for line in single[1:]:
        assert line["actor/grad_norm"] > 0
        assert line["actor/skipped_updates"] == 0
        assert line["env/failed"] == 0
    assert single[1]["actor/entropy"] < 3.05  # ln 21


def test_stages_in_worker_processes_change_no_number(workdir: Path, single: list[dict[str, Any]]) -> None:
    assert_same(single, train(workdir, "stages", "env.pipeline_stages=2", "env.processes=2"), 1e-3)


def test_two_ranks_give_the_numbers_of_one(workdir: Path, single: list[dict[str, Any]]) -> None:
    assert_same(single, train(workdir, "two", "placement.devices_per_node=2", command=ranks(2)), 1e-3)


def test_robots_and_policy_copies_on_other_devices_give_the_same_numbers(
    workdir: Path, single: list[dict[str, Any]]
) -> None:
    overrides = ("placement.devices_per_node=3", "placement.actor.devices=[0]", "placement.envs.devices=[1]")
    lines = train(workdir, "apart", *overrides, "placement.rollout.devices=[2]", command=ranks(3))
    assert_same(single, lines, 1e-3)


def test_interrupted_run_ends_with_the_same_numbers(workdir: Path, single: list[dict[str, Any]]) -> None:
    fixed = "actor.optimizer.schedule=constant"
    whole = train(workdir, "whole", fixed)
    train(workdir, "resumed", fixed, "training.steps=2")
    resumed = train(workdir, "resumed", fixed)
    assert without_timing(resumed[-1]) == without_timing(whole[-1])


def test_trained_policy_loads_and_acts_the_same(workdir: Path, single: list[dict[str, Any]]) -> None:
    import numpy as np
    import torch

    from quintet.config.compose import load_experiment
    from quintet.embodied_records import ActionSampling, RobotObservation
    from quintet.policies.vla.build import load_action_policy

    config = load_experiment(workdir / "arm.yaml", []).experiment
    checkpoint = workdir / "runs" / "single" / "checkpoints" / "global_step_3"
    policy = load_action_policy(checkpoint / "hf", config)
    policy.save_pretrained(workdir / "exported")
    again = load_action_policy(workdir / "exported", config)
    images = np.random.default_rng(0).integers(0, 255, (3, 1, 16, 16, 3), dtype=np.uint8)
    observation = RobotObservation(images, np.zeros((3, 6), np.float32), ("touch the ball",) * 3)
    with torch.no_grad():
        actions = [
            each.sample(each.prepare(observation), None, ActionSampling(0.0)).actions for each in (policy, again)
        ]
    assert torch.equal(*actions)


def test_a_run_and_an_exported_policy_are_evaluated_as_the_last_validation_was(
    workdir: Path, single: list[dict[str, Any]]
) -> None:
    def run(*arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = warm_processes.run(
            [*QUINTET, *arguments], cwd=workdir, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr[-3000:]

    run("eval", "runs/single")
    run("export", "runs/single", "models/arm")
    exported = ("policy.preset=null", "policy.overrides={}", "policy.path=models/arm")
    run("eval", "arm.yaml", "validation.only=true", "name=eval-exported", *exported)
    for name in ("eval-single", "eval-exported"):
        answers = (workdir / "runs" / name / "answers.jsonl").read_text().splitlines()
        rewards = [json.loads(line)["score"] for line in answers]
        assert len(rewards) == 8
        assert sum(rewards) / 8 == pytest.approx(single[-1]["val/simulator/reward"])


@pytest.mark.parametrize("level", ["token", "action"])
def test_grpo_at_other_levels_of_ratios(workdir: Path, level: str) -> None:
    lines = train(
        workdir,
        f"grpo_{level}",
        "algorithm.advantage={name: grpo}",
        "critic.shares_policy=false",
        f"algorithm.level={level}",
        f"algorithm.entropy_level={level}",
        "training.steps=1",
        "warm_start=null",
        "env.options={progress_reward: 1.0}",
    )
    assert lines[-1]["actor/grad_norm"] > 0


def test_state_policy_learns_from_dense_rewards(workdir: Path) -> None:
    lines = train(
        workdir,
        "state",
        "policy.preset=state-mlp",
        "policy.overrides={}",
        "env.options={privileged_state: true, progress_reward: 1.0}",
        "training.steps=1",
        "warm_start=null",
    )
    assert lines[-1]["actor/grad_norm"] > 0
