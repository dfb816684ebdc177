"""If these fail, a configuration of RAGEN since May 2025, or of its releases of 2026, does not train."""

from __future__ import annotations

import json
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
    "CoordSokoban": {
        "env_type": "sokoban",
        "max_actions_per_traj": 4,
        "env_instruction": "Push. Answer like <answer>Up</answer>.",
        "env_config": {"dim_x": 5, "dim_y": 5, "num_boxes": 1, "observation_format": "grid_coord"},
    },
    "CoordFrozenLake": {
        "env_type": "frozen_lake",
        "max_actions_per_traj": 4,
        "env_instruction": "Walk. Answer like <answer>Up</answer>.",
        "env_config": {"observation_format": "grid_coord", "success_rate": 0.8},
    },
    "Bandit": {
        "env_type": "bandit",
        "max_actions_per_traj": 1,
        "env_instruction": "",
        "env_config": {"split": "train"},
    },
    "BanditTest": {
        "env_type": "bandit",
        "max_actions_per_traj": 1,
        "env_instruction": "",
        "env_config": {"split": "test"},
    },
    "Countdown": {"env_type": "countdown", "max_actions_per_traj": 1, "env_instruction": None, "env_config": None},
}
BASE = {
    "defaults": ["ppo_trainer", "envs"],
    "micro_batch_size_per_gpu": 4,
    "ppo_mini_batch_size": 4,
    "actor_rollout_ref": {"rollout": {"max_model_len": 1500, "response_length": 16}},
    "trainer": {"total_training_steps": 2, "test_freq": 2, "val_before_train": False, "logger": ["console"]},
    "agent_proxy": {"max_turn": 2, "max_actions_per_turn": 2},
    "es_manager": {
        "train": {"env_groups": 2, "group_size": 4, "env_configs": {"tags": ["SimpleSokoban"], "n_groups": [2]}},
        "val": {"env_groups": 4, "group_size": 1, "env_configs": {"tags": ["SimpleSokoban"], "n_groups": [4]}},
    },
}
FILTER_2025 = {"rollout_filter_ratio": 0.5}
FILTER_2026 = {
    "rollout_filter_strategy": "top_p",
    "rollout_filter_value": 0.5,
    "rollout_filter_type": "largest",
    "rollout_filter_top_p_prob_mode": "softmax",
}
"""The larger of two probabilities is at least 0.5."""
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
    "_2_sokoban": (
        {"es_manager": {side: {"env_configs": {"tags": ["CoordSokoban"]}} for side in ("train", "val")}},
        {"sokoban"},
    ),
    "_3_frozen_lake": (
        {"es_manager": {side: {"env_configs": {"tags": ["CoordFrozenLake"]}} for side in ("train", "val")}},
        {"frozenlake"},
    ),
    "simple_sokoban": ({}, {"sokoban"}),
    "_4_countdown": (
        {
            "agent_proxy": SINGLE_TURN,
            "es_manager": {side: {"env_configs": {"tags": ["Countdown"]}} for side in ("train", "val")},
        },
        {"countdown"},
    ),
}


RUNS_2025 = ("simple_sokoban", "_4_countdown")


@pytest.mark.parametrize("name", RUNS)
def test_a_configuration_like_ragens_trains_for_two_steps(
    quintet: Command, untrained_model: Path, tmp_path: Path, name: str
) -> None:
    tree, played = RUNS[name]
    (tmp_path / "envs.yaml").write_text(yaml.safe_dump({"custom_envs": ENVS}))
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(BASE))
    own = {"defaults": ["base"], "trainer": {"experiment_name": name.strip("_")}} | tree
    own["actor_rollout_ref"] = {"rollout": FILTER_2025 if name in RUNS_2025 else FILTER_2026}
    (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(own))
    done = quintet("train", f"{name}.yaml", f"model_path={untrained_model}", "trainer.default_local_dir=runs")
    assert "a configuration of ragen" in done.stderr
    run = tmp_path / "runs" / name.strip("_")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    # one of two groups is kept, a single mini-batch of 4 episodes
    assert all(line["training/groups_kept"] == 0.5 and "critic/grad_norm" in line for line in lines)
    stored = (run / "trajectories/validation/step_000002.jsonl").read_text().splitlines()
    assert len(stored) == 4
    assert {json.loads(line)["env"] for line in stored} == played
    # the policy sees the states in the form of the file
    listed = [line for line in stored if "Board size: " in line and "Grid Map: " in line]
    assert len(listed) == (4 if name in ("_2_sokoban", "_3_frozen_lake") else 0)
    arms = {"Explorer", "Filmmaker", "Consultant", "Photographer", "GameDesigner", "Entrepreneur", "DataScientist"}
    drawn = [line for line in stored if any(arm in line for arm in (*arms, "StartupAccelerator"))]
    assert len(drawn) == (2 if name == "_1_bandit" else 0)
