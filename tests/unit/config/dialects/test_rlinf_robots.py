"""If these fail, an RLinf user's own file of a run on a simulator is refused, misread, or partly ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively, translated

from quintet.config.capabilities import Capability
from quintet.config.checks.robots import robot_problems
from quintet.config.compose import load_experiment
from quintet.config.dialects.ledger import load_keys
from quintet.config.plan.run_plan import plan_run
from quintet.config.yaml_writer import dump_config
from quintet.errors import ConfigError

RUN: dict[str, Any] = {
    "runner": {"task_type": "embodied"},
    "algorithm": {"group_size": 4},
    "env": {
        "train": {"total_num_envs": 16, "max_episode_steps": 80},
        "eval": {"total_num_envs": 8, "max_episode_steps": 80},
    },
    "actor": {"model": {"model_path": "some/policy"}},
}
ENV: dict[str, Any] = {"env_type": "maniskill"}
VALUED = {"algorithm.adv_type": "gae", "algorithm.loss_type": "actor_critic"}
STATE = {"actor.model.model_type": "mlp_policy", "actor.model.model_path": ""}
FILTERED = {"algorithm.filter_rewards": True}
COSINE = {"actor.optim.lr_scheduler": "cosine"}
TWIN = {"env.train.env_type": "maniskill", "env.eval.env_type": "maniskill"}
Reached = tuple[str, Any, Any, str, Any] | tuple[str, Any, Any, str, Any, dict[str, Any]]

DECOUPLED = {**VALUED, "algorithm.loss_type": "decoupled_actor_critic"}
KEYS: list[Reached] = [
    ("algorithm.entropy_bonus", 0.005, -1, "algorithm.entropy_coefficient", 0.005),
    ("algorithm.clip_ratio_c", 2.0, 1.0, "algorithm.loss.clip_dual", 2.0, DECOUPLED),
    ("algorithm.update_epoch", 8, 0, "training.epochs", 8),
    ("algorithm.gamma", 0.9, 2, "algorithm.advantage.gamma", 0.9, VALUED),
    ("algorithm.gae_lambda", 0.5, 2, "algorithm.advantage.lam", 0.5, VALUED),
    ("algorithm.clip_ratio_low", 0.1, 1, "algorithm.loss.clip_low", 0.1),
    ("algorithm.clip_ratio_high", 0.28, 0, "algorithm.loss.clip_high", 0.28),
    ("algorithm.value_clip", 0.5, 0, "critic.value_clip", 0.5, VALUED),
    ("algorithm.rewards_lower_bound", 0.5, "x", "algorithm.filter.min_mean", 0.5, FILTERED),
    ("algorithm.rewards_upper_bound", 4.5, "x", "algorithm.filter.max_mean", 4.5, FILTERED),
    ("algorithm.bootstrap_type", "always", "never", "algorithm.bootstrap", "done"),
    ("algorithm.huber_delta", 10.0, 0, "critic.huber_delta", 10.0, VALUED),
    ("algorithm.sampling_params.temperature_train", 1.6, 0, "rollout.temperature", 1.6),
    ("algorithm.sampling_params.temperature_eval", 0.6, "cold", "validation.sampling.temperature", 0.6),
    ("algorithm.sampling_params.temperature_eval", 0.6, "cold", "validation.sampling.do_sample", True),
    ("algorithm.sampling_params.temperature_eval", -1, "cold", "validation.sampling.do_sample", False),
    ("rollout.model.precision", "fp32", "fp8", "policy.dtype", "float32"),
    ("rollout.unnorm_key", "libero", 5, "policy.vla.normalization_key", "libero"),
    ("actor.fsdp_config.gradient_checkpointing", True, 1, "actor.gradient_checkpointing", True),
    ("actor.model.max_prompt_length", 128, 0, "rollout.max_prompt_tokens", 128),
    ("actor.model.obs_dim", 42, 0, "policy.vla.state_dim", 42, STATE),
    ("actor.model.hidden_dim", 64, 0, "policy.vla.hidden_size", 64, STATE),
    ("actor.model.policy_setup", "panda-qpos", 5, "env.options.policy_setup", "panda-qpos", TWIN),
    ("actor.model.policy_setup", "panda-qpos", 5, "validation.simulator.options.policy_setup", "panda-qpos", TWIN),
    ("actor.optim.weight_decay", 0.1, -1, "actor.optimizer.weight_decay", 0.1),
    ("actor.optim.critic_warmup_steps", 3, -1, "critic.warmup_steps", 3, VALUED),
    ("actor.optim.lr_scheduler", "cosine", "stairs", "actor.optimizer.schedule", "cosine"),
    ("actor.optim.min_lr", 5e-5, -1, "actor.optimizer.min_learning_rate_ratio", 0.5, COSINE),
    ("actor.optim.lr_warmup_steps", 10, -2, "actor.optimizer.warmup_steps", 10),
]
TRAINING: list[Reached] = [
    ("max_steps_per_rollout_epoch", 160, 0, "steps_per_epoch", 160),
    ("use_step_penalty", True, 1, "step_penalty", 1.0),
    ("use_ordered_reset_state_ids", True, 1, "start_state_order", "ordered"),
    ("is_eval", True, 1, "start_state_order", "ordered"),
    ("specific_reset_id", 7, -1, "start_state", 7),
    ("reset_gripper_open", False, 1, "options.reset_gripper_open", False),
    ("reward_mode", "raw", "none", "options.reward_mode", "raw"),
    ("wrap_obs_mode", "simple", "none", "options.wrap_obs_mode", "simple"),
    ("use_full_state", True, 1, "options.use_full_state", True),
    ("init_params.id", "PickCube-v1", 5, "task", "PickCube-v1"),
    ("init_params.obs_mode", "state", 5, "options.obs_mode", "state"),
    ("init_params.render_mode", "all", "some", "options.render_mode", "all"),
    ("init_params.sim_backend", "gpu", "tpu", "options.sim_backend", "gpu"),
    ("init_params.sim_config.sim_freq", 500, 0, "options.sim_config.sim_freq", 500),
    ("init_params.sim_config.control_freq", 5, 0, "options.sim_config.control_freq", 5),
    ("init_params.sensor_configs.shader_pack", "default", 5, "options.sensor_configs.shader_pack", "default"),
    ("init_params.sensor_configs.width", 64, 0, "camera_width", 64),
    ("init_params.sensor_configs.height", 64, 0, "camera_height", 64),
    (
        "init_params.human_render_camera_configs.shader_pack",
        "default",
        5,
        "options.human_render_camera_configs.shader_pack",
        "default",
    ),
    ("init_params.human_render_camera_configs.width", 64, 0, "options.human_render_camera_configs.width", 64),
    ("init_params.human_render_camera_configs.height", 64, 0, "options.human_render_camera_configs.height", 64),
    ("init_params.obj_set", "test", "all of them", "options.obj_set", "test"),
    ("init_params.use_multiple_plates", True, 1, "options.use_multiple_plates", True),
]


def _simulator(prefix: str, native: str) -> dict[str, Any]:
    """The simulator that has an option."""
    if native in ("options.reset_gripper_open", "step_penalty", "start_state"):
        return {f"{prefix}env_type": "libero"}
    return {f"{prefix}env_type": "maniskill"} if native.startswith("options.") else {}


ENV_KEYS: list[Reached] = [
    *(
        (name, value, bad, f"env.{native}", expected, _simulator("", native))
        for name, value, bad, native, expected, *_ in TRAINING
    ),
    ("rollout_epoch", 2, 0, "env.epochs", 2),
    ("enable_offload", True, 1, "placement.offload_envs", True),
]
EVALUATION: list[Reached] = [
    (f"env.eval.{name}", value, bad, f"validation.simulator.{native}", expected, _simulator("env.eval.", native))
    for name, value, bad, native, expected, *_ in TRAINING
]
WITHOUT_EFFECT = {
    "algorithm.loss_agg_func": "seq-mean-token-sum",
    "algorithm.kl_beta": 0.1,
    "algorithm.kl_penalty": "abs",
    "algorithm.kl_penalty_type": "mse",
    "algorithm.calculate_entropy": True,
    "algorithm.early_stop_imp_ratio": 2.0,
    "algorithm.use_valid_token_scale": True,
    "algorithm.val_rollout_batch_size_per_gpu": 8,
    "runner.per_worker_log": True,
    "runner.per_worker_log_path": "logs",
    "algorithm.sampling_params.add_BOS": True,
    "rollout.enable_torch_compile": True,
    "rollout.enable_cuda_graph": True,
    "rollout.return_logprobs": False,
    "weight_syncer.type": "patch",
    "weight_syncer.snapshot_device": "cuda",
    "weight_syncer.transport_device": "cuda",
    "weight_syncer.patch.snapshot_device": "cuda",
    "weight_syncer.patch.transport_device": "cuda",
    "weight_syncer.patch.delta_encoding": False,
    "weight_syncer.patch.compression": "zstd",
    "weight_syncer.patch.init_sync.enabled": False,
    "weight_syncer.patch.init_sync.prefixes": ["model"],
    "weight_syncer.patch.init_sync.bucket_size": 1024,
    "weight_syncer.bucket.bucket_size": 1024,
    "weight_syncer.bucket.bucket_dtype": "bf16",
    "weight_syncer.bucket.is_agent": True,
    "weight_syncer.bucket.load_instant": False,
}
ENV_WITHOUT_EFFECT = {
    "use_3rd_view_as_extra": True,
    "policy_setup": "panda-qpos",
    "init_params.num_envs": 3,
    "init_params.max_episode_steps": 3,
    "init_params.control_mode": "pd_joint_pos",
}
REACHED = [
    (plain, *row, *({},) * (6 - len(row)))
    for plain, rows in ((RUN, KEYS), (ENV, ENV_KEYS), (RUN, EVALUATION))
    for row in rows
]
IGNORED = [(RUN, *one) for one in WITHOUT_EFFECT.items()] + [(ENV, *one) for one in ENV_WITHOUT_EFFECT.items()]


@pytest.mark.proves("rlinf", *(case[1] for case in REACHED))
@pytest.mark.parametrize(
    ("plain", "key", "value", "illegal", "native", "expected", "others"),
    REACHED,
    ids=[f"{one[1]}-{one[4]}" for one in REACHED],
)
def test_a_key_of_a_run_on_a_simulator_reaches_it_and_comes_back(
    tmp_path: Path,
    plain: dict[str, Any],
    key: str,
    value: Any,
    illegal: Any,
    native: str,
    expected: Any,
    others: dict[str, Any],
) -> None:
    found = converted(tmp_path, "rlinf", changed(plain, {**others, key: value}))
    assert natively(found, native) == expected
    assert f"{key}: given.yaml:" in found.composed.provenance[native]
    assert translated(found, "rlinf").lost == {}
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, "rlinf", changed(plain, {**others, key: illegal}))
    assert key in str(error.value)


@pytest.mark.proves("rlinf", *(case[1] for case in IGNORED))
@pytest.mark.parametrize(("plain", "key", "value"), IGNORED, ids=[one[1] for one in IGNORED])
def test_a_key_without_effect_is_read_and_the_reason_is_given(
    tmp_path: Path, plain: dict[str, Any], key: str, value: Any
) -> None:
    found = converted(tmp_path, "rlinf", changed(plain, {key: value}))
    assert found.composed.experiment == converted(tmp_path, "rlinf", plain).composed.experiment
    assert [remark for remark in found.composed.remarks if key in remark and "has no effect here, since" in remark]


def test_each_key_has_a_row_in_these_tables() -> None:
    files = ("rlinf_embodied_algorithm", "rlinf_embodied_newer", "rlinf_env_newer")
    specs = [spec for file in files for spec in load_keys("rlinf", file)]
    tested = {case[1] for case in (*REACHED, *IGNORED)} | {"actor.model.add_value_head"}
    assert {spec.key for spec in specs if spec.state == "honoured"} <= tested


@pytest.mark.proves("rlinf", "actor.model.add_value_head")
def test_a_value_head_must_be_there_if_the_estimator_needs_it(tmp_path: Path) -> None:
    key = "actor.model.add_value_head"
    found = converted(tmp_path, "rlinf", changed(RUN, {**VALUED, key: True}))
    assert natively(found, "critic.shares_policy") is True
    with pytest.raises(ConfigError, match=f"{key} = false .*gae.*needs the value head\n  {key}=true"):
        converted(tmp_path, "rlinf", changed(RUN, {**VALUED, key: False}))
    with pytest.raises(ConfigError, match=f"{key} = 1"):
        converted(tmp_path, "rlinf", changed(RUN, {key: 1}))


@pytest.mark.parametrize(
    ("changes", "whitens"),
    [
        (VALUED, True),
        ({**VALUED, "algorithm.normalize_advantages": False}, False),
        ({"algorithm.adv_type": "grpo", "algorithm.normalize_advantages": True}, False),
        ({"algorithm.adv_type": "raw", "algorithm.normalize_advantages": True}, False),
        ({"algorithm.adv_type": "reinpp", "algorithm.normalize_advantages": False}, True),
    ],
)
def test_only_advantages_that_rlinf_normalises_are(tmp_path: Path, changes: dict[str, Any], whitens: bool) -> None:
    """RLinf's grpo has divided by the standard deviation of the group already."""
    found = converted(tmp_path, "rlinf", changed(RUN, changes))
    assert natively(found, "algorithm.advantage.whiten") is whitens


def test_a_robot_that_fails_early_counts_as_much_as_one_that_takes_long(tmp_path: Path) -> None:
    """RLinf: mean(loss * mask / (trained actions / max_episode_steps)), or mean(loss) if no action is masked."""
    steps = {"auto_reset": "env.train.auto_reset", "ignore_terminations": "env.train.ignore_terminations"}
    older = "algorithm.auto_reset"
    for key in (None, *steps.values(), older):
        found = converted(tmp_path, "rlinf", changed(RUN, {} if key is None else {key: True}))
        expected = "seq-mean-token-mean" if key is None else "token-mean"
        assert natively(found, "algorithm.aggregation") == expected, key
        assert translated(found, "rlinf").lost == {}
        assert key is None or f"{key}: given.yaml:" in found.composed.provenance["algorithm.aggregation"]


def test_rlinfs_robots_have_no_dual_clip_but_with_the_decoupled_loss(tmp_path: Path) -> None:
    """RLinf's files of embodied runs set `clip_ratio_c: 3.0`, which its learner of robots does not read."""
    found = converted(tmp_path, "rlinf", changed(RUN, {"algorithm.clip_ratio_c": 3.0}))
    assert natively(found, "algorithm.loss.clip_dual") is None
    assert [remark for remark in found.composed.remarks if "clip_ratio_c = 3.0" in remark and "no effect" in remark]


def test_no_update_of_robots_is_skipped_for_its_ratio(tmp_path: Path) -> None:
    """The reference's `early_stop_imp_ratio: 5.0` is for RLinf's Megatron learner of text."""
    assert natively(converted(tmp_path, "rlinf", RUN), "algorithm.stop_ratio") is None


@pytest.mark.parametrize(
    ("plain", "changes", "words"),
    [
        (RUN, {"env.train.reward_mode": "raw"}, "env.train.reward_mode = 'raw' .*libero has no such option"),
        (ENV, {"reset_gripper_open": False}, "reset_gripper_open = false .*maniskill has no such option"),
        (ENV, {"init_params.render_mode": "human"}, "init_params.render_mode = 'human' .*'sensors' or 'all'"),
        (
            {**RUN, "actor": {"model": {"policy_setup": "google_robot_static"}}},
            {"env.eval.env_type": "maniskill"},
            "actor.model.policy_setup = 'google_robot_static' .*no controller of ManiSkill",
        ),
    ],
)
def test_what_a_simulator_does_not_take_is_told_by_rlinfs_own_key(
    tmp_path: Path, plain: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        converted(tmp_path, "rlinf", changed(plain, changes))
    assert "env.options" not in str(error.value)


def test_maniskill_has_the_robot_that_the_policy_controls(tmp_path: Path) -> None:
    key = "actor.model.policy_setup"
    both = {"env.train.env_type": "maniskill", "env.eval.env_type": "maniskill", key: "panda-qpos"}
    found = converted(tmp_path, "rlinf", changed(RUN, both))
    for section in ("env", "validation.simulator"):
        assert natively(found, f"{section}.options.policy_setup") == "panda-qpos"
        assert f"{key}: given.yaml:" in found.composed.provenance[f"{section}.options.policy_setup"]
    assert translated(found, "rlinf").lost == {}


def test_the_rewards_of_maniskill_are_not_scaled_by_the_factor_of_libero(tmp_path: Path) -> None:
    """RLinf: reward_coef * terminations in LIBERO, the task's reward as it is in ManiSkill, whose files have no factor
    and inherited the 5.0 of the reference."""
    assert natively(converted(tmp_path, "rlinf", {"env_type": "libero"}), "env.reward_coefficient") == 5.0
    assert natively(converted(tmp_path, "rlinf", {"env_type": "maniskill"}), "env.reward_coefficient") == 1.0
    found = converted(tmp_path, "rlinf", {"env_type": "maniskill", "reward_coef": 2.0, "use_step_penalty": True})
    config = found.composed.experiment.env
    assert (config.reward_coefficient, config.step_penalty) == (1.0, 0.0)
    assert len([remark for remark in found.composed.remarks if "env_type is 'maniskill', not one of" in remark]) == 2
    older = changed(RUN, {"algorithm.reward_coef": 2.0, "env.train.env_type": "maniskill"})
    found = converted(tmp_path, "rlinf", older)
    assert natively(found, "env.reward_coefficient") == 1.0
    assert natively(found, "validation.simulator.reward_coefficient") == 2.0


@pytest.mark.parametrize(("plain", "section"), [(RUN, "env"), (RUN, "validation.simulator"), (ENV, "env")])
def test_training_and_evaluations_use_all_start_states_as_rlinf(
    tmp_path: Path, plain: dict[str, Any], section: str
) -> None:
    assert natively(converted(tmp_path, "rlinf", plain), f"{section}.hold_out") is False


def test_a_run_in_the_native_format_has_no_key_that_robots_do_not_read(tmp_path: Path) -> None:
    path = tmp_path / "native.yaml"
    path.write_text(dump_config(converted(tmp_path, "rlinf", RUN).composed))
    assert list(robot_problems(load_experiment(path, []))) == []


def test_maniskills_names_of_its_own_backends_are_read(tmp_path: Path) -> None:
    for name, native in {"physx_cuda": "gpu", "physx_cpu": "cpu"}.items():
        found = converted(tmp_path, "rlinf", changed(ENV, {"init_params.sim_backend": name}))
        assert natively(found, "env.options.sim_backend") == native


FILES: list[tuple[str, dict[str, Any], tuple[int, int, int, int, int]]] = [
    # environments, epochs, actions per epoch, chunk, batch, micro-batch, GPUs, update epochs
    ("libero_10_grpo", {"sizes": (64, 16, 512, 8, 16384, 32, 8, 1), "group": 8}, (64, 1024, 65536, 4, 64)),
    ("libero_spatial_grpo", {"sizes": (64, 16, 512, 8, 16384, 32, 8, 1), "group": 8}, (64, 1024, 65536, 4, 64)),
    ("libero_goal_grpo", {"sizes": (64, 8, 240, 8, 1920, 24, 8, 1), "group": 8}, (64, 240, 15360, 8, 10)),
    ("maniskill_ppo_oft", {"sizes": (128, 1, 160, 8, 640, 40, 8, 1), "group": 1}, (128, 20, 2560, 4, 2)),
    ("maniskill_ppo_openvla", {"sizes": (320, 1, 80, 1, 12800, 20, 8, 1), "group": 1}, (320, 80, 25600, 2, 80)),
    ("maniskill_grpo_openvla", {"sizes": (320, 1, 80, 1, 640, 20, 8, 1), "group": 8}, (320, 80, 25600, 40, 4)),
    ("maniskill_ppo_mlp", {"sizes": (1024, 1, 50, 1, 6400, 6400, 1, 8), "group": 1}, (1024, 50, 51200, 8, 1)),
    ("metaworld_grpo", {"sizes": (64, 16, 100, 5, 5120, 32, 8, 1), "group": 8}, (64, 320, 20480, 4, 20)),
    ("quickstart", {"sizes": (32, 1, 80, 8, 80, 10, 1, 1), "group": 1}, (32, 10, 320, 4, 8)),
    ("one_robot", {"sizes": (2, 1, 16, 8, 2, 1, 1, 3), "group": 2}, (2, 2, 4, 2, 2)),
]
"""Sizes as in RLinf's files, and by RLinf's formulas: robots, chunk steps, samples, mini-batches, micro-batches."""


@pytest.mark.parametrize(("name", "file", "expected"), FILES, ids=[one[0] for one in FILES])
def test_a_file_is_planned_with_rlinfs_arithmetic(
    tmp_path: Path, name: str, file: dict[str, Any], expected: tuple[int, int, int, int, int]
) -> None:
    """RLinf: chunk steps are max_steps_per_rollout_epoch // num_action_chunks per epoch; the samples of each of W ranks
    are split into mini-batches of global_batch_size // W, and those into passes of micro_batch_size."""
    envs, epochs, steps, chunk, batch, micro_batch, devices, updates = file["sizes"]
    group = file["group"]
    changes = {
        "runner.logger.experiment_name": name,
        "cluster.component_placement.actor,env,rollout": f"0-{devices - 1}" if devices > 1 else 0,
        "rollout.pipeline_stage_num": 1,
        "algorithm.group_size": group,
        "algorithm.rollout_epoch": epochs,
        "algorithm.update_epoch": updates,
        "env.train.total_num_envs": envs,
        "env.train.max_episode_steps": steps,
        "env.train.max_steps_per_rollout_epoch": steps,
        "actor.model.num_action_chunks": chunk,
        "actor.global_batch_size": batch,
        "actor.micro_batch_size": micro_batch,
        **(VALUED if group == 1 else {}),
    }
    plan = plan_run(converted(tmp_path, "rlinf", changed(RUN, changes)).composed).to_json()["arithmetic"]
    robots, actor = plan["robots"], plan["learners"]["actor"]
    found = (robots["robots"], robots["chunk_steps_per_epoch"] * epochs, robots["samples"], plan["mini_batches"])
    assert (*found, actor["micro_batches"]) == expected
    assert robots["samples_per_mini_batch"] == batch
    assert actor["sequences_per_rank"] == batch // devices
    assert plan["optimizer_steps_per_step"] == expected[3] * updates


def test_environments_that_are_not_counted_fill_an_optimizer_step(tmp_path: Path) -> None:
    changes = {"env.train.total_num_envs": None, "actor.global_batch_size": 160}
    found = converted(tmp_path, "rlinf", changed(RUN, changes))
    robots = plan_run(found.composed).to_json()["arithmetic"]["robots"]
    assert (robots["robots"], robots["samples"], natively(found, "training.mini_batches")) == (16, 160, 1)
    assert [remark for remark in found.composed.remarks if "total_num_envs = null: using 16" in remark]


def test_evaluations_count_their_own_epochs(tmp_path: Path) -> None:
    changes = {"env.eval.rollout_epoch": 3, "env.eval.auto_reset": True, "env.eval.max_steps_per_rollout_epoch": 160}
    found = converted(tmp_path, "rlinf", changed(RUN, changes))
    assert natively(found, "validation.simulator.epochs") == 3
    assert natively(found, "validation.episodes") == 8 * 3 * 2
    older = converted(tmp_path, "rlinf", changed(RUN, {"algorithm.eval_rollout_epoch": 3}))
    assert natively(older, "validation.episodes") == 8 * 3


@pytest.mark.parametrize(
    ("key", "value", "beside", "capability"),
    [
        ("actor.model.model_type", "openpi", {"actor.model.openpi.num_steps": 4}, Capability.POLICIES),
        ("actor.model.model_type", "gr00t", {"actor.model.denoising_steps": 4}, Capability.POLICIES),
        ("actor.model.use_film", True, {}, Capability.POLICIES),
        ("env.train.env_type", "isaaclab", {"env.train.init_params.table_cam": {}}, Capability.SIMULATORS),
        ("env.train.env_type", "robotwin", {"env.train.task_config.render_freq": 0}, Capability.SIMULATORS),
        ("algorithm.loss_type", "embodied_sac", {"algorithm.replay_buffer.cache_size": 9}, Capability.ROBOT_ALGORITHMS),
        ("algorithm.loss_type", "embodied_nft", {"algorithm.nft_beta": 1.0}, Capability.ROBOT_ALGORITHMS),
        ("algorithm.loss_type", "opd", {"rollout.expert_model.model_path": "x"}, Capability.ROBOT_ALGORITHMS),
        ("algorithm.staleness_threshold", 1, {}, Capability.ROBOT_OVERLAP),
        ("reward.use_reward_model", True, {"reward.env_reward_weight": 0.5}, Capability.ROBOT_REWARDS),
        ("env.eval.data_collection.enabled", True, {"env.eval.data_collection.fps": 5}, Capability.ROBOT_RECORDINGS),
        ("runner.ckpt_path", "policy.pt", {}, Capability.PICKLED_WEIGHTS),
    ],
)
def test_what_waits_is_named_with_all_of_its_keys(
    tmp_path: Path, key: str, value: Any, beside: dict[str, Any], capability: Capability
) -> None:
    found = converted(tmp_path, "rlinf", changed(RUN, {**beside, key: value}))
    messages = {problem.key: problem.message for problem in found.unsupported}
    for name in (key, *beside):
        if beside.get(name) != {}:
            assert messages[name].endswith(f"requires {capability}")


def test_a_slip_in_a_run_that_waits_is_still_a_slip(tmp_path: Path) -> None:
    changes = {"actor.model.model_type": "openpi", "actor.micro_batchsize": 4}
    with pytest.raises(ConfigError, match=r"did you mean actor\.micro_batch_size"):
        converted(tmp_path, "rlinf", changed(RUN, changes))


def test_a_known_key_of_something_else_stops_a_run_that_waits_for_nothing(tmp_path: Path) -> None:
    key = "algorithm.replay_buffer.cache_size"
    (problem,) = converted(tmp_path, "rlinf", changed(RUN, {key: 9})).unsupported
    assert problem.key == key
    assert "key of rlinf that its reference does not document" in problem.message
    with pytest.raises(ConfigError, match=r"data\.shuffle .* is not read by runs of this kind"):
        converted(tmp_path, "rlinf", changed(RUN, {"data.shuffle": True}))


def test_the_engine_cannot_have_another_type_than_the_learner(tmp_path: Path) -> None:
    changes = {"actor.model.precision": "fp32", "rollout.model.precision": "bf16"}
    with pytest.raises(ConfigError, match=r"rollout\.model\.precision = 'bf16'.*runs the policy that is trained"):
        converted(tmp_path, "rlinf", changed(RUN, changes))
