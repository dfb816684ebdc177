"""If these fail, a configuration of RAGEN since May 2025 does not train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

Command = Any

ENVS = {
    "SimpleSokoban": {
        "env_type": "sokoban",
        "max_actions_per_traj": 4,
        "env_instruction": "Push.",
        "max_tokens": 9,
        "env_config": {"dim_x": 5, "dim_y": 5, "num_boxes": 1, "max_steps": 100},
    },
    "FrozenLake": {"env_type": "frozen_lake", "max_actions_per_traj": 4, "env_instruction": None, "env_config": None},
    "Bandit": {"env_type": "bandit", "max_actions_per_traj": 1, "env_instruction": "", "env_config": None},
    "BanditTest": {
        "env_type": "bandit",
        "max_actions_per_traj": 1,
        "env_instruction": "",
        "env_config": {"lo_arm_name": "Trader", "hi_arm_name": "Librarian"},
    },
    "Countdown": {"env_type": "countdown", "max_actions_per_traj": 1, "env_instruction": None, "env_config": None},
}
BASE = {
    "defaults": ["ppo_trainer", "envs"],
    "micro_batch_size_per_gpu": 4,
    "ppo_mini_batch_size": 4,
    "actor_rollout_ref": {"rollout": {"max_model_len": 1500, "response_length": 16, "rollout_filter_ratio": 0.5}},
    "trainer": {"total_training_steps": 2, "test_freq": 2, "val_before_train": False, "logger": ["console"]},
    "agent_proxy": {"max_turn": 2, "max_actions_per_turn": 2},
    "es_manager": {
        "train": {"env_groups": 2, "group_size": 4, "env_configs": {"tags": ["SimpleSokoban"], "n_groups": [2]}},
        "val": {"env_groups": 4, "group_size": 1, "env_configs": {"tags": ["SimpleSokoban"], "n_groups": [4]}},
    },
}
SINGLE_TURN = {"max_turn": 1, "max_actions_per_turn": 1}
RUNS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "_1_bandit": (
        {
            "agent_proxy": SINGLE_TURN,
            "es_manager": {
                "train": {"env_configs": {"tags": ["Bandit"]}},
                "val": {"env_configs": {"tags": ["Bandit", "BanditTest"], "n_groups": [2, 2]}},
            },
        },
        {"Bandit", "BanditTest"},
    ),
    "_2_sokoban": ({}, {"sokoban"}),
    "_3_frozen_lake": (
        {"es_manager": {side: {"env_configs": {"tags": ["FrozenLake"]}} for side in ("train", "val")}},
        {"frozenlake"},
    ),
    "_4_countdown": (
        {
            "agent_proxy": SINGLE_TURN,
            "es_manager": {side: {"env_configs": {"tags": ["Countdown"]}} for side in ("train", "val")},
        },
        {"countdown"},
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights."""
    directory = tmp_path_factory.mktemp("model")
    words = ["training.steps=0", "warm_start=null", "validation.before_training=false", "name=made"]
    command = [sys.executable, "-m", "quintet", "train", *words]
    subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=240)
    return directory / "runs/made/checkpoints/global_step_0/hf"


@pytest.mark.parametrize("name", RUNS)
def test_a_configuration_like_ragens_trains_for_two_steps(
    quintet: Command, model: Path, tmp_path: Path, name: str
) -> None:
    tree, played = RUNS[name]
    (tmp_path / "envs.yaml").write_text(yaml.safe_dump({"custom_envs": ENVS}))
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    own = {"defaults": ["base"], "trainer": {"experiment_name": name.strip("_")}} | tree
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(own))
    done = quintet("train", f"{name}.yaml", f"model_path={model}", "trainer.default_local_dir=runs")
    assert "a configuration of ragen" in done.stderr
    run = tmp_path / "runs" / name.strip("_")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    # one of two groups is kept, a single mini-batch of 4 episodes
    assert all(line["training/groups_kept"] == 0.5 and "critic/grad_norm" in line for line in lines)
    stored = (run / "trajectories/validation/step_000002.jsonl").read_text().splitlines()
    assert len(stored) == 4
    assert {json.loads(line)["env"] for line in stored} == played
