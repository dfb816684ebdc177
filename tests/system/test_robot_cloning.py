"""If these fail, a policy cloned from files isn't that cloned from the expert who wrote them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import warm_processes

from quintet.tracking.metrics import without_timing

pytest.importorskip("mujoco")

ENV = "simulator: arm, task: reach, max_steps: 8, camera_height: 16, camera_width: 16, options: {renderer: numpy}"
SIZES = "hidden: 32, layers: 1, heads: 4, mlp: 64, bins: 21, patch: 4, merge: 2, image: 16"
RUN = f"""\
env: {{name: simulator, {ENV}}}
policy: {{preset: arm-vla, overrides: {{{SIZES}}}}}
algorithm: {{advantage: {{name: grpo}}, loss: {{name: ppo}}, level: chunk, reward_level: chunk}}
training: {{steps: 0, groups_per_step: 2, samples_per_group: 4, mini_batches: 1, threads: 1}}
warm_start: {{episodes: 8, updates: 6, turns_per_update: 16, until_success: null}}
validation: {{episodes: 8, before_training: true}}
tracking: {{loggers: [jsonl]}}
"""


def quintet(directory: Path, *arguments: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "quintet", *arguments]
    result = warm_processes.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]


def test_files_of_an_expert_train_the_policy_that_the_expert_trains(tmp_path: Path) -> None:
    """Cloning alone: no step of reinforcement learning follows."""
    (tmp_path / "arm.yaml").write_text(RUN)
    settings = [word.replace(": ", "=", 1) for word in ENV.split(", ")]
    quintet(tmp_path, "data", "robots", "make", "episodes", *settings, "--episodes", "8")
    quintet(tmp_path, "train", "arm.yaml", "name=expert")
    quintet(tmp_path, "train", "arm.yaml", "name=files", "warm_start.files=[episodes]")
    for file in ("warm_start.jsonl", "metrics.jsonl"):
        expert, files = (
            [without_timing(json.loads(line)) for line in (tmp_path / f"runs/{name}/{file}").read_text().splitlines()]
            for name in ("expert", "files")
        )
        assert len(expert) == (6 if file == "warm_start.jsonl" else 1)
        assert [line | {"time_seconds": 0, "perf/max_memory_rss_gb": 0} for line in expert] == [
            line | {"time_seconds": 0, "perf/max_memory_rss_gb": 0} for line in files
        ]
