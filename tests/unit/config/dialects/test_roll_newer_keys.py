"""If these fail, a key of ROLL's current files that its reference omits does something else than ROLL's own, or nothing
where it should do something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import natively, translated
from test_roll_keys import (
    ARGS,
    CRITIC,
    DATA,
    ENGINE,
    FSDP2,
    GENERATION,
    MODEL,
    OPTION,
    refused,
    roll,
)

from quintet.config.capabilities import Capability
from quintet.config.dialects.ledger import load_keys
from quintet.config.dialects.roll.judge import JUDGE
from quintet.config.native.data import JudgeConfig, JudgeServerConfig
from quintet.config.native.tracking import ProfileConfig, TorchProfilerConfig
from quintet.errors import ConfigError

FILTER, FILTER_ARGS = (
    "rewards.math_rule.query_filter_config.type",
    "rewards.math_rule.query_filter_config.filter_args.",
)
LORA: dict[str, Any] = {f"{MODEL}lora_target": "q_proj, v_proj"}
MEAN, SPREAD, MASK = {FILTER: "mean_filter"}, {FILTER: "std_filter"}, {"difficulty_mask": True}
UPLOAD = {"checkpoint_config.type": "file_system", "checkpoint_config.output_dir": "copies"}
DYNAMIC = {
    f"actor_train.{name}_in_{phase}": value
    for phase in ("train", "infer")
    for name, value in (("use_dynamic_batching", True), ("max_tokens_per_microbatch", 4096))
}
PATHS = {
    f"{worker}.model_args.model_name_or_path": path
    for worker, path in (("actor_train", "policy"), ("actor_infer", "policy"), ("reference", "another"))
}
TENSOR, PIPELINE = f"{ENGINE}tensor_parallel_size", f"{ENGINE}pipeline_parallel_size"
NODES = {"actor_train.device_mapping": "list(range(0,16))", "num_gpus_per_node": 4}

HONOURED: list[tuple[str, Any, str, Any, dict[str, Any]]] = [
    ("output_dir", "there", "output_dir", "there", {}),
    ("tracker_kwargs.log_dir", "boards", "tracking.log_dir", "boards", {}),
    ("tracker_kwargs.project", "ours", "tracking.project", "ours", {}),
    ("tracker_kwargs.name", "first", "tracking.run_name", "first", {}),
    ("track_with", "wandb", "tracking.loggers", ("console", "jsonl", "wandb"), {}),
    ("checkpoint_config.type", "file_system", "checkpoint.remote_dir", "copies", UPLOAD),
    ("checkpoint_config.output_dir", "copies", "checkpoint.remote_dir", "copies", UPLOAD),
    ("max_ckpt_to_keep", 3, "checkpoint.keep", 3, {}),
    ("resume_from_checkpoint", False, "resume", "never", {}),
    ("num_gpus_per_node", 4, "placement.nodes", 4, NODES),
    ("sequence_length", 3000, "rollout.max_response_tokens", 952, {}),
    ("is_offload_states", True, "actor.memory.offload_optimizer", True, {}),
    ("reward_pretrain", "scorer", "critic.path", "scorer", CRITIC),
    ("max_grad_norm", 0.5, "actor.optimizer.max_grad_norm", 0.5, {}),
    ("advantage_clip", 2.0, "algorithm.advantage_clip", 2.0, {}),
    (f"{MODEL}model_name_or_path", "policy", "policy.path", "policy", PATHS),
    (f"{MODEL}lora_target", "q_proj, v_proj", "policy.lora.target_modules", ("q_proj", "v_proj"), FSDP2),
    (f"{MODEL}lora_rank", 16, "policy.lora.rank", 16, {**FSDP2, **LORA}),
    (f"{MODEL}lora_alpha", 48, "policy.lora.alpha", 48.0, {**FSDP2, **LORA}),
    (f"{MODEL}adapter_name_or_path", "first", "policy.lora.path", "first", {**FSDP2, **LORA}),
    (f"{MODEL}freeze_module_prefix", "vision_model", "policy.vision.freeze", True, {}),
    (f"{ARGS}lr_scheduler_type", "cosine", "actor.optimizer.schedule", "cosine", {}),
    (f"{ARGS}lr_scheduler_type", "cosine_with_min_lr", "actor.optimizer.schedule", "cosine", {}),
    (f"{ARGS}warmup_ratio", 0.1, "actor.optimizer.warmup_ratio", 0.1, {f"{ARGS}warmup_steps": 0}),
    (f"{ARGS}adam_beta1", 0.8, "actor.optimizer.betas", (0.8, 0.999), {}),
    (f"{ARGS}adam_beta2", 0.95, "actor.optimizer.betas", (0.9, 0.95), {}),
    (f"{DATA}preprocessing_num_workers", 4, "data.filter_workers", 4, {}),
    (f"{DATA}image_max_pixels", 1000, "policy.vision.max_pixels", 1000, {}),
    (f"{DATA}image_min_pixels", 100, "policy.vision.min_pixels", 100, {}),
    ("actor_train.use_dynamic_batching_in_train", True, "actor.budget.tokens", 4096, DYNAMIC),
    ("actor_train.max_tokens_per_microbatch_in_train", 4096, "actor.budget.sequences", None, DYNAMIC),
    ("actor_train.use_dynamic_batching_in_infer", True, "actor.inference_budget.tokens", 4096, DYNAMIC),
    ("actor_train.max_tokens_per_microbatch_in_infer", 4096, "actor.inference_budget.tokens", 4096, DYNAMIC),
    (f"{OPTION}use_distributed_optimizer", True, "actor.megatron.use_distributed_optimizer", True, {}),
    (f"{OPTION}apply_rope_fusion", True, "actor.megatron.apply_rope_fusion", True, {}),
    (f"{OPTION}bias_activation_fusion", True, "actor.megatron.bias_activation_fusion", True, {}),
    (f"{OPTION}overlap_param_gather", True, "actor.megatron.overlap_param_gather", True, {}),
    (f"{OPTION}recompute_method", "block", "actor.megatron.recompute_method", "block", {}),
    (f"{OPTION}recompute_num_layers", 2, "actor.megatron.recompute_num_layers", 2, {}),
    (f"{OPTION}ep_size", 4, "actor.parallel.expert", 4, FSDP2),
    (TENSOR, 2, "rollout.engine_options.tensor_parallel", 2, {}),
    (TENSOR, 4, "placement.rollout.devices_per_worker", 8, {PIPELINE: 2}),
    (PIPELINE, 2, "rollout.engine_options.pipeline_parallel", 2, {}),
    ("global_template", "qwen3", "data.template", "qwen3", {}),
    ("is_use_additional_prompts", True, "algorithm.filter.refill_rounds", 8, {}),
    ("difficulty_mask", True, "algorithm.filter.min_mean", pytest.approx(0.0, abs=1e-300), {}),
    ("difficulty_low_threshold", 0.1, "algorithm.filter.min_mean", 0.10000000000000002, MASK),
    ("difficulty_high_threshold", 0.95, "algorithm.filter.max_mean", 0.9499999999999998, MASK),
    (FILTER, "mean_filter", "algorithm.filter.max_mean", 0.9, {f"{FILTER_ARGS}threshold_up": 0.9}),
    (f"{FILTER_ARGS}threshold_up", 0.9, "algorithm.filter.max_mean", 0.9, MEAN),
    (f"{FILTER_ARGS}threshold_down", 0.1, "algorithm.filter.min_mean", 0.1, MEAN),
    (f"{FILTER_ARGS}std_threshold", 0.2, "algorithm.signal_threshold", 0.2, SPREAD),
    ("max_len_mask", True, "algorithm.mask_truncated", True, {}),
    ("profiler_timeline", True, "tracking.profile.torch.with_stack", True, {}),
    ("profiler_memory", True, "tracking.profile.memory_snapshot", True, {}),
    ("rewards.math_rule.world_size", 8, "reward.workers", 8, {}),
]
"""Key, value, the native key, what that becomes, and what else is written."""

WAITING: list[tuple[str, Any, Capability]] = [
    ("track_with", "ml_tracker", Capability.TRACKERS),
    ("rollout_mock.enable", True, Capability.RECORDED_ROLLOUTS),
    ("user_defined_rollout_loop_cls", "mine.Loop", Capability.ROLL_CLASSES),
    ("whiten_rewards", True, Capability.REWARD_SHAPING),
    ("use_opd", True, Capability.ON_POLICY_DISTILLATION),
    (f"{MODEL}moe_aux_loss_coef", 0.1, Capability.ROUTER_LOSSES),
    (f"{MODEL}freeze_module_prefix", "vision_model.blocks", Capability.FROZEN_MODULES),
    (f"{MODEL}lora_dropout", 0.1, Capability.ROLL_LEARNERS),
    (f"{ARGS}lr_scheduler_type", "polynomial", Capability.SCHEDULES),
    (f"{DATA}video_folder", "videos", Capability.MEDIA),
    ("actor_train.router_replay.mode", "R3", Capability.ROUTER_LOSSES),
    (f"{OPTION}additional_configs", {"moe_router": "x"}, Capability.ROLL_LEARNERS),
    ("tag_to_template", {"code": "qwen3"}, Capability.REWARD_DOMAINS),
    ("postive_loss_coef", 0.1, Capability.MIXED_LOSSES),
    ("rewards.math_rule.worker_cls", "roll.pipeline.rlvr.rewards.Judge", Capability.REWARD_WORKERS),
    ("train_infer_correction.filters", [{"enabled": True, "agg_type": "segment"}], Capability.TURN_RATIOS),
    ("dual_clip_loss", True, Capability.SEQUENCE_DUAL_CLIP),
    ("train_infer_correction.is_weight.weight_type", "segment", Capability.TURN_RATIOS),
]
"""Key, a value, and the capability for which it waits."""

WITHOUT_EFFECT: dict[str, Any] = {
    "base_dir": "there",
    "reward_system_config": {"skip_special_tokens": True},
    "logging_dir": "logs",
    "logging_steps": 2,
    "render_save_dir": "pictures",
    "rollout_dump_dir": "dump",
    "save_logging_board_dir": "board",
    "model_name": "mine",
    "tracker_kwargs.notes": "",
    "tracker_kwargs.tags": ["a"],
    "tracker_kwargs.api_key": "secret",
    "tracker_kwargs.login_kwargs": {"key": "secret"},
    "checkpoint_config.async_upload": False,
    "num_nodes": 2,
    "local_rank": 0,
    "system_envs": {"USE_MODELSCOPE": "1"},
    "rpc_timeout": 72000,
    "model_update_buffer_size_mb": 512,
    "model_download_type": "MODELSCOPE",
    "val_prompt_length": 100,
    "val_sequence_length": 200,
    "val_batch_size": 64,
    "is_offload_optimizer_states_in_train_step": True,
    "length_profiler_dir": "profile",
    "report_length_and_rewards": True,
    "otlp_output_dir": "traces",
    "transfer_backend": {"backend_name": "x"},
    "rollout_mock.mode": "mock",
    "rollout_mock.dump_dir": "dumps",
    "generate_opt_level": 0,
    "is_num_return_sequences_expand": True,
    "max_running_requests": 256,
    "router_args.router_name": "SglangRouter",
    "router_args.router_config": {"a": 1},
    "router_args.max_running_requests": 64,
    "l2": 0.1,
    "use_reward_scaling": True,
    "use_reward_norm": True,
    "add_len_reward": True,
    "reward_norm": "batch",
    "reward_shift": True,
    "reward_scale": True,
    "enable_reference": True,
    "enable_old_logprobs_recompute": True,
    "force_disable_old_logprobs_recompute": True,
    "actor_train.name": "learner",
    "actor_train.world_size": 8,
    f"{MODEL}model_type": "trl",
    f"{MODEL}num_labels": 2,
    f"{MODEL}attn_implementation": "fa2",
    f"{MODEL}flash_attn": "fa2",
    f"{MODEL}device_map": "auto",
    f"{MODEL}gradient_checkpointing_use_reentrant": True,
    f"{MODEL}autocast_adapter_dtype": False,
    f"{ARGS}num_train_epochs": 50,
    f"{ARGS}max_steps": 7,
    f"{ARGS}output_dir": "there",
    f"{ARGS}seed": 7,
    f"{ARGS}data_seed": 7,
    f"{ARGS}dataloader_num_workers": 2,
    f"{ARGS}fp16": True,
    f"{ARGS}bf16": True,
    f"{ARGS}tf32": True,
    f"{ARGS}save_hf_model": True,
    f"{DATA}dataset_dir": "data",
    f"{DATA}dataset_type": "jsonl",
    f"{DATA}interleave_probs": "1.0",
    f"{DATA}eval_file_name": "held_out.json",
    f"{DATA}id": "number",
    f"{DATA}response": "solution",
    f"{DATA}video_max_pixels": 100,
    f"{DATA}video_min_pixels": 10,
    f"{DATA}video_total_pixels": 1000,
    f"{DATA}video_fps": 1.0,
    f"{DATA}video_max_frames": 8,
    f"{DATA}video_resize_chunk_frames": 8,
    "actor_train.model_update_frequency": 2,
    "actor_train.backend_timeout": 60,
    "actor_train.system_envs": {"NVTE_FLASH_ATTN": "1"},
    "actor_train.max_concurrency": 2,
    "actor_train.offload_nccl": True,
    "actor_train.use_remove_padding": True,
    "actor_train.use_sequence_packing": True,
    "actor_train.sequence_packing_args.algorithm": "load_balance",
    "actor_train.sequence_packing_args.max_packed_sequence_length_forward": 8192,
    "actor_train.sequence_packing_args.max_packed_sequence_length_train": 8192,
    "actor_train.sequence_packing_args.min_num_micro_batches_forward": 2,
    "actor_train.sequence_packing_args.min_num_micro_batches_train": 2,
    "actor_train.sequence_length_round_in_train": 8,
    "actor_train.sequence_length_round_in_infer": 8,
    "actor_train.logits_in_fp32": True,
    "actor_train.apply_loss_scale": False,
    "actor_train.opd_kl_coef": 0.5,
    "actor_train.tag_included": ["math"],
    f"{OPTION}bf16": True,
    f"{OPTION}fp16": True,
    f"{OPTION}recompute_modules": "moe,layernorm",
    f"{OPTION}cross_entropy_loss_fusion": True,
    f"{OPTION}account_for_embedding_in_pipeline_split": True,
    f"{OPTION}account_for_loss_in_pipeline_split": True,
    f"{OPTION}pipeline_model_parallel_layout": "E|(tt|)*30,L",
    f"{OPTION}distrib_optim_fully_reshardable": False,
    f"{OPTION}use_batched_model_update": False,
    f"{OPTION}max_grad_norm": 0.1,
    f"{OPTION}wrap_policy": {"wrap_embeddings": True},
    f"{OPTION}apply_expert_patch": True,
    f"{OPTION}moe_use_grouped_mm": True,
    f"{OPTION}apply_tiled_mlp": True,
    f"{OPTION}tiled_num_shards": 4,
    f"{OPTION}efsdp_size": 2,
    f"{GENERATION}num_return_sequences": 4,
    f"{GENERATION}max_length": 100,
    f"{GENERATION}length_penalty": 2.0,
    f"{GENERATION}include_stop_str_in_output": True,
    f"{GENERATION}logprobs": 1,
    f"{ENGINE}sleep_level": 2,
    f"{ENGINE}VLLM_USE_V1": 0,
    "max_additional_running_prompts": 4,
    "error_max_len_threshold": 100,
    "balance_length": True,
    "minibatch_data_iter_num": 2,
    "use_topr_loss": True,
    "use_policy_loss_type": "PG",
    "val_greedy": True,
    "val_n_sample": 4,
    "rewards.math_rule.format_pattern": "^<think>",
    "rewards.math_rule.use_local": False,
    "rewards.math_rule.code_url": "http://localhost",
    "rewards.math_rule.judge_api_key": "secret",
    "rewards.math_rule.infer_batch_size": 1,
}
"""Legal values of keys without effect here, together in one file."""
VALIDATION_STEPS = "validation.eval_steps"


@pytest.mark.proves("roll", *(case[0] for case in HONOURED))
@pytest.mark.parametrize("case", HONOURED, ids=lambda case: f"{case[0]}-{case[2]}")
def test_a_key_that_the_reference_omits_reaches_the_run(
    tmp_path: Path, case: tuple[str, Any, str, Any, dict[str, Any]]
) -> None:
    key, value, native, expected, others = case
    found = roll(tmp_path, {**others, key: value})
    assert natively(found, native) == expected
    assert f"{key}: given.yaml:1" in found.composed.provenance[native]
    assert translated(found, "roll").lost == {}


@pytest.mark.parametrize(("key", "value", "capability"), WAITING, ids=[f"{case[0]}" for case in WAITING])
def test_what_does_not_exist_here_waits_by_its_name(
    tmp_path: Path, key: str, value: Any, capability: Capability
) -> None:
    others = {"train_infer_correction.is_weight.enabled": True} if "is_weight" in key else {}
    others = {"importance_sampling": "seq"} if key == "dual_clip_loss" else others
    told = [problem.message for problem in roll(tmp_path, {**others, key: value}).unsupported]
    assert any(key in message and str(capability) in message for message in told), told


@pytest.mark.proves("roll", *WITHOUT_EFFECT, VALIDATION_STEPS)
def test_keys_without_effect_are_read_and_change_nothing(tmp_path: Path) -> None:
    plain, other = roll(tmp_path, {}), roll(tmp_path, WITHOUT_EFFECT)
    assert other.composed.experiment == plain.composed.experiment
    greedy = {"validation.generating_args.do_sample": False}
    other = roll(tmp_path, {**greedy, VALIDATION_STEPS: 7})
    assert other.composed.experiment == roll(tmp_path, greedy).composed.experiment


@pytest.mark.proves("roll", "profiler_output_dir")
def test_profiles_are_of_all_steps_of_rank_0_in_a_directory_of_the_experiment(tmp_path: Path) -> None:
    changes = {"profiler_output_dir": "profiles", "exp_name": "mine"}
    found = roll(tmp_path, {**changes, "profiler_timeline": True}).composed.experiment.tracking.profile
    assert found == ProfileConfig(directory="profiles/mine", torch=TorchProfilerConfig(with_stack=True))
    assert (found.steps, found.ranks) == (None, (0,))
    snapshots = roll(tmp_path, {"profiler_memory": True}).composed.experiment.tracking.profile
    assert snapshots == ProfileConfig(memory_snapshot=True)
    assert roll(tmp_path, changes).composed.experiment.tracking.profile is None
    with pytest.raises(ConfigError, match=r"profiler_memory = true .* excludes profiler_timeline = true"):
        roll(tmp_path, {"profiler_timeline": True, "profiler_memory": True})


SHARES, TAG = f"{DATA}domain_interleave_probs", f"{DATA}tag"
CLASSES = "roll.pipeline.rlvr.rewards."
WORDS = {
    "rewards.words.tag_included": ["CrossThink"],
    "rewards.words.world_size": 2,
    "rewards.words.worker_cls": f"{CLASSES}crossthinkqa_rule_reward_worker.CrossThinkQARuleRewardWorker",
}


@pytest.mark.proves("roll", SHARES, TAG, "rewards.math_rule.tag_included", "rewards.math_rule.worker_cls")
def test_domains_have_their_prompts_and_verifiers(tmp_path: Path) -> None:
    """As in ROLL, rows with other tags belong to math_rule, and the last domain gets the rest of a step."""
    tags = {"rewards.math_rule.tag_included": ["deepmath_103k"], "rewards.math_rule.world_size": 8, TAG: "kind"}
    found = roll(tmp_path, {**WORDS, **tags, SHARES: {"math_rule": 0.3, "words": 0.7}, "rollout_batch_size": 64})
    data, reward = found.composed.experiment.data, found.composed.experiment.reward
    assert data is not None
    assert data.source_key == "kind"
    assert {name: (domain.sources, domain.share) for name, domain in data.domains.items()} == {
        "math_rule": (("deepmath_103k", "*"), 0.3), "words": (("CrossThink",), 0.7),
    }  # fmt: skip
    assert data.prompts_per_domain(64) == {"math_rule": 19, "words": 45}
    assert reward is not None
    assert {name: verifier.kind for name, verifier in reward.verifiers.items()} == {
        "math_rule": "math_rule",
        "words": "crossthinkqa",
    }
    assert reward.workers == 10


@pytest.mark.proves("roll", "rewards.math_rule.reward_type", "rewards.math_rule.response_length_penalty_coef")
def test_a_reward_class_has_its_options(tmp_path: Path) -> None:
    options = {"rewards.words.reward_type": "strict", "rewards.words.response_length_penalty_coef": 0.5}
    found = roll(tmp_path, {**WORDS, **options, SHARES: {"words": 1.0}, "response_length": 100})
    reward = found.composed.experiment.reward
    assert reward is not None
    assert reward.verifiers["words"].arguments == {
        "reward_type": "strict", "length_coefficient": 0.5, "padded_length": 100,
    }  # fmt: skip
    options = {key.replace("words", "math_rule"): value for key, value in {**WORDS, **options}.items()}
    reward = roll(tmp_path, {**options, "response_length": 100}).composed.experiment.reward
    assert reward is not None
    assert (reward.kind, reward.function_arguments["reward_type"]) == ("crossthinkqa", "strict")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("math_rule_reward_worker.MathRuleRewardWorker", "math_rule"),
        ("ifeval_rule_reward_worker.GeneralRuleRewardWorker", "ifeval_roll"),
        ("code_sandbox_reward_worker.CodeSandboxRewardWorker", "code_sandbox"),
        ("multiple_choice_boxed_rule_reward_worker.MultipleChoiceBoxedRuleRewardWorker", "multiple_choice_boxed"),
    ],
)
def test_each_reward_class_has_a_verifier(tmp_path: Path, name: str, kind: str) -> None:
    reward = roll(tmp_path, {"rewards.math_rule.worker_cls": f"{CLASSES}{name}"}).composed.experiment.reward
    assert reward is not None
    assert reward.kind == kind
    assert reward.timeout_seconds == (360.0 if kind == "code_sandbox" else 10.0)


def test_code_that_runs_in_a_service_waits(tmp_path: Path) -> None:
    code = {"rewards.code.worker_cls": f"{CLASSES}code_sandbox_reward_worker.CodeSandboxRewardWorker"}
    found = roll(tmp_path, {**code, "rewards.code.use_local": False, SHARES: {"code": 1.0}})
    assert any("rewards.code.use_local" in problem.message for problem in found.unsupported)


JUDGE_KEYS = (
    *("judge_prompt", "judge_model_type", "judge_model_name", "judge_api_url", "model_args.model_name_or_path"),
    *("model_args.dtype", "data_args.template", "generating_args.max_new_tokens", "generating_args.temperature"),
    *("generating_args.top_p", "generating_args.top_k", "strategy_args.strategy_name"),
    *("strategy_args.strategy_config", "device_mapping"),
)
JUDGED = {
    "rewards.words.worker_cls": JUDGE,
    "rewards.words.judge_prompt": "Qwen2.5-7B-Instruct-RLVR-prompt",
    "rewards.math_rule.world_size": 8,
    SHARES: {"math_rule": 0.5, "words": 0.5},
}
BEHIND_ENDPOINT = {
    **JUDGED,
    "rewards.words.judge_model_type": "api",
    "rewards.words.judge_model_name": "large",
    "rewards.words.judge_api_url": "http://localhost:8000/v1",
}
SERVED = {
    **JUDGED,
    "rewards.words.judge_model_type": "inference",
    "rewards.words.model_args.model_name_or_path": "some/judge",
    "rewards.words.device_mapping": "list(range(12,16))",
}


def judge_of(found: Any) -> JudgeConfig:
    reward = found.composed.experiment.reward
    assert set(reward.verifiers) == {"math_rule", "words"}
    assert reward.verifiers["math_rule"].kind == "math_rule"
    judge = reward.verifiers["words"].judge
    assert judge is not None
    assert not found.unsupported
    return judge


@pytest.mark.proves("roll", *(f"rewards.math_rule.{key}" for key in JUDGE_KEYS))
def test_a_judge_is_the_verifier_of_its_domain(tmp_path: Path) -> None:
    """ROLL sends only the messages to an endpoint, and looks for YES in the reply."""
    found = roll(tmp_path, {**BEHIND_ENDPOINT, "rewards.words.judge_api_key": "secret"})
    assert judge_of(found) == JudgeConfig(
        url="http://localhost:8000/v1", model="large", verdict="yes_no", max_tokens=None, temperature=None,
        timeout_seconds=600.0,
    )  # fmt: skip
    assert found.composed.experiment.reward.workers == 8
    assert any("OPENAI_API_KEY" in remark for remark in found.composed.remarks)
    assert "secret" not in str(found.composed.remarks)
    section = "rewards.words."
    sampling = {"max_new_tokens": 100, "temperature": 0.8, "top_p": 0.6, "top_k": 20}
    options = {"gpu_memory_utilization": 0.8, "block_size": 16, "max_model_len": 8000, "sleep_level": 1}
    changes = {
        **{f"{section}generating_args.{name}": value for name, value in sampling.items()},
        f"{section}strategy_args.strategy_name": "vllm",
        f"{section}strategy_args.strategy_config": options,
        f"{section}data_args.template": "qwen2_5",
        f"{section}model_args.dtype": "fp32",
    }
    assert judge_of(roll(tmp_path, {**SERVED, **changes})) == JudgeConfig(
        verdict="yes_no", timeout_seconds=600.0, max_tokens=100, temperature=0.8, top_p=0.6, top_k=20,
        server=JudgeServerConfig(
            path="some/judge", engine="vllm", devices=(12, 13, 14, 15), dtype="float32", template="qwen2_5",
            max_model_tokens=8000, memory_share=0.8, arguments={"block_size": 16},
        ),
    )  # fmt: skip


def test_a_judge_that_the_run_serves_has_rolls_defaults(tmp_path: Path) -> None:
    assert judge_of(roll(tmp_path, SERVED)) == JudgeConfig(
        verdict="yes_no", timeout_seconds=600.0, max_tokens=8192, temperature=0.95, top_p=0.7, top_k=50,
        server=JudgeServerConfig(path="some/judge", devices=(12, 13, 14, 15), arguments={}),
    )  # fmt: skip


def test_judges_of_a_shared_cluster_have_its_model(tmp_path: Path) -> None:
    shared = {"reward_model.model_args.model_name_or_path": "other/judge", "reward_model.device_mapping": "[6, 7]"}
    judge = judge_of(roll(tmp_path, {**SERVED, **shared, "rewards.words.judge_model_type": "cluster"}))
    assert judge.server is not None
    assert (judge.server.path, judge.server.devices) == ("other/judge", (6, 7))


def test_a_judge_over_several_devices_waits_by_name(tmp_path: Path) -> None:
    options = {"strategy_args.strategy_name": "vllm", "strategy_args.strategy_config": {"tensor_parallel_size": 2}}
    found = roll(tmp_path, {**SERVED, **{f"rewards.words.{key}": value for key, value in options.items()}})
    assert any(str(Capability.JUDGE_ENGINES) in problem.message for problem in found.unsupported)


def test_a_judge_that_roll_would_not_start_or_could_not_read_is_refused(tmp_path: Path) -> None:
    words = "rewards.words."
    for change, part in (
        ({f"{words}judge_model_type": None}, f"{words}judge_model_type = null"),
        ({f"{words}judge_prompt": None}, f"{words}judge_prompt=Qwen2.5-7B-Instruct-RLVR-prompt"),
        ({f"{words}judge_model_type": "api"}, f"{words}judge_api_url=http://127.0.0.1:8000/v1"),
        ({f"{words}model_args.model_name_or_path": None}, f"{words}model_args.model_name_or_path=DIRECTORY"),
        ({f"{words}device_mapping": "x"}, f"{words}device_mapping"),
    ):
        assert part in refused(tmp_path, {**SERVED, **change})


def test_a_domain_without_a_share_is_only_held_out(tmp_path: Path) -> None:
    found = roll(tmp_path, {**WORDS, "rewards.math_rule.world_size": 8, SHARES: {"words": 1.0}})
    data = found.composed.experiment.data
    assert data is not None
    assert data.prompts_per_domain(64) == {"words": 64, "math_rule": 0}


def test_domains_without_shares_or_rewards_are_refused(tmp_path: Path) -> None:
    told = refused(tmp_path, {**WORDS, "rewards.code.world_size": 8, SHARES: None})
    assert f"{SHARES} = null" in told
    assert f"for example {SHARES}.words=0.5 {SHARES}.code=0.5" in told
    told = refused(tmp_path, {SHARES: {"math_rule": 0.4, "ifeval": 0.6}})
    assert "`rewards` has no section ifeval" in told


def test_every_key_without_effect_is_among_these() -> None:
    names = ("roll_common", "roll_workers", "roll_rlvr", "roll_reward_domain")
    rows = {spec.key for name in names for spec in load_keys("roll", name) if not spec.native and not spec.requires}
    assert rows - WITHOUT_EFFECT.keys() - {VALIDATION_STEPS, "pipeline_cls"} == set()


def test_an_engines_context_may_be_shorter_than_prompt_and_response(tmp_path: Path) -> None:
    """As in ROLL, where vLLM truncates the response."""
    found = roll(tmp_path, {f"{ENGINE}max_model_len": 4096})
    assert natively(found, "rollout.engine_options.max_model_tokens") == 4096
    assert natively(roll(tmp_path, {}), "rollout.engine_options.max_model_tokens") is None


def test_a_misspelt_key_of_a_domain_is_told_with_the_right_one(tmp_path: Path) -> None:
    told = refused(tmp_path, {"rewards.code.worker_cls": "x", "rewards.code.tag_includded": ["a"]})
    assert "did you mean rewards.code.tag_included?" in told


def test_values_may_refer_to_names_that_the_file_defines(tmp_path: Path) -> None:
    found = roll(tmp_path, {"length": 1000, "response_length": "${length}"})
    assert natively(found, "rollout.max_response_tokens") == 1000


def test_a_key_of_the_policy_in_the_section_of_an_engine_is_told_as_ineffective(tmp_path: Path) -> None:
    remarks = roll(tmp_path, {"actor_infer.training_args.learning_rate": 0.1}).composed.remarks
    assert any("actor_infer.training_args.learning_rate = 0.1" in remark for remark in remarks)
