"""If these fail, a VAGEN user's run is something else than what their files say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively, translated

from quintet.config.capabilities import Capability
from quintet.config.compose import load_experiment
from quintet.config.dialects.composition.foreign_config import config_from_tree
from quintet.config.dialects.loader import load_config
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.vagen.dialect import ENVS_WITH_KEYS, env_keys
from quintet.config.schema import keys
from quintet.config.translate import translate
from quintet.errors import ConfigError

ACTOR, MODEL, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "ref", "rollout"))
DOCUMENTED: dict[str, Any] = {
    "data.train_batch_size": 16,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 648,
    "data.max_trajectory_length": 1800,
    f"{MODEL}.path": "Qwen/Qwen2.5-VL-3B-Instruct",
    f"{MODEL}.use_remove_padding": True,
    f"{ACTOR}.ppo_mini_batch_size": 32,
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ROLLOUT}.gpu_memory_utilization": 0.2,
    f"{ROLLOUT}.enable_chunked_prefill": False,
    f"{ROLLOUT}.enforce_eager": False,
    f"{ROLLOUT}.free_cache_engine": False,
    f"{ROLLOUT}.top_p": 0.95,
    f"{ROLLOUT}.temperature": 0.7,
    f"{REF}.fsdp_config.param_offload": True,
    "critic.model.path": "Qwen/Qwen2.5-VL-3B-Instruct",
    "critic.model.use_remove_padding": True,
    "trainer.save_freq": 70,
    "trainer.test_freq": 20,
    "trainer.total_training_steps": 300,
    "rollout_manager.window_size": 3,
    "rollout_manager.use_multi_turn_reward": False,
    "rollout_manager.n_trajectory": 8,
}
"""The values of VAGEN's page that differ from its `ppo_trainer.yaml`."""


def file_of(section: str, env_name: str, max_turns: int) -> dict[str, Any]:
    """A file with the values of VAGEN's page, of one environment."""
    tree = {section: {"env_name": env_name}, "rollout_manager": {"max_turns": max_turns}}
    return changed(tree, DOCUMENTED)


PICTURES, LAKE, PUZZLE = file_of("env1", "svg", 2), file_of("env1", "frozenlake", 3), file_of("boxes", "sokoban", 3)
HOUSE, CARDS = file_of("env1", "navigation", 3), file_of("env1", "blackjack", 5)
ROBOT, TABLE = file_of("env1", "alfworld", 5), file_of("env1", "primitive_skill", 3)

ENGINE, MANAGER, ENV = "rollout.engine_options", "rollout_manager", "env1.env_config"
IN_LOSS = {f"{ACTOR}.use_kl_loss": True}
DESCRIBED = {f"{ENV}.prompt_format": "grounding_worldmodeling"}
STEERED = {"algorithm.kl_ctrl.type": "adaptive"}

Row = tuple[str, Any, Any, str, Any]

REACHED: list[Row] = [
    ("algorithm.adv_estimator", "bi_level_gae", "multi_turn_grpo", "algorithm.advantage.name", "bi_level_gae"),
    ("algorithm.high_level_gamma", 0.95, 2, "algorithm.advantage.turn_gamma", 0.95),
    ("algorithm.kl_ctrl.kl_coef", 0.01, -1, "algorithm.kl.coefficient", 0.01),
    ("data.train_files", "data/lake/train.parquet", 1, "env.name", "frozenlake"),
    ("data.val_files", ["data/lake/test.parquet"], 1, "env.name", "frozenlake"),
    ("data.train_batch_size", 32, 0, "training.groups_per_step", 32),
    ("data.max_prompt_length", 512, 0, "rollout.max_start_tokens", 512),
    ("data.max_response_length", 200, 0, "rollout.max_prompt_tokens", 1600),
    ("data.max_trajectory_length", 2400, 0, "rollout.max_prompt_tokens", 1752),
    ("data.image_key", "pictures", 1, "data.image_key", "pictures"),
    ("data.truncation", "left", "start", "data.truncation", "left"),
    (f"{MODEL}.path", "some/model", 1, "policy.path", "some/model"),
    (f"{MODEL}.use_remove_padding", False, 1, "actor.memory.remove_padding", False),
    (f"{MODEL}.enable_gradient_checkpointing", False, 0, "actor.gradient_checkpointing", False),
    (f"{ACTOR}.optim.lr", 3e-6, 0, "actor.optimizer.learning_rate", 3e-6),
    (f"{ACTOR}.ppo_mini_batch_size", 16, 0, "training.mini_batches", 8),
    (f"{ACTOR}.ppo_micro_batch_size_per_gpu", 2, None, "actor.budget.sequences", 2),
    (f"{ACTOR}.use_kl_loss", True, 1, "algorithm.kl.apply_to", "loss"),
    (f"{ACTOR}.kl_loss_coef", 0.1, -1, "algorithm.kl.coefficient", 0.1),
    (f"{ACTOR}.kl_loss_type", "low_var_kl", "full", "algorithm.kl.estimator", "k3"),
    (f"{ACTOR}.fsdp_config.param_offload", True, 1, "actor.memory.offload_parameters", True),
    (f"{ACTOR}.fsdp_config.optimizer_offload", True, 1, "actor.memory.offload_optimizer", True),
    (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", 4, 0, "actor.inference_budget.sequences", 4),
    (f"{ROLLOUT}.tensor_model_parallel_size", 4, 0, f"{ENGINE}.tensor_parallel", 4),
    (f"{ROLLOUT}.name", "sglang", "trtllm", "rollout.engine", "sglang"),
    (f"{ROLLOUT}.gpu_memory_utilization", 0.4, 2, f"{ENGINE}.memory_share", 0.4),
    (f"{ROLLOUT}.enable_chunked_prefill", True, 1, f"{ENGINE}.chunked_prefill", True),
    (f"{ROLLOUT}.enforce_eager", True, 1, f"{ENGINE}.eager", True),
    (f"{ROLLOUT}.free_cache_engine", True, 1, f"{ENGINE}.sleep_between_steps", True),
    (f"{ROLLOUT}.n", 2, 0, "training.samples_per_group", 16),
    (f"{ROLLOUT}.top_p", 0.9, 0, "rollout.top_p", 0.9),
    (f"{ROLLOUT}.temperature", 1.0, 0, "rollout.temperature", 1.0),
    (f"{REF}.log_prob_micro_batch_size_per_gpu", 4, 0, "reference.inference_budget.sequences", 4),
    (f"{REF}.fsdp_config.param_offload", False, 0, "reference.memory.offload_parameters", False),
    ("critic.optim.lr", 3e-5, 0, "critic.optimizer.learning_rate", 3e-5),
    ("critic.ppo_micro_batch_size_per_gpu", 4, 0, "critic.budget.sequences", 4),
    ("critic.model.use_remove_padding", False, 0, "critic.memory.remove_padding", False),
    ("critic.model.path", "other/model", 1, "critic.path", "other/model"),
    ("critic.model.enable_gradient_checkpointing", False, 0, "critic.gradient_checkpointing", False),
    ("critic.model.fsdp_config.param_offload", True, 1, "critic.memory.offload_parameters", True),
    ("critic.model.fsdp_config.optimizer_offload", True, 1, "critic.memory.offload_optimizer", True),
    ("trainer.critic_warmup", 5, -1, "critic.warmup_steps", 5),
    ("trainer.logger", ["mlflow", "vemlp_wandb"], "konsole", "tracking.loggers", ("jsonl", "mlflow", "vemlp_wandb")),
    ("trainer.project_name", "mine", 1, "tracking.project", "mine"),
    ("trainer.experiment_name", "mine", 1, "name", "mine"),
    ("trainer.n_gpus_per_node", 8, 0, "placement.devices_per_node", 8),
    ("trainer.nnodes", 2, 0, "placement.nodes", 2),
    ("trainer.save_freq", -1, -2, "checkpoint.every_steps", 0),
    ("trainer.test_freq", 10, "often", "validation.every_steps", 10),
    ("trainer.total_training_steps", 100, 0, "training.steps", 100),
    ("trainer.val_before_train", False, 0, "validation.before_training", False),
    ("trainer.val_generations_to_log_to_wandb", 4, -1, "tracking.validation_generations", 4),
    (f"{MANAGER}.max_turns", 5, 0, "rollout.max_turns", 5),
    (f"{MANAGER}.window_size", 0, -1, "rollout.window_size", 1),
    (f"{MANAGER}.use_multi_turn_reward", True, 1, "algorithm.turn_rewards", True),
    (f"{MANAGER}.use_loss_mask", False, 0, "algorithm.train_on_observations", True),
    (f"{MANAGER}.use_gae_mask", False, 0, "algorithm.advantage_over_response_tokens", False),
    (f"{MANAGER}.n_trajectory", 4, 0, "training.samples_per_group", 4),
    (f"{MANAGER}.use_service", True, 1, "env.service.protocol", "vagen"),
    (f"{MANAGER}.base_url", "http://10.0.0.7:5001", 1, "env.service.urls", ("http://10.0.0.7:5001",)),
    (f"{MANAGER}.timeout", 240, 0, "env.service.timeout_seconds", 240.0),
]
ENVS: list[Row] = [
    ("env1.env_name", "svg", "chess", "env.name", "svg"),
    (f"{ENV}.render_mode", "vision", "sound", "env.render", "vision"),
    ("env1.train_size", 1000, -1, "training.start_states", 1000),
    ("env1.test_size", 128, -1, "validation.episodes", 128),
    (f"{ENV}.prompt_format", "grounding", "loud", "rollout.thoughts", "grounding"),
    (f"{ENV}.max_actions_per_step", 1, 0, "rollout.max_actions_per_turn", 1),
    (f"{ENV}.action_sep", "|", 1, "rollout.action_separator", "|"),
    (f"{ENV}.format_reward", 0.25, -1, "rollout.format_reward", 0.25),
    (f"{ENV}.use_state_reward", True, 1, "rollout.state_reward.grounding_weight", 0.5),
    (f"{ENV}.grounding_reward_weight", 0.3, -1, "rollout.state_reward.grounding_weight", 0.3),
    (f"{ENV}.worldmodeling_reward_weight", 0.2, -1, "rollout.state_reward.worldmodeling_weight", 0.2),
    (f"{ENV}.size", 6, 1, "env.size", 6),
    (f"{ENV}.p", 0.7, 0, "env.floor_density", 0.7),
    (f"{ENV}.is_slippery", True, 1, "env.slippery", True),
    ("trainer.total_epochs", 2, 0, "training.steps", 1250),
    ("algorithm.kl_penalty", "abs", "abss", "algorithm.kl.estimator", "abs"),
    ("algorithm.kl_ctrl.type", "adaptive", "wild", "algorithm.kl.target", 0.1),
    ("algorithm.kl_ctrl.horizon", 500, 0, "algorithm.kl.horizon", 500),
    ("algorithm.kl_ctrl.target_kl", 0.5, 0, "algorithm.kl.target", 0.5),
]
OF_TRAINER: list[Row] = [
    ("algorithm.token_reward_type", "return", "advantage", "algorithm.advantage.turn_value", "first"),
    ("algorithm.traj_advantage_weight", 0.5, "x", "algorithm.advantage.episode_weight", 0.5),
    ("algorithm.turn_advantage_weight", 0.5, "x", "algorithm.advantage.turn_weight", 0.5),
    ("algorithm.use_std_normalization", True, 1, "algorithm.advantage.normalize_by_std", True),
    (f"{ACTOR}.grad_norm_threshold", 1e3, 0, "actor.optimizer.skip_above_grad_norm", 1000.0),
    ("critic.grad_norm_threshold", 1e6, 0, "critic.optimizer.skip_above_grad_norm", 1e6),
    ("critic.use_reward_mask", True, False, "algorithm.advantage.name", "turn_wise_gae"),
    (f"{ENV}.visual_env", True, 1, "env.render", "vision"),
    (f"{REF}.use_ref", False, 1, "algorithm.kl", None),
    ("data.val_batch_size", 16, 0, "validation.prompts_per_device", 16),
    (f"{MANAGER}.use_turn_update", True, 1, "rollout.window_size", 4),
    (f"{MANAGER}.max_trajectory_length", 1800, 1700, "rollout.max_prompt_tokens", 1152),
    (f"{MANAGER}.mini_batch_size", 32, 0, "rollout.max_concurrent", 32),
]
OF_SOKOBAN: list[Row] = [
    ("boxes.env_config.turn_wise_update", True, 1, "rollout.think", True),
    ("boxes.env_config.dim_room", [7, 8], [3, 8], "env.width", 8),
    ("boxes.env_config.num_boxes", 2, 0, "env.boxes", 2),
    ("boxes.env_config.max_steps", 50, 0, "env.max_steps", 50),
    ("boxes.env_config.search_depth", 40, 0, "env.pull_steps", 40),
]
OF_SVG: list[Row] = [
    (f"{ENV}.dataset_name", "mine/icons-two", 1, "env.dataset", "data/mine-icons-two/train"),
    (f"{ENV}.data_dir", "other", 1, "env.dataset", "other/starvector-svg-icons-simple/train"),
    (f"{ENV}.split", "test", 1, "env.dataset", "data/starvector-svg-icons-simple/test"),
    (f"{ENV}.model_size", "base", "huge", "env.dino_path", "facebook/dinov2-base"),
    (f"{ENV}.dino_weight", 5.0, -1, "env.dino_weight", 5.0),
    (f"{ENV}.structural_weight", 2, "two", "env.structural_weight", 2.0),
    (f"{ENV}.dreamsim_weight", 0.5, -1, "env.dreamsim_weight", 0.5),
    (f"{ENV}.device.dino", 1, -1, "env.dino_device", "cuda:1"),
    (f"{ENV}.device.dreamsim", "cpu", -1, "env.dreamsim_device", "cpu"),
    (f"{ENV}.format_penalty", -0.5, "low", "env.format_penalty", -0.5),
]
OF_NAVIGATION: list[Row] = [
    (f"{ENV}.eval_set", "long_horizon", "far", "env.eval_set", "long_horizon"),
    (f"{ENV}.down_sample_ratio", 0.5, 0, "env.down_sample_ratio", 0.5),
    (f"{ENV}.resolution", 64, 8, "env.resolution", 64),
    (f"{ENV}.fov", 90, 10, "env.fov", 90.0),
    (f"{ENV}.multiview", True, 1, "env.multiview", True),
    (f"{ENV}.step_length", 0.25, 0, "env.step_length", 0.25),
    (f"{ENV}.success_threshold", 1.0, 0, "env.success_threshold", 1.0),
    (f"{ENV}.gpu_device", 1, -1, "env.gpu_device", 1),
    (f"{ENV}.max_objects_in_state", 3, 0, "env.max_objects", 3),
]
OF_SKILLS: list[Row] = [
    (f"{ENV}.env_id", "StackThreeCube", "Juggle", "env.task", "StackThreeCube"),
    (f"{ENV}.mask_success", False, 1, "env.mask_success", False),
]
OF_CARDS: list[Row] = [
    (f"{ENV}.natural", True, 1, "env.natural", True),
    (f"{ENV}.sab", True, 1, "env.sab", True),
]
OF_ROBOT: list[Row] = [(f"{ENV}.alf_config_path", "alf.yaml", 1, "env.config_path", "alf.yaml")]
WITH: dict[str, dict[str, Any]] = {
    "data.max_prompt_length": {"data.max_trajectory_length": 2000},
    f"{ACTOR}.kl_loss_coef": IN_LOSS,
    f"{ACTOR}.kl_loss_type": IN_LOSS,
    f"{ROLLOUT}.free_cache_engine": {f"{ROLLOUT}.enforce_eager": True},
    f"{MANAGER}.base_url": {f"{MANAGER}.use_service": True},
    f"{MANAGER}.timeout": {f"{MANAGER}.use_service": True},
    f"{ENV}.use_state_reward": DESCRIBED,
    f"{ENV}.grounding_reward_weight": {**DESCRIBED, f"{ENV}.use_state_reward": True},
    f"{ENV}.worldmodeling_reward_weight": {**DESCRIBED, f"{ENV}.use_state_reward": True},
    "algorithm.token_reward_type": {"algorithm.adv_estimator": "turn_update_bi_level_gae"},
    "algorithm.high_level_gamma": {"algorithm.adv_estimator": "bi_level_gae"},
    "algorithm.traj_advantage_weight": {"algorithm.adv_estimator": "turn_update_grpo"},
    "algorithm.turn_advantage_weight": {"algorithm.adv_estimator": "turn_update_grpo"},
    "algorithm.use_std_normalization": {"algorithm.adv_estimator": "turn_update_grpo"},
    "critic.use_reward_mask": {"algorithm.adv_estimator": "turn_wise_gae"},
    "trainer.nnodes": {f"{ROLLOUT}.tensor_model_parallel_size": 4},
    "env1.train_size": {"trainer.total_training_steps": 300},
    "trainer.total_epochs": {"trainer.total_training_steps": None},
    "algorithm.kl_ctrl.horizon": STEERED,
    "algorithm.kl_ctrl.target_kl": STEERED,
}
"""What a key needs to count."""
CASES = [
    *((LAKE, WITH.get(row[0], {}), row) for row in (*REACHED, *ENVS, *OF_TRAINER)),
    *((PUZZLE, {}, row) for row in OF_SOKOBAN),
    *((PICTURES, {}, row) for row in OF_SVG),
    *((HOUSE, {}, row) for row in OF_NAVIGATION),
    *((TABLE, {}, row) for row in OF_SKILLS),
    *((CARDS, {}, row) for row in OF_CARDS),
    *((ROBOT, {}, row) for row in OF_ROBOT),
]


@pytest.mark.proves("vagen", *(case[2][0].replace("boxes.", "env1.") for case in CASES))
@pytest.mark.parametrize(("plain", "others", "row"), CASES, ids=[row[0] for _, _, row in CASES])
def test_a_key_reaches_the_run(tmp_path: Path, plain: dict[str, Any], others: dict[str, Any], row: Row) -> None:
    key, value, illegal, native, expected = row
    found = converted(tmp_path, "vagen", changed(plain, {**others, key: value}))
    assert natively(found, native) == expected
    places = found.composed.provenance
    assert key in places.get(native, "") or key in places.get(native.rpartition(".")[0], "")
    assert translated(found, "vagen").lost == {}
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, "vagen", changed(plain, {**others, key: illegal}))
    assert key in str(error.value)


FOLLOWERS = {
    f"{MANAGER}.max_trajectory_length": ("data.max_trajectory_length", 2000),
    f"{MANAGER}.n_gpus_per_node": ("trainer.n_gpus_per_node", 4),
    f"{MANAGER}.truncation": ("data.truncation", "left"),
}


@pytest.mark.proves("vagen", *FOLLOWERS)
@pytest.mark.parametrize("key", FOLLOWERS)
def test_keys_that_repeat_another_one_must_agree_with_it(tmp_path: Path, key: str) -> None:
    followed, value = FOLLOWERS[key]
    assert converted(tmp_path, "vagen", changed(LAKE, {followed: value})).composed
    assert converted(tmp_path, "vagen", changed(LAKE, {followed: value, key: value})).composed
    with pytest.raises(ConfigError, match=f"(?s){key} = .*{followed} = .*leave it out, or {followed}={value}"):
        converted(tmp_path, "vagen", changed(LAKE, {key: value}))


ANCHORED = [("high_level_gae", "turn_wise_gae"), ("turn_update_high_level_gae", "turn_wise_gae")]


@pytest.mark.parametrize(
    ("estimator", "name"), [*ANCHORED, ("turn_update_bi_level_gae", "bi_level_gae"), ("turn_update_gae", "gae")]
)
def test_estimators_of_turn_updates_take_the_value_of_a_turns_first_token(
    tmp_path: Path, estimator: str, name: str
) -> None:
    found = converted(tmp_path, "vagen", changed(LAKE, {"algorithm.adv_estimator": estimator, TURNS: 0.9}))
    advantage = found.composed.experiment.algorithm.advantage.model_dump()
    assert (advantage["name"], advantage.get("turn_value", "first")) == (name, "first")
    if name != "gae":
        assert advantage["turn_gamma" if name == "bi_level_gae" else "gamma"] == 0.9
    assert translated(found, "vagen").lost == {}


def test_the_comparison_of_turn_returns_is_gigpo(tmp_path: Path) -> None:
    tree = {"algorithm.adv_estimator": "turn_update_grpo", "algorithm.turn_advantage_weight": 0.0, TURNS: 0.9}
    found = converted(tmp_path, "vagen", changed(LAKE, tree | {"algorithm.use_std_normalization": True}))
    assert found.composed.experiment.algorithm.advantage.model_dump() == {
        "name": "gigpo",
        "compare": "turns",
        "whiten": True,
        "turn_gamma": 0.9,
        "episode_weight": 1.0,
        "turn_weight": 0.0,
        "normalize_by_std": True,
    }
    assert translated(found, "vagen").lost == {}


def test_a_section_may_only_train_or_only_validate(tmp_path: Path) -> None:
    sizes = {"lake.test_size": 0, "env1.train_size": 0}
    found = converted(tmp_path, "vagen", changed(MIXED, sizes))
    lake, boxes = sorted(found.composed.experiment.run_envs, key=lambda one: one.config.name)
    assert (lake.share > 0, lake.validation_episodes, boxes.share, boxes.validation_episodes) == (True, 0, 0.0, 512)
    assert translated(found, "vagen").lost == {}
    for size in ("train_size", "test_size"):
        with pytest.raises(ConfigError, match=f"env1.{size} = 0 .*no environment has start states"):
            converted(tmp_path, "vagen", changed(LAKE, {f"env1.{size}": 0}))


def test_each_key_has_a_row_in_these_tables() -> None:
    documented = {row.key for reference in DIALECTS["vagen"].references for row in reference.load()}
    own = {row.key for row in env_keys(ENVS_WITH_KEYS) if row.state == "honoured"}
    tested = {row[0].replace("boxes.", "env1.") for _, _, row in CASES} | FOLLOWERS.keys()
    assert documented | own == tested


def test_the_envs_own_keys_feed_native_ones() -> None:
    names = {key.name for key in keys()}
    assert all(set(row.native) <= names for row in env_keys(ENVS_WITH_KEYS))


FAULTS: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (
        LAKE,
        {f"{ACTOR}.ppo_mini_batch_size": 48, f"{ACTOR}.strategy": "megatron"},
        ("ppo_mini_batch_size = 48", "128 episodes", "n_trajectory = 8", "=32"),
    ),
    (
        LAKE,
        {"data.max_trajectory_length": 1000},
        ("max_trajectory_length = 1000", "max_prompt_length = 1024", "max_response_length = 648", "length=1672"),
    ),
    (LAKE, {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3}, ("the 4 sequences that one GPU has", "per_gpu=2")),
    (LAKE, {"critic.ppo_micro_batch_size_per_gpu": 3}, ("critic.ppo_micro_batch_size_per_gpu = 3", "per_gpu=2")),
    (LAKE, {"trainer.n_gpus_per_node": 3}, ("data.train_batch_size = 16", "3 GPUs", "train_batch_size=15")),
    (LAKE, {f"{ROLLOUT}.tensor_model_parallel_size": 3}, ("must divide the 8 GPUs",)),
    (LAKE, {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 1000}, ("1800 tokens", "=1800")),
    (LAKE, {"env1.env_name": "chess"}, ("env1.env_name = 'chess'", "must be one of", "blackjack")),
    (
        CARDS,
        {f"{ENV}.max_actions_per_step": 2},
        ("max_actions_per_step = 2", "one action per response", "max_actions_per_step=1"),
    ),
    (LAKE, {f"{ENV}.sise": 5}, ("unknown key env1.env_config.sise", "did you mean env1.env_config.size")),
    (
        LAKE,
        {f"{ENV}.use_state_reward": True},
        ("prompt_format = 'free_think'", "prompt_format=grounding_worldmodeling"),
    ),
    (LAKE, {"env1.env_name": "frozenlake", f"{ENV}.use_state_reward": True}, ("prompt_format = 'free_think'",)),
    (PUZZLE, {"boxes.env_config.num_boxs": 5}, ("did you mean boxes.env_config.num_boxes",)),
    (LAKE, {f"{ENV}.size": "large"}, ("env1.env_config.size = 'large'", "an integer")),
    (LAKE, {f"{ACTOR}.optim.total_training_steps": 7}, ("total_training_steps = 7", "total_training_steps = 300")),
    (
        LAKE,
        {"trainer.total_training_steps": None, "env1.train_size": 8},
        ("env1.train_size = 8", "train_batch_size = 16", "train_size=16"),
    ),
    (
        {"rollout_manager": {"max_turns": 3}},
        {"data.train_files": "data/puzzle/train.parquet"},
        ("data.train_files = 'data/puzzle/train.parquet'", "env_config.yaml"),
    ),
]


@pytest.mark.parametrize(
    ("size", "batches"),
    # 48 + 48 + 32 of 128 episodes; one update with all of them
    [(48, (1, 48)), (256, (1, None)), (32, (4, None))],
)
def test_mini_batches_are_refused_that_vagens_workers_split(
    tmp_path: Path, size: int, batches: tuple[int, int | None]
) -> None:
    """`dp_actor.py` of VAGEN's verl has `batch.split(ppo_mini_batch_size)`, and its trainer compares no sizes."""
    training = converted(
        tmp_path, "vagen", changed(LAKE, {f"{ACTOR}.ppo_mini_batch_size": size})
    ).composed.experiment.training
    assert (training.mini_batches, training.mini_batch_sequences) == batches


@pytest.mark.parametrize(("plain", "changes", "words"), FAULTS, ids=[next(iter(one[1])) for one in FAULTS])
def test_keys_that_contradict_each_other_are_told(
    tmp_path: Path, plain: dict[str, Any], changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, "vagen", changed(plain, changes))
    for word in words:
        assert word in str(error.value)


HERE = {
    "env1": {"env_name": "frozenlake", "env_config": {"render_mode": "text", "size": 5}, "test_size": 64},
    "algorithm": {"adv_estimator": "bi_level_gae", "high_level_gamma": 0.95, "kl_ctrl": {"kl_coef": 0.001}},
    "data": {"train_files": "data/lake/train.parquet", "val_files": "data/lake/test.parquet", "train_batch_size": 8},
    "actor_rollout_ref": {
        "model": {"path": "models/tiny", "enable_gradient_checkpointing": True, "use_remove_padding": True},
        "actor": {"ppo_mini_batch_size": 16, "ppo_micro_batch_size_per_gpu": 4, "use_kl_loss": False},
        "rollout": {"name": "hf", "log_prob_micro_batch_size_per_gpu": 4, "temperature": 0.7, "top_p": 0.95},
        "ref": {"log_prob_micro_batch_size_per_gpu": 4},
    },
    "critic": {"optim": {"lr": 1e-5}, "model": {"path": "models/tiny"}, "ppo_micro_batch_size_per_gpu": 4},
    "trainer": {"logger": ["console"], "project_name": "vagen", "experiment_name": "lake", "n_gpus_per_node": 1}
    | {"nnodes": 1, "save_freq": 50, "test_freq": 10, "total_training_steps": 60, "val_before_train": True},
    "rollout_manager": {"max_turns": 3, "window_size": 5, "use_multi_turn_reward": True, "use_loss_mask": True}
    | {"use_gae_mask": True, "n_trajectory": 4},
}


@pytest.mark.parametrize("env", ["frozenlake", "sokoban"])
def test_a_run_in_text_that_this_version_can_do_waits_for_nothing(tmp_path: Path, env: str) -> None:
    tree = changed(HERE, {"env1.env_name": env})
    if env == "sokoban":
        tree["env1"]["env_config"] = {"render_mode": "text", "dim_room": [6, 6], "num_boxes": 1}
    assert converted(tmp_path, "vagen", tree).unsupported == ()
    run = load_config(config_from_tree(tree), DIALECTS["vagen"]).experiment
    assert (run.env.name, run.training.steps, run.training.mini_batches, run.data) == (env, 60, 2, None)


def test_svg_has_its_own_defaults_and_shows_images(tmp_path: Path) -> None:
    found = converted(tmp_path, "vagen", changed(PICTURES, {f"{ENV}.structural_weight": 10.0}))
    run = found.composed.experiment
    assert found.unsupported == ()
    assert (run.env.name, run.rollout.max_actions_per_turn, run.rollout.action_separator) == ("svg", 1, "~~")
    assert run.rollout.thoughts == "grounding_worldmodeling"
    fixed = {"render": "vision", "accumulate_scores": True, "pixel_weight": 0.0, "dino_weight": 0.0}
    assert {key: natively(found, f"env.{key}") for key in fixed} == fixed
    with pytest.raises(ConfigError, match=r"render_mode = 'text'.*shows images"):
        converted(tmp_path, "vagen", changed(PICTURES, {f"{ENV}.render_mode": "text"}))


def test_a_run_with_svg_and_a_lake_keeps_the_options_of_each(tmp_path: Path) -> None:
    tree = {"art": {"env_name": "svg", "env_config": {"split": "test"}}, "lake": {"env_name": "frozenlake"}}
    both = {**tree, "rollout_manager": {"max_turns": 2}}
    shared = {"art.env_config.prompt_format": "free_think"}
    found = converted(tmp_path, "vagen", changed(both, shared))
    assert natively(found, "envs.art.env.dataset").endswith("/test")
    assert natively(found, "envs.art.action_separator") == "~~"
    assert (natively(found, "envs.lake.action_separator"), natively(found, "envs.lake.env.render")) == (",", "text")


@pytest.mark.proves("vagen", "env1.env_name")
@pytest.mark.parametrize(
    ("env", "turn", "separator", "form"), [("navigation", 5, ",", "strict"), ("primitive_skill", 2, "|", "whole")]
)
def test_envs_with_a_body_have_vagens_own_defaults(
    tmp_path: Path, env: str, turn: int, separator: str, form: str
) -> None:
    converted_config = converted(tmp_path, "vagen", changed(LAKE, {"env1.env_name": env}))
    run = converted_config.composed.experiment
    assert (run.env.name, run.env.model_dump()["render"], run.rollout.thoughts) == (
        env,
        "vision",
        "grounding_worldmodeling",
    )
    assert (run.rollout.max_actions_per_turn, run.rollout.action_separator) == (turn, separator)
    assert (run.rollout.ignore_case, run.rollout.response_format) == (True, form)
    assert run.rollout.format_reward == 0.5
    assert converted_config.unsupported == ()
    assert translated(converted_config, "vagen").lost == {}


@pytest.mark.proves("vagen", "env1.env_name")
@pytest.mark.parametrize(("env", "penalty"), [("blackjack", -0.1), ("alfworld", 0.0)])
def test_cards_and_household_tasks_have_vagens_own_defaults(tmp_path: Path, env: str, penalty: float) -> None:
    converted_config = converted(tmp_path, "vagen", changed(LAKE, {"env1.env_name": env}))
    run = converted_config.composed.experiment
    assert (run.env.name, run.env.model_dump()["render"]) == (env, "vision")
    assert (run.rollout.max_actions_per_turn, run.rollout.format_reward) == (1, 0.5)
    assert (run.rollout.format_penalty, run.rollout.ignore_case) == (penalty, False)
    assert converted_config.unsupported == ()
    assert translated(converted_config, "vagen").lost == {}


def test_only_cards_take_a_penalty_for_an_invalid_action(tmp_path: Path) -> None:
    found = converted(tmp_path, "vagen", changed(MIXED, {"cards": {"env_name": "blackjack"}}))
    penalties = {env.name: env.rollout.format_penalty for env in found.composed.experiment.run_envs}
    assert penalties.pop("cards") == -0.1
    assert set(penalties.values()) == {0.0}
    assert translated(found, "vagen").lost == {}


def test_an_env_with_a_body_beside_another_keeps_its_rules(tmp_path: Path) -> None:
    house = {"env_name": "navigation", "env_config": {"prompt_format": "free_think", "resolution": 32}}
    found = converted(tmp_path, "vagen", changed(MIXED, {"house": house}))
    rules = {env.name: env.rollout for env in found.composed.experiment.run_envs}
    assert (rules["house"].response_format, rules["house"].ignore_case) == ("strict", True)
    assert (rules["lake"].response_format, rules["lake"].ignore_case) == ("whole", False)
    assert (rules["house"].max_actions_per_turn, rules["lake"].max_actions_per_turn) == (5, 3)
    assert translated(found, "vagen").lost == {}


def test_the_references_own_values_fit_together(tmp_path: Path) -> None:
    run = converted(tmp_path, "vagen", changed({"rollout_manager": {}}, DOCUMENTED)).composed.experiment
    assert run.training.mini_batches == 4
    assert run.rollout.window_size == 4
    assert run.algorithm.kl is not None
    assert (run.algorithm.kl.apply_to, run.algorithm.kl.estimator, run.algorithm.kl.coefficient) == (
        "reward",
        "k1",
        0.001,
    )


def test_a_window_counts_the_observation_that_is_answered(tmp_path: Path) -> None:
    found = converted(tmp_path, "vagen", changed(LAKE, {f"{MANAGER}.window_size": None}))
    assert natively(found, "rollout.window_size") is None
    assert translated(found, "vagen").lost == {}


@pytest.mark.parametrize(("estimator", "name", "own"), [("gae", "gae", False), ("masked_gae", "gae", True)])
def test_gae_goes_over_the_envs_words_and_masked_gae_leaps_over_them(
    tmp_path: Path, estimator: str, name: str, own: bool
) -> None:
    found = converted(tmp_path, "vagen", changed(LAKE, {"algorithm.adv_estimator": estimator}))
    assert natively(found, "algorithm.advantage.name") == name
    assert natively(found, "algorithm.advantage_over_response_tokens") is own
    assert translated(found, "vagen").lost == {}


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"algorithm.kl_ctrl.kl_coef": 0}, None),
        ({"algorithm.use_kl_in_reward": False}, None),
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0}, "reward"),
        (IN_LOSS, "loss"),
        ({}, "reward"),
    ],
)
def test_the_divergence_is_a_penalty_unless_the_loss_has_it(
    tmp_path: Path, changes: dict[str, Any], place: str | None
) -> None:
    found = converted(tmp_path, "vagen", changed(LAKE, changes))
    kl = found.composed.experiment.algorithm.kl
    assert (kl.apply_to if kl else None) == place
    assert translated(found, "vagen").lost == {}


def test_a_critics_budget_is_its_own(tmp_path: Path) -> None:
    both = {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2, "critic.ppo_micro_batch_size_per_gpu": 2}
    for changes in (both, {**both, f"{ACTOR}.use_dynamic_bsz": True}):
        assert translated(converted(tmp_path, "vagen", changed(LAKE, changes)), "vagen").lost == {}


TURNS, GAMMA, LAM = "algorithm.high_level_gamma", "algorithm.gamma", "algorithm.lam"
ESTIMATORS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("bi_level_gae", {"gamma": 0.9, "lam": 0.8, "turn_gamma": 0.7, "turn_lam": 0.8}, set()),
    ("masked_gae", {"gamma": 0.9, "lam": 0.8}, {TURNS}),
    ("gae", {"gamma": 0.9, "lam": 0.8}, {TURNS}),
    ("turn_wise_gae", {"gamma": 0.7, "lam": 0.8}, {GAMMA}),
    ("grpo", {"normalize_by_std": True}, {TURNS, GAMMA, LAM}),
    ("mine.py:own", {"options": {"gamma": 0.9, "lam": 0.8, "turn_gamma": 0.7, "turn_lam": 0.8}}, set()),
]


@pytest.mark.parametrize(("written", "options", "idle"), ESTIMATORS, ids=[one[0] for one in ESTIMATORS])
def test_an_estimator_has_its_own_discounts_and_idle_ones_are_told(
    tmp_path: Path, written: str, options: dict[str, Any], idle: set[str]
) -> None:
    keys = {"algorithm.adv_estimator": written, TURNS: 0.7, GAMMA: 0.9, LAM: 0.8}
    found = converted(tmp_path, "vagen", changed(LAKE, keys))
    assert found.composed.experiment.algorithm.advantage.model_dump().items() >= options.items()
    told = {remark.split(" = ")[0] for remark in found.composed.remarks if "has no effect" in remark}
    assert told == idle
    assert translated(found, "vagen").lost == {}


def test_what_concerns_prompts_from_files_waits_where_envs_are_played(tmp_path: Path) -> None:
    asked = {"data.shuffle": False, "reward_model.enable": True, "data.prompt_key": "prompt"}
    waits = {fault.key for fault in converted(tmp_path, "vagen", changed(LAKE, asked)).unsupported}
    assert {"data.shuffle", "reward_model.enable"} <= waits
    assert "data.prompt_key" not in waits


@pytest.mark.proves("vagen", "data.truncation", "data.image_key")
@pytest.mark.parametrize("truncation", ["error", "left", "right", "middle"])
def test_no_sample_is_truncated_since_episodes_end_before_the_limit(tmp_path: Path, truncation: str) -> None:
    """Whatever the truncation, prompt and response together have at most `data.max_trajectory_length` tokens."""
    keys = {"data.truncation": truncation, "data.image_key": "pictures", "data.max_trajectory_length": 2400}
    found = converted(tmp_path, "vagen", changed(LAKE, keys))
    assert found.unsupported == ()
    limits = [natively(found, f"rollout.max_{part}_tokens") for part in ("prompt", "response")]
    assert sum(limits) == 2400
    assert translated(found, "vagen").lost == {}


def test_replies_can_go_without_thoughts(tmp_path: Path) -> None:
    found = converted(tmp_path, "vagen", changed(LAKE, {f"{ENV}.prompt_format": "no_think"}))
    assert (natively(found, "rollout.think"), natively(found, "rollout.thoughts")) == (False, None)
    assert translated(found, "vagen").lost == {}


def test_start_states_are_played_again_where_there_are_too_few(tmp_path: Path) -> None:
    found = converted(tmp_path, "vagen", changed(LAKE, {"env1.train_size": 1000}))
    assert natively(found, "training.start_states") == 1000
    assert translated(found, "vagen").lost == {}
    enough = converted(tmp_path, "vagen", changed(LAKE, {"env1.train_size": 4800}))
    assert natively(enough, "training.start_states") is None


def test_an_older_name_of_logged_episodes_is_read_as_the_documented_one(tmp_path: Path) -> None:
    found = converted(tmp_path, "vagen", changed(LAKE, {"trainer.log_val_generations": 3}))
    assert natively(found, "tracking.validation_generations") == 3
    assert any(remark.startswith("trainer.log_val_generations (") for remark in found.composed.remarks)


VERLS: list[tuple[str, Any, str, Any]] = [
    (f"{ACTOR}.entropy_coeff", 0.001, "algorithm.entropy_coefficient", 0.001),
    (f"{ACTOR}.clip_ratio", 0.3, "algorithm.loss.clip_high", 0.3),
    (f"{ACTOR}.grad_clip", 0.5, "actor.optimizer.max_grad_norm", 0.5),
    (f"{ACTOR}.ppo_epochs", 2, "training.epochs", 2),
    (f"{ACTOR}.use_dynamic_bsz", True, "actor.budget.tokens", 16384),
    (f"{ACTOR}.optim.lr_warmup_steps", 5, "actor.optimizer.warmup_steps", 5),
    ("algorithm.gamma", 0.99, "algorithm.advantage.gamma", 0.99),
    ("algorithm.lam", 0.95, "algorithm.advantage.lam", 0.95),
    (f"{ROLLOUT}.val_kwargs.do_sample", True, "validation.sampling.do_sample", True),
    ("critic.optim.lr_warmup_steps", 3, "critic.optimizer.warmup_steps", 3),
    ("critic.model.enable_activation_offload", True, "critic.memory.offload_activations", True),
    ("trainer.default_local_dir", "runs/lake", "output_dir", "runs"),
    ("trainer.resume_mode", "disable", "resume", "never"),
    ("data.shuffle", False, "data.shuffle", False),
    ("custom_reward_function.path", "rules.py", "reward.function", "rules.py:compute_score"),
]


@pytest.mark.parametrize(("key", "value", "native", "expected"), VERLS, ids=[one[0] for one in VERLS])
def test_verls_keys_count_below_its_own(tmp_path: Path, key: str, value: Any, native: str, expected: Any) -> None:
    found = converted(tmp_path, "vagen", changed(LAKE, {key: value}))
    assert natively(found, native) == expected
    assert translated(found, "vagen").lost == {}


def test_a_run_of_ragen_can_be_said_in_vagens_words(tmp_path: Path) -> None:
    ragen = converted(tmp_path, "ragen", {"rl_or_sft": "rl", "model": {"base_model": "some/model"}})
    said = translated(ragen, "vagen")
    assert said.tree["env1"]["env_name"] == "sokoban"
    assert said.tree["actor_rollout_ref"]["model"]["path"] == "some/model"
    assert "training.groups_per_step" not in said.lost


def test_vagen_plays_envs_and_nothing_else(tmp_path: Path) -> None:
    prompts = converted(tmp_path, "verl", {"actor_rollout_ref": {"model": {"path": "some/model"}}})
    with pytest.raises(ConfigError, match="no environment prompts"):
        translated(prompts, "vagen")


MIXED_ENVS: dict[str, Any] = {
    "lake": {"env_name": "frozenlake", "env_config": {"size": 5}, "train_size": 6000, "test_size": 30},
    "env1": {"env_name": "sokoban", "env_config": {"dim_room": [6, 7], "render_mode": "text"}, "train_size": 2000},
}
MIXED = MIXED_ENVS | changed({"rollout_manager": {"max_turns": 3}}, DOCUMENTED | {"trainer.total_training_steps": 100})


def test_several_sections_are_one_run_of_several_envs(tmp_path: Path) -> None:
    found = converted(tmp_path, "vagen", MIXED)
    lake, boxes = sorted(found.composed.experiment.run_envs, key=lambda one: one.config.name)
    assert (lake.name, lake.share, lake.validation_episodes) == ("lake", 3.0, 30)
    assert (boxes.name, boxes.share, boxes.validation_episodes) == ("env1", 1.0, 512), "of 8000 start states, 2000"
    assert (lake.config.model_dump()["size"], boxes.config.model_dump()["width"]) == (5, 7)
    assert lake.rollout.max_actions_per_turn == boxes.rollout.max_actions_per_turn == 3
    assert natively(found, "envs.lake.start_states") is None
    assert found.composed.provenance["envs.lake.share"] == "lake.train_size: given.yaml:1"
    assert translated(found, "vagen").lost == {}


def test_of_several_envs_a_section_leaves_what_it_does_not_say_to_the_reference(tmp_path: Path) -> None:
    """And not to the section that is called as the reference's."""
    lakes = {"env1": {"env_name": "frozenlake", "env_config": {"size": 7}, "train_size": 500}}
    found = converted(tmp_path, "vagen", {**MIXED, **lakes, "lake": {"env_name": "frozenlake"}})
    assert natively(found, "envs.lake.env.size") == 4
    assert (natively(found, "envs.lake.share"), natively(found, "envs.env1.share")) == (20.0, 1.0)
    assert translated(found, "vagen").lost == {}


def test_mixed_envs_that_play_more_than_there_is_begin_again(tmp_path: Path) -> None:
    found = converted(tmp_path, "vagen", changed(MIXED, {"trainer.total_training_steps": 1000}))
    assert (natively(found, "envs.lake.start_states"), natively(found, "envs.env1.start_states")) == (6000, 2000)
    assert translated(found, "vagen").lost == {}


def test_steps_are_passes_over_the_start_states_of_all_envs(tmp_path: Path) -> None:
    passes = {"trainer.total_training_steps": None, "trainer.total_epochs": 2}
    assert natively(converted(tmp_path, "vagen", changed(MIXED, passes)), "training.steps") == 8000 // 16 * 2


def test_envs_that_are_played_by_other_rules_keep_their_own(tmp_path: Path) -> None:
    own = {"lake.env_config.max_actions_per_step": 1, "env1.env_config.prompt_format": "no_think"}
    found = converted(tmp_path, "vagen", changed(MIXED, {**own, "lake.env_config.action_sep": "|"}))
    lake, boxes = sorted(found.composed.experiment.run_envs, key=lambda one: one.config.name)
    assert (lake.rollout.max_actions_per_turn, boxes.rollout.max_actions_per_turn) == (1, 3)
    assert (lake.rollout.think, boxes.rollout.think) == (True, False)
    assert (lake.rollout.action_separator, boxes.rollout.action_separator) == ("|", ",")
    assert translated(found, "vagen").lost == {}


MIXED_FAULTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"lake.env_config.sise": 5}, ("unknown key lake.env_config.sise", "did you mean lake.env_config.size?")),
    (
        {"env1.env_name": "blackjack", "env1.env_config": {"max_actions_per_step": 3}},
        ("max_actions_per_step = 3", "one action per response"),
    ),
    ({"lake.env_config.format_reward": 0.0}, ("format_reward", "lake.env_config.format_reward = 0.0", "the same")),
    ({"lake.env_config.prompt_format": "grounding"}, ("prompt_format", "the same for all environments", "grounding")),
    (
        {"lake.train_size": 5, "env1.train_size": 6, "trainer.total_training_steps": None},
        ("together have 11", "env1.train_size=11"),
    ),
]


@pytest.mark.parametrize(("changes", "words"), MIXED_FAULTS, ids=[next(iter(one[0])) for one in MIXED_FAULTS])
def test_what_several_envs_cant_be_is_told(tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, "vagen", changed(MIXED, changes))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("dialect", ["verl", "rlinf", "roll"])
def test_a_format_with_one_environment_refuses_several_by_name(tmp_path: Path, dialect: str) -> None:
    with pytest.raises(ConfigError, match="have a single environment, and this run has lake, env1") as error:
        translated(converted(tmp_path, "vagen", MIXED), dialect)
    assert error.value.key == "envs"


def test_an_option_of_another_environment_has_no_effect_and_says_so(tmp_path: Path) -> None:
    """As `alf_config_path` of VAGEN's examples with primitive skills."""
    alone = converted(tmp_path, "vagen", changed(TABLE, {f"{ENV}.alf_config_path": "alf-config.yaml"}))
    mixed = converted(tmp_path, "vagen", changed(MIXED, {"lake.env_config.dim_room": [6, 6]}))
    for found, message in ((alone, "primitive_skill has no such option"), (mixed, "frozenlake has no such option")):
        assert [message in remark for remark in found.composed.remarks if "no such option" in remark] == [True]


def test_an_environment_that_this_version_lacks_waits_with_any_options(tmp_path: Path) -> None:
    tree = changed(LAKE, {"env1.env_name": "svgdino", f"{ENV}.dino_only": True, f"{ENV}.split": "train"})
    (problem,) = converted(tmp_path, "vagen", tree).unsupported
    assert (problem.key, str(Capability.TEXT_ENVS) in problem.message) == ("env1.env_name", True)


@pytest.mark.parametrize(
    ("plain", "key", "value", "capability"),
    [
        (PUZZLE, "boxes.env_config.max_action_penalty", -0.1, Capability.REWARD_SHAPING),
        (PUZZLE, "boxes.max_action_length", 5, Capability.START_STATE_FILTERS),
        (PICTURES, f"{ENV}.dino_only", True, Capability.REWARD_SHAPING),
        (LAKE, "algorithm.adv_estimator", "multi_turn_gae", Capability.MULTI_TURN_GAE),
    ],
)
def test_a_key_of_earlier_releases_waits(
    tmp_path: Path, plain: dict[str, Any], key: str, value: Any, capability: Capability
) -> None:
    (problem,) = converted(tmp_path, "vagen", changed(plain, {key: value})).unsupported
    assert (problem.key, str(capability) in problem.message) == (key, True)


def test_the_only_episode_of_a_start_state_has_its_reward_as_advantage(tmp_path: Path) -> None:
    """VAGEN takes mean 0 and standard deviation 1 of a single score."""
    single = {"algorithm.adv_estimator": "grpo", f"{MANAGER}.n_trajectory": 1, f"{ACTOR}.ppo_mini_batch_size": 16}
    found = converted(tmp_path, "vagen", changed(LAKE, single))
    assert natively(found, "algorithm.advantage.name") == "arpo"
    assert any("nothing to compare" in remark for remark in found.composed.remarks)


def test_a_divergence_in_the_loss_has_its_reference_policy(tmp_path: Path) -> None:
    found = converted(tmp_path, "vagen", changed(LAKE, {**IN_LOSS, f"{REF}.use_ref": False}))
    assert natively(found, "algorithm.kl.apply_to") == "loss"
    assert any("use_ref = false" in remark for remark in found.composed.remarks)


def test_a_env_that_is_called_as_a_section_of_vagens_is_refused(tmp_path: Path) -> None:
    run = load_experiment(None, ["envs.trainer={}", "envs.lake={}"])
    with pytest.raises(ConfigError, match=r"envs\.trainer: VAGEN has another section"):
        translate(run, DIALECTS["vagen"])
