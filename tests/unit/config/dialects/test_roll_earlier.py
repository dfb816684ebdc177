"""If these fail, a file of ROLL's first releases in environments is refused, or read as another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted

FILE: dict[str, Any] = {
    "rollout_batch_size": 64,
    "val_batch_size": 16,
    "sequence_length": 1024,
    "adv_estimator": "reinforce",
    "actor_train": {"training_args": {"gradient_accumulation_steps": 4}},
    "actor_infer": {"generating_args": {"max_new_tokens": 200}, "strategy_args": {"strategy_name": "vllm"}},
    "action_sep": "||",
    "custom_env": {
        "Boxes": {"env_type": "sokoban", "max_actions_per_traj": 6, "env_config": {"dim_x": 6, "dim_y": 6}},
    },
    "custom_envs": {
        "Boxes": "${custom_env.Boxes}",
        "Lake": {
            "env_type": "frozen_lake",
            "max_actions_per_traj": 10,
            "max_steps_per_traj": 5,
            "max_tokens": 100,
            "env_config": None,
        },
        "Shop": {"env_type": "webshop", "max_actions_per_traj": 3},
    },
    "train_env_manager": {"format_penalty": -0.15, "env_groups": 64, "tags": ["Lake"], "n_groups": [64]},
    "val_env_manager": {"env_groups": 16, "tags": ["Lake"], "n_groups": [16]},
}
ENV = "custom_envs.FrozenLake."


def run_of(tmp_path: Path, changes: dict[str, Any]) -> Any:
    return converted(tmp_path, "roll", changed(FILE, changes)).composed.experiment


@pytest.mark.proves("roll", f"{ENV}max_actions_per_traj", f"{ENV}max_steps_per_traj", "action_sep")
def test_a_turn_has_several_actions_and_an_episode_its_own_number_of_turns(tmp_path: Path) -> None:
    rollout = run_of(tmp_path, {"action_sep": ";"}).rollout
    assert (rollout.max_turns, rollout.max_actions_per_turn, rollout.action_separator) == (5, 10, ";")
    assert (rollout.max_response_tokens, rollout.format_penalty) == (200, -0.15)
    assert run_of(tmp_path, {}).env.max_steps == 10
    boxes = {"train_env_manager.tags": ["Boxes"], "val_env_manager.tags": ["Boxes"]}
    run = run_of(tmp_path, boxes)
    assert (run.rollout.max_turns, run.env.name, run.env.width, run.env.max_steps) == (6, "sokoban", 6, 6)


@pytest.mark.proves("roll", "enable_think")
@pytest.mark.parametrize(("changes", "thinks"), [({}, True), ({"enable_think": False}, False)])
def test_thoughts_are_demanded_unless_the_file_says_otherwise(
    tmp_path: Path, changes: dict[str, Any], thinks: bool
) -> None:
    assert run_of(tmp_path, changes).rollout.think is thinks


@pytest.mark.proves("roll", "train_env_manager.env_groups", "train_env_manager.n_groups")
def test_groups_are_shared_among_tags(tmp_path: Path) -> None:
    mixed = {"train_env_manager.tags": ["Lake", "Boxes"], "train_env_manager.n_groups": [48, 16]}
    run = run_of(tmp_path, mixed)
    assert {name: env.share for name, env in run.envs.items()} == {"Lake": 48.0, "Boxes": 16.0}
    assert run.validation.episodes == 16


def test_only_environments_of_the_run_are_mentioned(tmp_path: Path) -> None:
    remarks = converted(tmp_path, "roll", FILE).composed.remarks
    assert any("env_groups = 64" in remark and "num_env_groups" in remark for remark in remarks)
    assert not any("Shop" in remark or "Boxes" in remark for remark in remarks)


def test_newer_files_have_one_action_in_a_turn(tmp_path: Path) -> None:
    newer = {"custom_envs.Lake": {"env_type": "frozen_lake", "max_steps": 5}, "train_env_manager.num_env_groups": 64}
    newer |= {"train_env_manager.num_groups_partition": [64], "val_env_manager.num_env_groups": 16}
    run = run_of(tmp_path, {**newer, "val_env_manager.num_groups_partition": [16], "enable_think": True})
    assert (run.rollout.max_actions_per_turn, run.rollout.max_turns, run.rollout.think) == (1, 5, False)


def test_early_files_need_whole_passes_of_the_validation_environments(tmp_path: Path) -> None:
    """ROLL asserts since July 2025 that `val_batch_size` is a multiple of the environments."""
    assert run_of(tmp_path, {"val_batch_size": 40}).validation.episodes == 40
