"""If these fail, an RLinf file from before release 0.1 is refused, or read as another run than RLinf made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively

from quintet.config.capabilities import Capability
from quintet.errors import ConfigError

GROUPS = "${multiply:${algorithm.group_size}, ${algorithm.num_group_envs}}"
STEPS = "${int_div:${env.train.max_episode_steps}, ${actor.model.num_action_chunks}}"
SIMULATOR: dict[str, Any] = {
    "simulator_type": "maniskill",
    "group_size": "${algorithm.group_size}",
    "max_episode_steps": "${algorithm.max_episode_steps}",
}
RUN: dict[str, Any] = {
    "cluster": {"num_nodes": 1, "num_gpus_per_node": 4, "component_placement": {"actor,env,rollout": "all"}},
    "runner": {"task_type": "embodied", "val_check_interval": -1},
    "algorithm": {
        "adv_type": "embodied_grpo",
        "loss_type": "embodied_grpo",
        "reward_type": "step_level",
        "group_size": 8,
        "num_group_envs": 16,
        "n_chunk_steps": STEPS,
        "n_eval_chunk_steps": 20,
        "max_episode_steps": 80,
    },
    "env": {
        "train": {**SIMULATOR, "num_group": "${algorithm.num_group_envs}", "num_envs": GROUPS},
        "eval": {**SIMULATOR, "num_group": 20, "group_size": 1, "only_eval": True},
    },
    "rollout": {"model_dir": "some/policy", "precision": "bf16", "pipeline_stage_num": 1},
    "actor": {
        "checkpoint_load_path": "some/policy",
        "global_batch_size": 320,
        "model": {"model_name": "openvla_oft", "num_action_chunks": 8},
    },
}
TEXT: dict[str, Any] = {
    "runner": {"task_type": "math"},
    "rollout": {"model_dir": "some/model", "model_arch": "qwen2.5", "precision": "fp16"},
    "actor": {"model": {"precision": "bf16"}},
}


def run_of(tmp_path: Path, changes: dict[str, Any], plain: dict[str, Any] = RUN) -> Any:
    return converted(tmp_path, "rlinf", changed(plain, changes)).composed.experiment


@pytest.mark.proves("rlinf", "algorithm.num_group_envs", "algorithm.n_chunk_steps", "algorithm.n_eval_chunk_steps")
def test_groups_and_chunks_are_environments_and_actions(tmp_path: Path) -> None:
    """16 groups of 8 are 128 environments; 80 actions are 10 chunks of 8, of 128 environments 1280 samples, 4 optimizer
    steps of 320. 20 chunks of an evaluation are 160 actions."""
    run = run_of(tmp_path, {})
    assert (run.env.environments, run.training.groups_per_step, run.training.samples_per_group) == (128, 16, 8)
    assert (run.env.steps_per_epoch, run.env.max_steps, run.training.mini_batches) == (80, 80, 4)
    assert run.validation.simulator.steps_per_epoch == 160
    assert (run.algorithm.advantage.name, run.algorithm.loss.name, run.algorithm.reward_level) == (
        "grpo",
        "ppo",
        "action",
    )
    assert run_of(tmp_path, {"algorithm.n_chunk_steps": 20}).training.mini_batches == 8


@pytest.mark.proves("rlinf", "num_group")
def test_groups_alone_say_how_many_environments_there_are(tmp_path: Path) -> None:
    """Before October 2025, ManiSkill's files had no num_envs, and the step limit in init_params."""
    tree = changed(RUN, {"env.train.init_params": {"max_episode_steps": 40}})
    del tree["env"]["train"]["num_envs"], tree["env"]["train"]["max_episode_steps"]
    found = converted(tmp_path, "rlinf", tree)
    run: Any = found.composed.experiment
    assert (run.env.environments, run.env.max_steps, run.training.groups_per_step) == (128, 40, 16)
    assert any("num_group = " in remark and "env.train.total_num_envs" in remark for remark in found.composed.remarks)


@pytest.mark.parametrize(
    ("names", "advantage", "loss"),
    [
        (("embodied_gae", "embodied_ppo"), "gae", "ppo"),
        (("ppo", "ppo"), "gae", "ppo"),
        (("grpo", "grpo"), "grpo", "ppo"),
    ],
)
def test_former_names_of_estimators_and_losses_are_read(
    tmp_path: Path, names: tuple[str, str], advantage: str, loss: str
) -> None:
    run = run_of(tmp_path, {"algorithm.adv_type": names[0], "algorithm.loss_type": names[1]})
    assert (run.algorithm.advantage.name, run.algorithm.loss.name, run.needs_critic) == (
        advantage,
        loss,
        advantage == "gae",
    )


@pytest.mark.proves("rlinf", "algorithm.sampling_params.use_greedy")
@pytest.mark.parametrize("greedy", [True, False])
def test_use_greedy_is_the_opposite_of_do_sample(tmp_path: Path, greedy: bool) -> None:
    assert run_of(tmp_path, {"algorithm.sampling_params.use_greedy": greedy}).rollout.do_sample is not greedy


@pytest.mark.proves("rlinf", "cluster.num_gpus_per_node")
def test_the_number_of_gpus_of_a_node_counts(tmp_path: Path) -> None:
    assert run_of(tmp_path, {}).placement.devices_per_node == 4
    with pytest.raises(ConfigError, match="there are 4 devices"):
        run_of(tmp_path, {"cluster.component_placement": {"actor,env,rollout": "0-7"}})


@pytest.mark.parametrize(
    ("key", "value", "capability"),
    [
        ("algorithm.require_values", False, Capability.ROBOT_ALGORITHMS),
        ("actor.model.ckpt_path", "weights.pt", Capability.PICKLED_WEIGHTS),
        ("actor.model.vh_mode", "a6", Capability.POLICIES),
    ],
)
def test_what_does_not_exist_here_waits(tmp_path: Path, key: str, value: Any, capability: Capability) -> None:
    valued = {"algorithm.adv_type": "embodied_gae", "algorithm.loss_type": "embodied_ppo"}
    found = converted(tmp_path, "rlinf", changed(RUN, {**valued, key: value}))
    assert any(problem.key == key and capability in problem.message for problem in found.unsupported)


WITHOUT_EFFECT = {
    "actor.checkpoint_save_path": "../results",
    "algorithm.n_eval_steps": 80,
    "algorithm.shuffle_samples": False,
    "algorithm.rollout_micro_batch_size": 4,
    "actor.model.micro_batch_size": 4,
    "actor.model.use_wrist_image": True,
    "actor.model.is_vla_model": False,
    "env.train.use_wrist_image": True,
    "env.train.num_images_in_input": 2,
}
REFERRED = {
    "algorithm.max_episode_steps": ("env.train.max_episode_steps", 160, "env.max_steps", 160),
    "algorithm.use_fixed_reset_state_ids": (
        "env.train.use_fixed_reset_state_ids",
        False,
        "env.fixed_start_states",
        False,
    ),
    "algorithm.use_ordered_reset_state_ids": (
        *("env.train.use_ordered_reset_state_ids", True, "env.start_state_order", "ordered"),
    ),
    "algorithm.specific_reset_id": ("env.train.specific_reset_id", 7, "env.start_state", 7),
}


@pytest.mark.proves("rlinf", *(key.removeprefix("env.train.") for key in WITHOUT_EFFECT))
def test_keys_without_effect_change_nothing_and_the_reason_is_given(tmp_path: Path) -> None:
    found = converted(tmp_path, "rlinf", changed(RUN, WITHOUT_EFFECT))
    assert found.composed.experiment == run_of(tmp_path, {})
    remarks = [remark for remark in found.composed.remarks if "has no effect here" in remark]
    assert [key for key in WITHOUT_EFFECT if not any(remark.startswith(f"{key} = ") for remark in remarks)] == []


@pytest.mark.proves("rlinf", *REFERRED)
@pytest.mark.parametrize("key", REFERRED)
def test_a_value_counts_where_an_environment_refers_to_it(tmp_path: Path, key: str) -> None:
    env_key, value, native, expected = REFERRED[key]
    simulator = {"env.train.simulator_type": "libero", "env.eval.simulator_type": "libero"}
    changes = {**simulator, key: value, env_key: f"${{{key}}}"}
    assert natively(converted(tmp_path, "rlinf", changed(RUN, changes)), native) == expected


@pytest.mark.parametrize(
    ("alias", "value", "native", "expected"),
    [
        ("actor.model.gradient_checkpointing", True, "actor.gradient_checkpointing", True),
        ("actor.model.sharding_strategy", "shard_grad_op", "actor.sharding.policy", "shard_grad_op"),
        ("env.train.only_eval", True, "env.start_state_order", "ordered"),
    ],
)
def test_former_names_of_robots_are_read(tmp_path: Path, alias: str, value: Any, native: str, expected: Any) -> None:
    assert natively(converted(tmp_path, "rlinf", changed(RUN, {alias: value})), native) == expected


def test_former_names_on_text_are_read(tmp_path: Path) -> None:
    run = run_of(tmp_path, {}, TEXT)
    assert (run.policy.path, run.policy.kind, run.rollout.engine_options.dtype) == ("some/model", "qwen2.5", "float16")
    initial = {"actor.checkpoint_load_path": "some/checkpoint", "actor.megatron.use_hf_ckpt": False}
    assert run_of(tmp_path, initial, TEXT).actor.megatron.checkpoint == "some/checkpoint"
    greedy = {"algorithm.adv_type": "math_grpo", "algorithm.loss_type": "math_ppo_actor"}
    assert run_of(tmp_path, greedy, TEXT).algorithm.advantage.name == "grpo"


def test_names_that_a_file_leaves_empty_are_those_of_the_reference(tmp_path: Path) -> None:
    """Files that others include, such as those of WideSeek-R1, have no names."""
    empty = {"runner.experiment_name": None, "runner.output_dir": None, "runner.logger.experiment_name": None}
    run = run_of(tmp_path, empty, TEXT)
    assert (run.name, run.output_dir, run.tracking.run_name) == ("grpo-1.5b", "../results", None)
    with pytest.raises(ConfigError, match="names no prompts to train on"):
        run_of(tmp_path, {"data.train_data_paths": None}, TEXT)


def test_gae_without_a_critic_takes_the_rewards(tmp_path: Path) -> None:
    """RLinf sets γ = λ = 1 then, so that the advantage of each token is the reward of its response."""
    run = run_of(tmp_path, {"algorithm.adv_type": "coding_ppo", "critic.use_critic_model": False}, TEXT)
    assert (run.algorithm.advantage.name, run.algorithm.advantage.whiten, run.needs_critic) == ("raw", True, False)


def test_autocast_to_the_type_of_the_weights_is_no_contradiction(tmp_path: Path) -> None:
    backend = {"actor.training_backend": "fsdp", "actor.model.model_path": "some/model"}
    dtypes = {
        "actor.fsdp_config.mixed_precision.param_dtype": "fp16",
        "actor.fsdp_config.mixed_precision.reduce_dtype": "fp16",
    }
    amp = {"actor.fsdp_config.amp.enabled": True, "actor.fsdp_config.amp.precision": "fp16"}
    assert run_of(tmp_path, {**backend, **dtypes, **amp}, TEXT).actor.sharding.autocast == "float16"


def test_ranks_may_share_an_optimizer_step_unevenly(tmp_path: Path) -> None:
    changes = {"cluster.component_placement": {"actor,rollout": "0-6"}, "algorithm.n_minibatches": 4}
    run = run_of(tmp_path, changes, TEXT)
    assert (run.training.mini_batches, run.placement.devices_per_node) == (4, 7)


def test_the_placement_decides_whether_engine_and_learner_share_devices(tmp_path: Path) -> None:
    """RLinf reads no rollout.mode."""
    apart = {"cluster.component_placement": {"actor": "0-1", "env,rollout": "2-3"}, "rollout.mode": "colocate"}
    assert run_of(tmp_path, apart).placement.colocated is False


def test_the_weights_that_count_are_the_learners_or_without_training_the_engines(tmp_path: Path) -> None:
    other = {"rollout.model_dir": "other/policy"}
    found = converted(tmp_path, "rlinf", changed(RUN, other))
    assert found.composed.experiment.policy.path == "some/policy"
    assert any("'other/policy'" in remark and "has no effect" in remark for remark in found.composed.remarks)
    evaluation = {**other, "runner.only_eval": True, "env.eval.num_envs": 20}
    assert run_of(tmp_path, evaluation).policy.path == "other/policy"


@pytest.mark.parametrize("epochs", [-1, 0])
def test_a_run_without_evaluations_may_have_no_epochs_of_them(tmp_path: Path, epochs: int) -> None:
    assert run_of(tmp_path, {"algorithm.eval_rollout_epoch": epochs}).validation.simulator.epochs == 1
