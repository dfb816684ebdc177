"""If these fail, a RAGEN configuration runs as something else than what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from quintet.config.compose import Composed, dump_config, flatten
from quintet.config.dialects.dialect import DIALECTS
from quintet.config.dialects.loading import load_foreign
from quintet.errors import ConfigError

PLAIN = {
    "model": {"base_model": "some/model"},
    "sft": {"env_type": "frozenlake"},
    "logging": {"mode": ["console"]},
}
"""What a run gives that asks for nothing which waits."""

REACHED: list[tuple[str, Any, Any, str, Any]] = [
    ("model.base_model", "other/model", 1, "policy.path", "other/model"),
    ("model.experiment_name", "mine", None, "name", "mine"),
    ("model.gradient_checkpointing", False, "no", "actor.gradient_checkpointing", False),
    ("training.train_data_num", 100, -1, "training.start_states", 100),
    ("training.val_data_num", 35, -1, "validation.games", 30),
    ("training.val_batch_size", 7, 0, "validation.games", 49),
    ("training.micro_batch_size", 2, 0, "actor.budget.sequences", 2),
    ("training.train_batch_size", 16, "eight", "training.groups_per_step", 16),
    ("training.ppo_batch_size", 32, 0, "training.mini_batches", 4),
    ("training.n_rollout", 32, 0, "training.samples_per_group", 32),
    ("training.max_start_length", 500, 0, "rollout.max_prompt_tokens", 3100),
    ("training.max_response_length", 100, 0, "rollout.max_response_tokens", 100),
    ("training.max_obs_length", 100, 0, "rollout.max_observation_tokens", 100),
    ("training.max_turns", 2, 0, "rollout.max_turns", 2),
    ("training.total_epochs", 2, 0, "training.steps", 2500),
    ("training.total_training_steps", 7, -1, "training.steps", 7),
    ("training.temperature", 1.0, 0, "rollout.temperature", 1.0),
    ("training.use_kl_loss", False, 1, "algorithm.kl.place", "reward"),
    ("training.no_think_rl", True, "yes", "rollout.think", False),
    ("training.state_masking", True, "yes", "algorithm.train_on_observations", False),
    ("training.mask_state", True, 1, "algorithm.train_on_observations", False),
    ("training.binary_reward", True, 1, "rollout.binary_reward", True),
    ("trainer.project_name", "mine", None, "output_dir", "runs/mine"),
    ("training.ref_update_steps", 5, 0, "algorithm.kl.refresh_every_steps", 5),
    ("optimization.actor_lr", 3e-4, 0, "actor.optimizer.learning_rate", 3e-4),
    ("optimization.critic_lr", 3e-4, "1", "critic.optimizer.learning_rate", 3e-4),
    ("optimization.kl_coef", 0.5, -1, "algorithm.kl.coefficient", 0.5),
    ("optimization.kl_loss_type", "mse", "kll", "algorithm.kl.estimator", "k2"),
    ("optimization.gpu_memory_utilization", 0.6, 1.2, "rollout.engine_options.memory_share", 0.6),
    ("logging.log_images", True, "on", "tracking.pictures", 32),
    ("logging.log_image_dir", "drawn", 7, "tracking.pictures_dir", "drawn"),
    ("logging.log_n_image_per_batch", 5, -1, "tracking.pictures", 5),
    ("trainer.val_before_train", False, "no", "validation.before_training", False),
    ("trainer.val_only", True, 0, "validation.only", True),
    ("trainer.save_freq", 7, "often", "checkpoint.every_steps", 7),
    ("trainer.test_freq", -1, -2, "validation.every_steps", -1),
    ("logging.log_image_step_size", 9, 0, "tracking.trajectories_every_steps", 9),
    ("sft.env_type", "sokoban", "chess", "world.name", "sokoban"),
    ("sft.frozenlake.size", 5, 1, "world.size", 5),
    ("sft.frozenlake.p", 0.5, 1.5, "world.success_rate", 0.5),
    ("sft.frozenlake.is_slippery", False, 0, "world.slippery", False),
]
SOKOBAN = [
    ("sft.sokoban.dim_x", 7, 3, "world.height", 7),
    ("sft.sokoban.dim_y", 8, "8", "world.width", 8),
    ("sft.sokoban.num_boxes", 2, 0, "world.boxes", 2),
    ("sft.sokoban.max_steps", 50, 0, "world.max_steps", 50),
    ("sft.sokoban.search_depth", 40, 0, "world.pull_steps", 40),
]


def load(tmp_path: Path, tree: dict[str, Any], *overrides: str) -> Composed:
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(tree))
    return load_foreign(path, overrides, DIALECTS["ragen"])


def changed(key: str, value: Any, **others: Any) -> dict[str, Any]:
    tree = yaml.safe_load(yaml.safe_dump(PLAIN))
    for dotted, one in {**others, key: value}.items():
        *sections, last = dotted.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = one
    return tree


@pytest.mark.parametrize(("key", "value", "illegal", "native", "expected"), REACHED, ids=[one[0] for one in REACHED])
def test_a_key_reaches_the_run(tmp_path: Path, key: str, value: Any, illegal: Any, native: str, expected: Any) -> None:
    others = {"training.ppo_batch_size": 64} if key == "training.max_turns" else {}
    composed = load(tmp_path, changed(key, value, **others))
    assert flatten(composed.experiment.model_dump())[native] == expected
    assert key in composed.provenance[native]
    assert "base.yaml:" in composed.provenance[native]
    with pytest.raises(ConfigError) as error:
        load(tmp_path, changed(key, illegal))
    assert key in str(error.value)


@pytest.mark.parametrize(("key", "value", "illegal", "native", "expected"), SOKOBAN, ids=[one[0] for one in SOKOBAN])
def test_a_key_of_sokoban_reaches_the_run(
    tmp_path: Path, key: str, value: Any, illegal: Any, native: str, expected: Any
) -> None:
    composed = load(tmp_path, changed(key, value, **{"sft.env_type": "sokoban"}))
    assert flatten(composed.experiment.model_dump())[native] == expected
    with pytest.raises(ConfigError, match=key):
        load(tmp_path, changed(key, illegal, **{"sft.env_type": "sokoban"}))


def test_the_games_of_a_step_must_fill_whole_updates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, changed("training.ppo_batch_size", 100))
    told = str(error.value)
    for word in ("ppo_batch_size = 100", "train_batch_size = 8", "n_rollout = 16", "128", "ppo_batch_size=128"):
        assert word in told


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training.train_data_num": 4}, ("train_batch_size = 8", "4 start states", "train_batch_size=4")),
        ({"training.val_data_num": 5}, ("val_data_num = 5", "val_batch_size = 10", "at least 10")),
        ({"training.n_rollout": 1, "training.ppo_batch_size": 8}, ("n_rollout = 1", "adv_estimator=gae")),
    ],
)
def test_batches_that_nothing_fills_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, changed("training.max_turns", 5, **changes))
    for word in words:
        assert word in str(error.value)


def test_start_states_that_are_drawn_once_decide_about_the_steps(tmp_path: Path) -> None:
    """By hand: 100 // 8 steps in each of 5 passes; more than there are change nothing."""
    training = load(tmp_path, PLAIN, "training.train_data_num=100").experiment.training
    assert (training.steps, training.start_states) == (60, 100)
    whole = load(tmp_path, PLAIN, "training.train_data_num=20000", "training.val_data_num=20000").experiment
    assert (whole.training.steps, whole.training.start_states, whole.validation.games) == (6250, None, 10000)


def test_a_coefficient_of_zero_needs_no_reference(tmp_path: Path) -> None:
    assert load(tmp_path, PLAIN, "optimization.kl_coef=0").experiment.algorithm.kl is None


def test_everything_that_waits_or_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    tree = changed("training.length_penalty", True, **{"system.n_gpus": 4, "training.max_turn": 3})
    with pytest.raises(ConfigError) as error:
        load(tmp_path, tree)
    told = str(error.value)
    for word in ("training.length_penalty", "system.n_gpus", "training.max_turn ", "did you mean training.max_turns"):
        assert word in told


def test_unknown_keys_can_be_let_go_but_never_silently(tmp_path: Path) -> None:
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(changed("training.zebra", 1)))
    composed = load_foreign(path, [], DIALECTS["ragen"], unknown="warn")
    assert "unknown key left out: training.zebra (" in composed.remarks[0]
    assert "# Remark: unknown key left out: training.zebra (" in dump_config(composed)


def test_where_the_references_own_value_waits_it_is_said(tmp_path: Path) -> None:
    remarks = "\n".join(load(tmp_path, PLAIN).remarks)
    assert "system.vllm_attention_backend" not in remarks
    assert "sft.training.lora_rank" not in remarks


@pytest.mark.parametrize("section", [5, "yes"])
def test_a_section_that_holds_no_keys_is_refused(tmp_path: Path, section: Any) -> None:
    with pytest.raises(ConfigError, match=r"optimization = .*must be a section"):
        load(tmp_path, PLAIN | {"optimization": section})


def test_each_honoured_key_has_a_row_in_these_tables() -> None:
    honoured = {row.key for row in DIALECTS["ragen"].rows().values() if row.pending is None}
    assert honoured == {one[0] for one in (*REACHED, *SOKOBAN)}


def test_what_a_section_that_isnt_run_says_asks_for_nothing(tmp_path: Path) -> None:
    tree = changed("sft.training.lora_rank", 64, **{"logging.log_images": False, "sft.training.epochs": 3})
    load(tmp_path, tree)
    with pytest.raises(ConfigError) as error:
        load(tmp_path, tree | {"rl_or_sft": "sft"}, "logging.log_images=true")
    for word in ("sft.training.lora_rank", "sft.training.epochs", "rl_or_sft"):
        assert word in str(error.value)
