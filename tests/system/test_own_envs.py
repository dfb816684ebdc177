"""If these fail, a user's env that fails now and then ends the run, or its failures go unseen."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

Command = Callable[..., subprocess.CompletedProcess[str]]

LAKE = '''
import os, time
from quintet.config.native.envs import FrozenLakeConfig
from quintet.envs.frozenlake import FrozenLake


class Lake(FrozenLake):
    """A lake whose training episodes fail by turns: in one of four ways, or not at all."""

    def __init__(self, size):
        super().__init__(FrozenLakeConfig(size=size))

    def reset(self, seed):
        self.fault = seed // 3 % 5 if seed % 3 == 0 else 4
        if self.fault == 0:
            raise RuntimeError("this map is torn")
        return super().reset(seed)

    def step(self, action):
        if self.fault == 1:
            os._exit(5)
        if self.fault == 2:
            time.sleep(600)
        return None if self.fault == 3 else super().step(action)
'''

RUN = """
name: small
env: {name: custom, path: lake.py:Lake, arguments: {size: 3}, max_failed_share: 0.9,
        processes: {step_timeout_seconds: 1.0}}
training: {steps: 1, groups_per_step: 5, samples_per_group: 2, mini_batches: 1, threads: 1}
warm_start: {episodes: 30, updates: 20, turns_per_update: 32, until_success: null}
rollout: {max_turns: 3}
validation: {episodes: 4, every_steps: -1, before_training: false}
tracking: {trajectories_every_steps: 1}
"""


def test_a_run_goes_on_while_a_user_s_env_fails_in_all_ways(quintet: Command, tmp_path: Path) -> None:
    (tmp_path / "lake.py").write_text(LAKE)
    (tmp_path / "run.yaml").write_text(RUN)
    quintet("train", "run.yaml")
    metrics = json.loads((tmp_path / "runs/small/metrics.jsonl").read_text().splitlines()[-1])
    actual = {name.removeprefix("trajectory/failures/"): value for name, value in metrics.items() if "failures" in name}
    assert actual["reset/RuntimeError"] == 2
    # a policy that says nothing legal in a whole episode never asks its env
    assert set(actual) >= {"step/ProcessDied", "step/Timeout", "step/InvalidOutput"}
    assert metrics["trajectory/failed"] == sum(actual.values()) >= 5
    stored = (tmp_path / "runs/small/trajectories/train/step_000001.jsonl").read_text().splitlines()
    causes = [episode["failure"]["message"] for episode in map(json.loads, stored) if episode["failure"]]
    assert any("this map is torn (lake.py:" in cause for cause in causes)
    assert any("ended with status 5" in cause for cause in causes)


def test_a_env_that_is_not_there_is_told_with_what_is_near(quintet: Command, tmp_path: Path) -> None:
    (tmp_path / "lake.py").write_text(LAKE)
    (tmp_path / "run.yaml").write_text(RUN)
    done = quintet("train", "run.yaml", "env.path=lake.py:Lage", check=False)
    assert done.returncode == 2
    assert "env.path = 'lake.py:Lage'" in done.stderr
    assert "did you mean lake.py:Lake?" in done.stderr
