"""If these fail, an RLinf user's own file of a run on text, of agents or of a supervised run is read otherwise than by
RLinf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively, translated
from test_rlinf_robots import RUN

from quintet.config.capabilities import Capability
from quintet.config.dialects.ledger import load_keys
from quintet.config.dialects.loader import ConversionResult
from quintet.config.native.tracking import ProfileConfig, TorchProfilerConfig
from quintet.errors import ConfigError

MATH: dict[str, Any] = {
    "cluster": {"component_placement": {"actor,rollout,reward": "all"}},
    "runner": {"task_type": "reasoning"},
    "rollout": {"model": {"model_path": "some/model"}},
}
MEGATRON: dict[str, Any] = {
    "algorithm.shuffle_rollout": False,
    "algorithm.critic_warmup_steps": 3,
    "algorithm.adv_type": "gae",
    "critic.use_critic_model": True,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.03,
    "critic.optim.adam_beta2": 0.999,
    "critic.lr_sched.lr_decay_style": "linear",
    "critic.lr_sched.lr_decay_iters": 1650,
    "critic.lr_sched.lr_warmup_fraction": 0.1,
    "critic.model.precision": "bf16",
    "critic.model.tensor_model_parallel_size": 1,
    "critic.megatron.ckpt_convertor.hf_model_path": "some/critic",
    "critic.group_name": "Values",
    "rollout.backend": "vllm",
    "rollout.model.precision": "bf16",
    "rollout.validate_weight_first_sync": True,
    "rollout.vllm.enable_chunked_prefill": False,
    "rollout.vllm.enable_prefix_caching": False,
    "rollout.vllm.max_num_batched_tokens": 4096,
    "reward.group_name": "Rewards",
    "reward.reward_scale": 4.0,
    "reward.reward_max_val": 2.0,
    "reward.reward_min_val": 0.5,
    "inference.group_name": "LogProbs",
    "actor.model.expert_model_parallel_size": 2,
    "actor.model.moe_grouped_gemm": "te",
    "actor.megatron.use_profiler": True,
    "actor.megatron.profiler.output_dir": "there",
    "actor.megatron.profiler.activities": ["cpu"],
    "actor.megatron.profiler.record_shapes": True,
    "actor.megatron.profiler.profile_memory": True,
    "actor.megatron.profiler.with_stack": True,
    "actor.megatron.profiler.with_flops": True,
    "actor.megatron.profiler.with_modules": False,
    "actor.megatron.profiler.schedule_repeat": 2,
}
FSDP: dict[str, Any] = {
    "actor.training_backend": "fsdp",
    "actor.enable_offload": False,
    "actor.fsdp_config.gradient_checkpointing": True,
    "actor.model.model_path": "other/model",
    "data.type": "vlm",
    "data.dataset_name": "base",
    "data.image_keys": ["picture"],
    "data.use_chat_template": False,
    "data.system_prompt": "Think.",
}
REACHED: dict[str, list[tuple[str, str, Any]]] = {
    "megatron": [
        ("algorithm.shuffle_rollout", "actor.shuffle", False),
        ("algorithm.critic_warmup_steps", "critic.warmup_steps", 3),
        ("critic.group_name", "placement.critic.group", "Values"),
        ("rollout.model.precision", "rollout.engine_options.dtype", "bfloat16"),
        ("rollout.validate_weight_first_sync", "rollout.engine_options.validate_weights", True),
        ("rollout.vllm.enable_chunked_prefill", "rollout.engine_options.chunked_prefill", False),
        (
            "rollout.vllm.enable_prefix_caching",
            "rollout.engine_options.arguments.enable_prefix_caching",
            False,
        ),
        ("rollout.vllm.max_num_batched_tokens", "rollout.engine_options.max_batched_tokens", 4096),
        ("reward.group_name", "placement.reward.group", "Rewards"),
        ("reward.reward_max_val", "reward.scale", 8.0),
        ("reward.reward_min_val", "reward.wrong_reward", 0.25),
        ("inference.group_name", "placement.logprobs.group", "LogProbs"),
        ("actor.model.expert_model_parallel_size", "actor.parallel.expert", 2),
        ("actor.model.moe_grouped_gemm", "actor.megatron.moe_grouped_gemm", True),
        ("actor.megatron.use_profiler", "tracking.profile.ranks", None),
        ("actor.megatron.profiler.schedule_repeat", "tracking.profile.steps", (1, 2)),
        ("actor.megatron.profiler.output_dir", "tracking.profile.directory", "there"),
        ("actor.megatron.profiler.activities", "tracking.profile.torch.activities", ("cpu",)),
        *(
            (f"actor.megatron.profiler.{name}", f"tracking.profile.torch.{name}", name != "with_modules")
            for name in ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
        ),
    ],
    "fsdp": [
        ("actor.enable_offload", "actor.memory.offload_parameters", False),
        ("actor.enable_offload", "actor.memory.offload_optimizer", False),
        ("actor.fsdp_config.gradient_checkpointing", "actor.gradient_checkpointing", True),
        ("actor.model.model_path", "policy.path", "other/model"),
        ("data.image_keys", "data.image_key", "picture"),
        ("data.use_chat_template", "data.template", "none"),
        ("data.system_prompt", "data.system_prompt", "Think."),
    ],
}
CRITIC = {
    "critic.optimizer.learning_rate": 1e-5,
    "critic.optimizer.weight_decay": 0.03,
    "critic.optimizer.betas": (0.9, 0.999),
    "critic.optimizer.schedule": "linear",
    "critic.optimizer.decay_steps": 1650,
    "critic.optimizer.warmup_steps": 165,
    "critic.dtype": "bfloat16",
    "critic.path": "some/critic",
    "critic.backend": "megatron",
    "critic.megatron.bf16": True,
}
WITHOUT_EFFECT: dict[str, Any] = {
    "rollout.return_logprobs": True,
    "rollout.seed": 7,
    "rollout.channel": {"name": "dataserver", "queue_size": 64},
    "actor.channel": {"queue_name": "actor_input_queue"},
    "inference.channel": {"queue_name": "inference_input_queue"},
    "rollout.weight_reload": "cpu",
    "rollout.vllm.enable_flash_infer_sampler": False,
    "rollout.backend": "vllm",
    "data.solution_key": "solution",
    "data.lazy_loading": True,
    "reward.tokenizer.tokenizer_model": "other",
    "reward.tokenizer.use_fast": True,
    "reward.tokenizer.trust_remote_code": False,
    "reward.tokenizer.padding_side": "left",
    "reward.use_prompt": True,
    "inference.load_from_actor": False,
    "inference.model_type": "qwen2.5",
    "inference.model.model_type": "qwen2.5",
    "inference.model.model_path": "some/model",
    "inference.model.is_lora": True,
    "inference.model.precision": "fp32",
    "inference.model.tensor_model_parallel_size": 2,
    "inference.model.pipeline_model_parallel_size": 2,
    "inference.model.sequence_parallel": False,
    "inference.fsdp_config": {"strategy": "fsdp2"},
    "inference.tokenizer.tokenizer_model": "some/model",
    "inference.tokenizer.use_fast": False,
    "inference.tokenizer.trust_remote_code": False,
    "inference.tokenizer.padding_side": "left",
    "critic.seed": 7,
    "actor.micro_batch_size": 3,
    "actor.global_batch_size": 3,
    "actor.sync_precision": "fp32",
    "actor.fsdp_config.gradient_checkpointing_use_reentrant": True,
    "actor.model.model_type": "qwen2.5",
    "actor.model.sharding_strategy": "full_shard",
    "actor.model.init_method_std": 0.008,
    "actor.model.multi_latent_attention": True,
    "actor.model.moe_router_load_balancing_type": "none",
    "actor.model.moe_router_topk": 8,
    "actor.model.moe_router_pre_softmax": True,
    "actor.optim.loss_scale": 1024,
    "actor.optim.initial_loss_scale": 1024,
    "actor.optim.total_training_steps": 100,
    "actor.megatron.mbridge": True,
    "actor.megatron.accumulate_allreduce_grads_in_fp32": True,
    "actor.megatron.ckpt_convertor.model_type": "qwen2.5",
    "actor.megatron.ckpt_convertor.expert_model_parallel_size": 4,
    "actor.megatron.ckpt_convertor.expert_tensor_parallel_size": 4,
    "actor.megatron.ckpt_convertor.grouped_gemm": "te",
    "actor.megatron.ckpt_convertor.te_ln_linear_qkv": True,
    "actor.megatron.ckpt_convertor.te_ln_linear_mlp_fc1": True,
    "actor.megatron.ckpt_convertor.te_ln_add_extra_state": "tensor_pickle_none",
}
WAITING: dict[str, tuple[Any, Capability]] = {
    "agentloop": ({"workflow": "mas", "max_turns": 3}, Capability.RLINF_AGENTS),
    "agentlightning": ({"n_runners": 2}, Capability.RLINF_AGENTS),
    "tools": ({"search": {"topk": 3}}, Capability.RLINF_AGENTS),
    "data.type": ("wideseek_r1", Capability.RLINF_AGENTS),
    "cluster.component_placement.rollout_judge": ("0", Capability.RLINF_AGENTS),
    "algorithm.down_sampling": ({"do_down_sampling": True}, Capability.RLINF_AGENTS),
    "cluster.auto_scheduler": (True, Capability.MOVING_DEVICES),
    "actor.model.is_lora": (True, Capability.LORA_OPTIONS),
    "actor.lr_sched.end_weight_decay": (0.2, Capability.SCHEDULES),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ConversionResult]:
    path = tmp_path_factory.mktemp("runs")
    trees = {"megatron": MEGATRON, "fsdp": FSDP, "remarks": WITHOUT_EFFECT}
    return {name: converted(path, "rlinf", changed(MATH, tree)) for name, tree in trees.items()}


@pytest.mark.proves("rlinf", *(row[0] for rows in REACHED.values() for row in rows))
@pytest.mark.parametrize("kind", REACHED)
def test_keys_reach_the_run_and_come_back(runs: dict[str, ConversionResult], kind: str) -> None:
    run = runs[kind]
    reached = {native: natively(run, native) for _, native, _ in REACHED[kind]}
    assert reached == {native: value for _, native, value in REACHED[kind]}
    for key, native, _ in REACHED[kind]:
        section = next(name for name in (native, native.rpartition(".")[0]) if name in run.composed.provenance)
        assert section.endswith("arguments") or f"{key}: given.yaml" in run.composed.provenance[native], key
    assert translated(run, "rlinf").lost == {}


def test_a_critic_has_keys_of_its_own_and_otherwise_those_of_the_actor(runs: dict[str, ConversionResult]) -> None:
    assert {key: natively(runs["megatron"], key) for key in CRITIC} == CRITIC
    # clip_grad of the reference
    assert natively(runs["megatron"], "critic.optimizer.max_grad_norm") == 1.0


@pytest.mark.proves("rlinf", *WITHOUT_EFFECT)
def test_keys_without_effect_change_nothing_and_the_reason_is_given(
    runs: dict[str, ConversionResult], tmp_path: Path
) -> None:
    plain = converted(tmp_path, "rlinf", changed(MATH, {"rollout.backend": "vllm"}))
    assert runs["remarks"].composed.experiment == plain.composed.experiment
    remarks = [remark for remark in runs["remarks"].composed.remarks if "has no effect here" in remark]
    missing = [key for key in WITHOUT_EFFECT if not any(remark.startswith(f"{key} = ") for remark in remarks)]
    assert missing == ["rollout.backend"]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    tree = changed(MATH, {key: value for key, (value, _) in WAITING.items()})
    problems = {problem.key: problem.message for problem in converted(tmp_path, "rlinf", tree).unsupported}
    assert [key for key, (_, needed) in WAITING.items() if needed not in problems.get(key, "")] == []


PROFILES = "actor.megatron.profiler"
EXPORTS = {f"{PROFILES}.export_tensorboard": True, f"{PROFILES}.export_chrome_trace": False}


@pytest.mark.proves("rlinf", *EXPORTS)
def test_the_first_steps_are_profiled_if_rlinf_writes_a_file_of_them(tmp_path: Path) -> None:
    profiler = {"actor.megatron.use_profiler": True, **EXPORTS}
    with_modules = TorchProfilerConfig(with_modules=True)
    directory = "logs/rlinf/profiler"
    changes = {"runner.output_dir": "logs", "runner.experiment_name": "rlinf", **profiler}
    first = ProfileConfig(steps=(1,), ranks=None, directory=directory, torch=with_modules)
    for others, expected in (
        ({}, first),
        ({f"{PROFILES}.export_tensorboard": False, f"{PROFILES}.export_chrome_trace": True}, first),
        ({f"{PROFILES}.schedule_repeat": 0}, first.model_copy(update={"steps": None})),
        ({f"{PROFILES}.export_tensorboard": False}, None),
        ({"actor.training_backend": "fsdp"}, None),
        ({"actor.megatron.use_profiler": False, f"{PROFILES}.schedule_active": 3}, None),
    ):
        found = converted(tmp_path, "rlinf", changed(MATH, changes | others))
        assert (found.composed.experiment.tracking.profile, found.unsupported) == (expected, ())


def test_parts_of_steps_and_other_names_of_profiles_wait(tmp_path: Path) -> None:
    parts = {"schedule_warmup": 0, "schedule_active": 3, "chrome_filename_prefix": "mine"}
    changes = {"actor.megatron.use_profiler": True, **{f"{PROFILES}.{name}": value for name, value in parts.items()}}
    problems = {
        problem.key: problem.message for problem in converted(tmp_path, "rlinf", changed(MATH, changes)).unsupported
    }
    assert {f"{PROFILES}.{name}" for name in parts} == {
        key for key in problems if Capability.PROFILING in problems[key]
    }


@pytest.mark.parametrize(("task", "needed"), [("sft", "RLINF_SFT"), ("coding_online_rl", "RLINF_AGENTS")])
def test_a_kind_of_run_that_is_missing_is_named_and_all_of_its_keys_wait_with_it(
    tmp_path: Path, task: str, needed: str
) -> None:
    changes: dict[str, Any] = {"runner.task_type": task}
    if task == "sft":
        paths = [{"dataset_path": "some/data", "weight": 1.0}]
        changes |= {"runner.max_epochs": -1, "actor.model.precision": None, "data.train_data_paths": paths}
    result = converted(tmp_path, "rlinf", changed(MATH, changes))
    problems = {problem.key: problem.message for problem in result.unsupported}
    assert Capability[needed] in problems["runner.task_type"]
    assert all(Capability[needed] in problems[key] for key, value in changes.items() if value is not None)


def test_a_run_that_only_evaluates_needs_no_second_response(tmp_path: Path) -> None:
    """searchR1's evaluation has `group_size: 1`."""
    alone = {"algorithm.group_size": 1}
    converted(tmp_path, "rlinf", changed(MATH, {**alone, "runner.task_type": "reasoning_eval"}))
    with pytest.raises(ConfigError, match="group_size = 1"):
        converted(tmp_path, "rlinf", changed(MATH, alone))


def test_a_torch_checkpoint_is_no_reason_to_refuse_a_run_that_reads_none(tmp_path: Path) -> None:
    key = "actor.megatron.ckpt_format"
    assert natively(converted(tmp_path, "rlinf", changed(MATH, {key: "torch"})), key) is None
    initial = {"actor.megatron.use_hf_ckpt": False, "actor.model.megatron_checkpoint": "some/checkpoint"}
    assert natively(converted(tmp_path, "rlinf", changed(MATH, {key: "torch", **initial})), key) == "torch"


def test_each_honoured_key_is_in_these_tables() -> None:
    specs = [spec for file in ("rlinf_text", "rlinf_agents") for spec in load_keys("rlinf", file)]
    tested = {row[0] for rows in REACHED.values() for row in rows} | WITHOUT_EFFECT.keys() | EXPORTS.keys()
    assert {spec.key for spec in specs if spec.state == "honoured"} <= tested


def test_real_robots_without_a_step_limit_wait_by_name(tmp_path: Path) -> None:
    steps, view = "env.eval.max_episode_steps", "env.train.wrap_obs_mode"
    changes = {steps: None, "env.train.env_type": "maniskill", "env.eval.env_type": "maniskill", view: "raw"}
    result = converted(tmp_path, "rlinf", changed(RUN, changes))
    problems = {problem.key: problem.message for problem in result.unsupported}
    assert all(Capability.SIMULATORS in problems[key] for key in (steps, view))
