"""If these fail, a verl user's run is something else than what their file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively, translated

from quintet.config.dialects.dialect import Reference
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.value_types import ValueType
from quintet.errors import ConfigError

PPO = {"actor_rollout_ref": {"model": {"path": "some/model"}}}
MEGATRON = {"actor_rollout_ref": {"model": {"path": "some/model"}, "actor": {"strategy": "megatron"}}}
SFT = {"model": {"partial_pretrain": "some/model"}}
EVALUATION = {"data": {"path": "answers.parquet"}}

ACTOR, MODEL, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "ref", "rollout"))
OPTIM = f"{ACTOR}.optim"
ENGINE = "rollout.engine_options"
FSDP = f"{ACTOR}.fsdp_config"
OVERLONG = {
    f"reward_model.reward_kwargs.overlong_buffer_cfg.{key}": value for key, value in {"enable": True, "len": 64}.items()
}
IN_LOSS = {f"{ACTOR}.use_kl_loss": True}
IN_REWARD = {"algorithm.use_kl_in_reward": True}
DYNAMIC = {f"{ACTOR}.use_dynamic_bsz": True}
PACKED = {f"{MODEL}.use_remove_padding": True}

Row = tuple[str, Any, Any, str, Any]

DATA: list[Row] = [
    ("data.tokenizer", "other/tokenizer", 1, "policy.tokenizer", "other/tokenizer"),
    ("data.train_files", ["a.parquet", "b.parquet"], 1, "data.train_files", ("a.parquet", "b.parquet")),
    ("data.val_files", "c.parquet", None, "data.validation_files", ("c.parquet",)),
    ("data.prompt_key", "question", 1, "data.prompt_key", "question"),
    ("data.max_prompt_length", 1024, 0, "rollout.max_prompt_tokens", 1024),
    ("data.max_response_length", 2048, "long", "rollout.max_response_tokens", 2048),
    ("data.train_batch_size", 512, 0, "training.groups_per_step", 512),
    ("data.return_raw_input_ids", True, 1, "data.keep_raw_tokens", True),
    ("data.return_raw_chat", True, "yes", "data.keep_messages", True),
    ("data.return_full_prompt", True, 0, "data.keep_text", True),
    ("data.shuffle", False, 0, "data.shuffle", False),
    ("data.filter_overlong_prompts", True, 1, "data.filter_long_prompts", True),
    ("data.filter_overlong_prompts_workers", 8, 0, "data.filter_workers", 8),
    ("data.truncation", "middle", "start", "data.truncation", "middle"),
    ("data.image_key", "pictures", None, "data.image_key", "pictures"),
    ("data.trust_remote_code", False, 1, "policy.trust_tokenizer_code", False),
    ("data.custom_cls.path", "mine.py", 1, "data.dataset_class", "mine.py:Mine"),
    ("data.custom_cls.name", "Other", 1, "data.dataset_class", "mine.py:Other"),
    ("reward_model.enable", True, 1, "reward.model.path", "~/models/Anomy-RM-v0.1"),
    ("reward_model.model.input_tokenizer", "some/tokenizer", 1, "reward.model.tokenizer", "some/tokenizer"),
    ("reward_model.model.path", "some/judge", 1, "reward.model.path", "some/judge"),
    ("reward_model.model.external_lib", "plug.ins", 1, "reward.model.external_libs", ("plug.ins",)),
    ("reward_model.model.trust_remote_code", True, 1, "reward.model.trust_remote_code", True),
    ("reward_model.model.fsdp_config.min_num_params", 9, -1, "reward.model.min_sharded_parameters", 9),
    ("reward_model.model.fsdp_config.param_offload", True, 1, "reward.model.offload_parameters", True),
    ("reward_model.micro_batch_size_per_gpu", 4, 0, "reward.model.sequences_per_pass", 4),
    ("reward_model.max_length", 2048, 0, "reward.model.max_tokens", 2048),
    ("reward_model.reward_manager", "dapo", "clever", "reward.manager", "dapo"),
    ("custom_reward_function.path", "rules.py", 1, "reward.function", "rules.py:compute_score"),
    ("custom_reward_function.name", "mine", 1, "reward.function", "rules.py:mine"),
    ("algorithm.gamma", 0.9, 1.5, "algorithm.advantage.gamma", 0.9),
    ("algorithm.lam", 0.95, -1, "algorithm.advantage.lam", 0.95),
    ("algorithm.adv_estimator", "grpo", "grpoo", "algorithm.advantage.name", "grpo"),
    ("algorithm.use_kl_in_reward", True, 1, "algorithm.kl.apply_to", "reward"),
    ("algorithm.kl_penalty", "low_var_kl", "klll", "algorithm.kl.estimator", "k3"),
    ("algorithm.kl_ctrl.type", "adaptive", "wild", "algorithm.kl.target", 0.1),
    ("algorithm.kl_ctrl.kl_coef", 0.01, -1, "algorithm.kl.coefficient", 0.01),
    ("algorithm.kl_ctrl.horizon", 500, 0, "algorithm.kl.horizon", 500),
    ("algorithm.kl_ctrl.target_kl", 0.5, 0, "algorithm.kl.target", 0.5),
]
TRAINER: list[Row] = [
    ("trainer.total_epochs", 15, 0, "data.epochs", 15),
    ("trainer.project_name", "mine", None, "tracking.project", "mine"),
    ("trainer.experiment_name", "mine", 1, "name", "mine"),
    ("trainer.logger", ["console", "file"], ["konsole"], "tracking.loggers", ("jsonl", "console", "file")),
    ("trainer.log_val_generations", 5, -1, "tracking.validation_generations", 5),
    ("trainer.nnodes", 2, 0, "placement.nodes", 2),
    ("trainer.n_gpus_per_node", 4, 0, "placement.devices_per_node", 4),
    ("trainer.save_freq", 20, -2, "checkpoint.every_steps", 20),
    ("trainer.val_before_train", False, 0, "validation.before_training", False),
    ("trainer.test_freq", -1, "never", "validation.every_steps", -1),
    ("trainer.critic_warmup", 10, -1, "critic.warmup_steps", 10),
    ("trainer.default_hdfs_dir", "hdfs://there", 1, "checkpoint.remote_dir", "hdfs://there"),
    ("trainer.default_local_dir", "/big/disk/gsm8k", 1, "output_dir", "/big/disk"),
    ("trainer.resume_mode", "disable", "never", "resume", "never"),
    ("trainer.resume_from_path", "old/global_step_20", 1, "resume", "old/global_step_20"),
    ("trainer.remove_previous_ckpt_in_save", True, 1, "checkpoint.keep", 1),
    ("trainer.del_local_ckpt_after_load", True, 1, "checkpoint.delete_after_load", True),
    ("trainer.ray_wait_register_center_timeout", 900, 0, "placement.join_timeout_seconds", 900),
]
POLICY: list[Row] = [
    ("actor_rollout_ref.hybrid_engine", False, 1, "placement.colocated", False),
    (f"{MODEL}.path", "other/model", None, "policy.path", "other/model"),
    (f"{MODEL}.external_lib", ["a", "b"], 1, "external_libs", ("a", "b")),
    (f"{MODEL}.override_config.model_config", {"dropout": 0.1}, 1, "policy.overrides.dropout", 0.1),
    (f"{MODEL}.override_config.moe_config.freeze_moe_router", True, 1, "policy.freeze_router", True),
    (f"{MODEL}.enable_gradient_checkpointing", True, 1, "actor.gradient_checkpointing", True),
    (f"{MODEL}.enable_activation_offload", True, 1, "actor.memory.offload_activations", True),
    (f"{MODEL}.trust_remote_code", True, 1, "policy.trust_remote_code", True),
    (f"{MODEL}.use_remove_padding", True, 1, "reference.memory.remove_padding", True),
    (f"{ACTOR}.strategy", "fsdp2", "ddp", "actor.backend", "fsdp2"),
    (f"{ACTOR}.ppo_mini_batch_size", 128, 0, "training.mini_batches", 8),
    (f"{ACTOR}.ppo_micro_batch_size", 64, 0, "actor.budget.sequences", 8),
    (f"{ACTOR}.ppo_micro_batch_size_per_gpu", 4, 0, "actor.budget.sequences", 4),
    (f"{ACTOR}.use_dynamic_bsz", True, 1, "actor.budget.tokens", 16384),
    (f"{ACTOR}.ppo_max_token_len_per_gpu", 24000, 0, "actor.budget.tokens", 24000),
    (f"{ACTOR}.grad_clip", 0.5, 0, "actor.optimizer.max_grad_norm", 0.5),
    (f"{ACTOR}.clip_ratio", 0.3, 1.0, "algorithm.loss.clip_high", 0.3),
    (f"{ACTOR}.entropy_coeff", 0.01, -1, "algorithm.entropy_coefficient", 0.01),
    (f"{ACTOR}.use_kl_loss", True, 1, "algorithm.kl.apply_to", "loss"),
    (f"{ACTOR}.use_torch_compile", False, 0, "actor.memory.torch_compile", False),
    (f"{ACTOR}.kl_loss_coef", 0.01, -1, "algorithm.kl.coefficient", 0.01),
    (f"{ACTOR}.kl_loss_type", "mse", "msee", "algorithm.kl.estimator", "k2"),
    (f"{ACTOR}.ppo_epochs", 2, 0, "training.epochs", 2),
    (f"{ACTOR}.data_loader_seed", 7, -1, "actor.shuffle_seed", 7),
    (f"{ACTOR}.shuffle", True, 1, "actor.shuffle", True),
    (f"{ACTOR}.ulysses_sequence_parallel_size", 2, 0, "actor.parallel.ulysses", 2),
    (f"{OPTIM}.lr", 3e-6, 0, "actor.optimizer.learning_rate", 3e-6),
    (f"{OPTIM}.lr_warmup_steps", 10, -2, "actor.optimizer.warmup_steps", 10),
    (f"{OPTIM}.lr_warmup_steps_ratio", 0.25, 2, "actor.optimizer.warmup_ratio", 0.25),
    (f"{OPTIM}.min_lr_ratio", 0.1, 2, "actor.optimizer.min_learning_rate_ratio", 0.1),
    (f"{OPTIM}.num_cycles", 1.5, 0, "actor.optimizer.cycles", 1.5),
    (f"{OPTIM}.warmup_style", "cosine", "linear", "actor.optimizer.schedule", "cosine"),
    (f"{OPTIM}.total_training_steps", 100, -2, "training.steps", 100),
    (f"{FSDP}.wrap_policy.min_num_params", 1000, -1, "actor.sharding.min_parameters", 1000),
    (f"{FSDP}.param_offload", True, 1, "actor.memory.offload_parameters", True),
    (f"{FSDP}.optimizer_offload", True, 1, "actor.memory.offload_optimizer", True),
    (f"{FSDP}.fsdp_size", 4, 0, "actor.sharding.group_size", 4),
    (f"{ACTOR}.checkpoint.save_contents", ["model", "hf_model"], ["all"], "checkpoint.contents", ("model", "hf_model")),
    (f"{ACTOR}.checkpoint.load_contents", ["model"], "model", "checkpoint.load_contents", ("model",)),
    (f"{REF}.fsdp_config.param_offload", True, 1, "reference.memory.offload_parameters", True),
    (f"{REF}.fsdp_config.wrap_policy.min_num_params", 9, -1, "reference.sharding.min_parameters", 9),
    (f"{REF}.log_prob_micro_batch_size", 64, 0, "reference.inference_budget.sequences", 8),
    (f"{REF}.log_prob_micro_batch_size_per_gpu", 4, 0, "reference.inference_budget.sequences", 4),
    (f"{REF}.log_prob_use_dynamic_bsz", True, 1, "reference.inference_budget.tokens", 16384),
    (f"{REF}.log_prob_max_token_len_per_gpu", 32768, 0, "reference.inference_budget.tokens", 32768),
    (f"{REF}.ulysses_sequence_parallel_size", 4, 0, "reference.parallel.ulysses", 4),
]
PLAYED: list[Row] = [
    (f"{ROLLOUT}.name", "sglang_async", "tgi", "rollout.engine", "sglang"),
    (f"{ROLLOUT}.temperature", 0.7, 0, "rollout.temperature", 0.7),
    (f"{ROLLOUT}.top_k", 50, -2, "rollout.top_k", 50),
    (f"{ROLLOUT}.top_p", 0.9, 0, "rollout.top_p", 0.9),
    (f"{ROLLOUT}.prompt_length", 1024, 0, "rollout.max_prompt_tokens", 1024),
    (f"{ROLLOUT}.response_length", 1024, 0, "rollout.max_response_tokens", 1024),
    (f"{ROLLOUT}.dtype", "float", "int8", "policy.dtype", "float32"),
    (f"{ROLLOUT}.gpu_memory_utilization", 0.6, 0, f"{ENGINE}.memory_share", 0.6),
    (f"{ROLLOUT}.ignore_eos", True, 1, "rollout.ignore_end", True),
    (f"{ROLLOUT}.enforce_eager", False, 0, f"{ENGINE}.eager", False),
    (f"{ROLLOUT}.free_cache_engine", False, 0, f"{ENGINE}.sleep_between_steps", False),
    (f"{ROLLOUT}.load_format", "safetensors", "zip", f"{ENGINE}.load_format", "safetensors"),
    (f"{ROLLOUT}.tensor_model_parallel_size", 4, 0, f"{ENGINE}.tensor_parallel", 4),
    (f"{ROLLOUT}.max_num_batched_tokens", 4096, 0, f"{ENGINE}.max_batched_tokens", 4096),
    (f"{ROLLOUT}.max_num_seqs", 256, 0, "rollout.max_concurrent", 256),
    (f"{ROLLOUT}.log_prob_micro_batch_size", 64, 0, "actor.inference_budget.sequences", 8),
    (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", 4, 0, "actor.inference_budget.sequences", 4),
    (f"{ROLLOUT}.log_prob_use_dynamic_bsz", True, 1, "actor.inference_budget.tokens", 16384),
    (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", 32768, 0, "actor.inference_budget.tokens", 32768),
    (f"{ROLLOUT}.do_sample", False, 0, "rollout.do_sample", False),
    (f"{ROLLOUT}.engine_kwargs.vllm.swap_space", 32, 0, f"{ENGINE}.swap_space_gib", 32),
    (f"{ROLLOUT}.engine_kwargs.vllm.disable_mm_preprocessor_cache", True, 1, f"{ENGINE}.image_cache", False),
    (f"{ROLLOUT}.engine_kwargs.sglang.attention_backend", "triton", "mine", f"{ENGINE}.attention_backend", "triton"),
    (f"{ROLLOUT}.n", 8, 0, "training.samples_per_group", 8),
    (f"{ROLLOUT}.val_kwargs.top_k", 20, -2, "validation.sampling.top_k", 20),
    (f"{ROLLOUT}.val_kwargs.top_p", 0.7, 0, "validation.sampling.top_p", 0.7),
    (f"{ROLLOUT}.val_kwargs.temperature", 0.6, -1, "validation.sampling.temperature", 0.6),
    (f"{ROLLOUT}.val_kwargs.n", 4, 0, "validation.sampling.samples", 4),
    (f"{ROLLOUT}.val_kwargs.do_sample", True, 1, "validation.sampling.do_sample", True),
]
OTHERS: dict[str, dict[str, Any]] = {
    "data.custom_cls.path": {"data.custom_cls.name": "Mine"},
    "data.custom_cls.name": {"data.custom_cls.path": "mine.py"},
    "reward_model.reward_manager": OVERLONG,
    "custom_reward_function.name": {"custom_reward_function.path": "rules.py"},
    "algorithm.adv_estimator": {f"{ROLLOUT}.n": 8},
    "algorithm.kl_ctrl.target_kl": {"algorithm.kl_ctrl.type": "adaptive"},
    "trainer.resume_from_path": {"trainer.resume_mode": "resume_path"},
    f"{ACTOR}.ppo_max_token_len_per_gpu": DYNAMIC,
    f"{ACTOR}.clip_ratio": dict.fromkeys((f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")),
    f"{ACTOR}.ulysses_sequence_parallel_size": PACKED,
    f"{REF}.log_prob_micro_batch_size": IN_LOSS,
    f"{REF}.log_prob_micro_batch_size_per_gpu": IN_LOSS,
    f"{REF}.log_prob_use_dynamic_bsz": IN_LOSS,
    f"{REF}.log_prob_max_token_len_per_gpu": {**IN_LOSS, **DYNAMIC},
    f"{REF}.ulysses_sequence_parallel_size": {**IN_LOSS, **PACKED},
    f"{ROLLOUT}.prompt_length": {"data.max_prompt_length": 1024},
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": {f"{ROLLOUT}.log_prob_use_dynamic_bsz": True},
    "model.fsdp_config.cpu_offload": {"model.fsdp_config.offload_params": True},
    "model.lora_alpha": {"model.lora_rank": 8},
    "model.target_modules": {"model.lora_rank": 8},
    "data.response_dict_keys": {"data.response_key": "answer"},
}
"""Other keys that a key needs, in addition to its condition in the ledger."""
OF_MEGATRON: list[Row] = [
    ("optimizer", "sgd", "lion", "actor.optimizer.kind", "sgd"),
    ("lr", 3e-6, 0, "actor.optimizer.learning_rate", 3e-6),
    ("clip_grad", 0, -1, "actor.optimizer.max_grad_norm", 1e12),
    ("total_training_steps", 100, -2, "training.steps", 100),
    ("lr_warmup_init", 1e-7, -1, "actor.optimizer.warmup_start", 1e-7),
    ("lr_warmup_steps", 10, -2, "actor.optimizer.warmup_steps", 10),
    ("lr_warmup_steps_ratio", 0.25, 2, "actor.optimizer.warmup_ratio", 0.25),
    ("lr_decay_steps", 50, 0, "actor.optimizer.decay_steps", 50),
    ("lr_decay_style", "inverse-square-root", "steep", "actor.optimizer.schedule", "inverse_square_root"),
    ("min_lr", 5e-7, -1, "actor.optimizer.min_learning_rate_ratio", 0.5),
    ("weight_decay", 0.1, -1, "actor.optimizer.weight_decay", 0.1),
    ("weight_decay_incr_style", "cosine", "wsd", "actor.optimizer.weight_decay_schedule", "cosine"),
    ("lr_wsd_decay_style", "minus_sqrt", "steep", "actor.optimizer.stable_decay", "minus_sqrt"),
    ("lr_wsd_decay_steps", 20, 0, "actor.optimizer.stable_decay_steps", 20),
    ("use_checkpoint_opt_param_scheduler", True, 1, "actor.megatron.use_checkpoint_opt_param_scheduler", True),
]
OF_SFT: list[Row] = [
    ("optim.lr", 2e-5, 0, "sft.optimizer.learning_rate", 2e-5),
    ("optim.weight_decay", 0.1, -1, "sft.optimizer.weight_decay", 0.1),
    ("optim.warmup_steps_ratio", 0.2, 2, "sft.warmup_ratio", 0.2),
    ("optim.clip_grad", 0.5, 0, "sft.optimizer.max_grad_norm", 0.5),
    ("optim.lr_scheduler", "wsd", "steep", "sft.optimizer.schedule", "wsd"),
    ("model.partial_pretrain", "other/model", 1, "sft.path", "other/model"),
    ("model.fsdp_config.model_dtype", "bf16", "int8", "policy.dtype", "bfloat16"),
    ("model.fsdp_config.wrap_policy.min_num_params", 9, -1, "actor.sharding.min_parameters", 9),
    ("model.fsdp_config.cpu_offload", True, 1, "actor.memory.sharded_offload", True),
    ("model.fsdp_config.offload_params", True, 1, "actor.memory.sharded_offload", True),
    ("model.external_lib", "plug.ins", 1, "external_libs", ("plug.ins",)),
    ("model.enable_gradient_checkpointing", True, 1, "sft.gradient_checkpointing", True),
    ("model.trust_remote_code", True, 1, "policy.trust_remote_code", True),
    ("model.lora_rank", 32, -1, "sft.lora.rank", 32),
    ("model.lora_alpha", 32, 0, "sft.lora.alpha", 32),
    ("model.target_modules", ["q_proj", "v_proj"], 1, "sft.lora.target_modules", ("q_proj", "v_proj")),
    ("model.use_liger", True, 1, "sft.liger", True),
]
OF_EVALUATION: list[Row] = [
    ("data.path", "other.parquet", None, "evaluation.path", "other.parquet"),
    ("data.prompt_key", "question", 1, "evaluation.prompt_key", "question"),
    ("data.response_key", "answers", 1, "evaluation.response_key", "answers"),
    ("data.data_source_key", "origin", 1, "evaluation.source_key", "origin"),
    ("data.reward_model_key", "truth", 1, "evaluation.truth_key", "truth"),
    ("custom_reward_function.path", "rules.py", 1, "evaluation.function", "rules.py:compute_score"),
    ("custom_reward_function.name", "mine", None, "evaluation.function", "rules.py:mine"),
]
OF_AN_SFT_RUN: list[Row] = [
    ("data.prompt_dict_keys", ["question"], "question", "data.prompt_key", "question.question"),
    ("data.response_key", "answer", 1, "data.response_key", "answer"),
    ("data.response_dict_keys", ["text"], 1, "data.response_key", "answer.text"),
    ("data.multiturn.enable", True, 1, "data.messages_key", "messages"),
    ("data.multiturn.messages_key", "chat", 1, "data.messages_key", "chat"),
    ("data.max_length", 512, 0, "sft.max_tokens", 512),
    ("data.micro_batch_size_per_gpu", 2, 0, "sft.sequences_per_pass", 2),
    ("data.micro_batch_size", 2, 0, "sft.sequences_per_pass", 2),
    ("optim.betas", [0.8, 0.9], 1, "sft.optimizer.betas", (0.8, 0.9)),
    ("optim.betas", "[0.8, 0.9]", "0.8", "sft.optimizer.betas", (0.8, 0.9)),
    ("data.val_files", None, 1, "data.validation_files", ()),
    ("model.strategy", "fsdp", "ddp", "actor.backend", "fsdp"),
    ("trainer.total_training_steps", 20, 0, "data.max_steps", 20),
    ("trainer.seed", 7, -1, "seed", 7),
]
CASES: list[tuple[dict[str, Any], Row]] = [
    *((PPO, row) for row in (*DATA, *TRAINER, *POLICY, *PLAYED)),
    *((MEGATRON, (f"{OPTIM}.{row[0]}", *row[1:])) for row in OF_MEGATRON),
    *((SFT, row) for row in (*OF_SFT, *OF_AN_SFT_RUN)),
    *((EVALUATION, row) for row in OF_EVALUATION),
]
NAMES = [f"{next(iter(plain))}:{row[0]}" for plain, row in CASES]


def needed(plain: dict[str, Any], key: str) -> dict[str, Any]:
    """Values of other keys with which a key has an effect."""
    specs, values = DIALECTS["verl"].narrowed(plain).specs(), dict(OTHERS.get(key, {}))
    while key in specs and (condition := specs[key].only_if):
        key, value = condition
        values.setdefault(key, value.choices[0] if isinstance(value, ValueType) else value)
    return values


KEYS_UNTIL_0_3 = ("reward_model.model.fsdp_config.min_num_params", "trainer.remove_previous_ckpt_in_save")
"""Keys that only early releases have, whose loss has no dual clip."""


@pytest.mark.proves("verl", *(row[0] for _, row in CASES), *(f"optim.{case[0]}" for case in OF_MEGATRON))
@pytest.mark.parametrize(("plain", "row"), CASES, ids=NAMES)
def test_a_key_reaches_the_run(tmp_path: Path, plain: dict[str, Any], row: Row) -> None:
    key, value, illegal, native, expected = row
    others = needed(plain, key)
    found = converted(tmp_path, "verl", changed(plain, {**others, key: value}))
    assert natively(found, native) == expected
    places = found.composed.provenance
    assert key in places.get(native, "") or key in places.get(native.rpartition(".")[0], "")
    # newer releases, whose names a translation has, cannot leave out the dual clip
    lost = {"algorithm.loss.clip_dual": (None, 3.0)} if key in KEYS_UNTIL_0_3 else {}
    assert translated(found, "verl").lost == lost
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, "verl", changed(plain, {**others, key: illegal}))
    assert key in str(error.value)


def test_each_key_has_a_row_in_these_tables() -> None:
    tables = {
        "verl_ppo_trainer": (*DATA, *TRAINER, *POLICY, *PLAYED),
        "verl_megatron_optim": [(f"optim.{row[0]}", *row[1:]) for row in OF_MEGATRON],
        "verl_sft_trainer": OF_SFT,
        "verl_evaluation": OF_EVALUATION,
    }
    for reference in DIALECTS["verl"].references:
        assert {row.key for row in reference.load()} == {row[0] for row in tables[reference.name]}


def told(tmp_path: Path, plain: dict[str, Any], changes: dict[str, Any]) -> str:
    """What is said against such a file."""
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, "verl", changed(plain, changes))
    return str(error.value)


FAULTS: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (PPO, {f"{ACTOR}.ppo_mini_batch_size": 300}, ("ppo_mini_batch_size = 300", "1024", "ppo_mini_batch_size=256")),
    (PPO, {"data.train_batch_size": 64}, ("ppo_mini_batch_size = 256 (reference)", "64 prompts", "batch_size=64")),
    (
        PPO,
        {"data.train_batch_size": 100, f"{ACTOR}.ppo_mini_batch_size": 100, f"{ROLLOUT}.n": 5},
        ("data.train_batch_size = 100", "rollout.n = 5", "500 sequences", "n_gpus_per_node = 8", "batch_size=96"),
    ),
    (
        PPO,
        {f"{ACTOR}.ppo_micro_batch_size": 64, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8},
        ("ppo_micro_batch_size = 64", "ppo_micro_batch_size_per_gpu = 8", "ppo_micro_batch_size=null"),
    ),
    (PPO, {f"{ACTOR}.ppo_micro_batch_size": 20}, ("multiple of 8", "n_gpus_per_node", "ppo_micro_batch_size=16")),
    (PPO, {f"{REF}.log_prob_micro_batch_size": 12, **IN_LOSS}, ("ref.log_prob_micro_batch_size = 12", "=16")),
    (PPO, {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 12}, ("the 32 sequences that one GPU has", "per_gpu=8")),
    (
        PPO,
        {**DYNAMIC, f"{ACTOR}.ppo_max_token_len_per_gpu": 1000},
        (
            "ppo_max_token_len_per_gpu = 1000",
            "1024 tokens",
            "max_prompt_length = 512",
            "ppo_max_token_len_per_gpu=1024",
        ),
    ),
    (
        PPO,
        {f"{ROLLOUT}.log_prob_use_dynamic_bsz": True, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 100},
        ("rollout.log_prob_max_token_len_per_gpu = 100", "at least"),
    ),
    (
        PPO,
        {f"{ACTOR}.ulysses_sequence_parallel_size": 2, f"{MODEL}.use_remove_padding": False},
        ("ulysses_sequence_parallel_size = 2", "padding=true"),
    ),
    (PPO, {**PACKED, f"{ACTOR}.ulysses_sequence_parallel_size": 3}, ("must divide the 8 GPUs", "size=2")),
    (PPO, {f"{ROLLOUT}.tensor_model_parallel_size": 3}, ("must divide the 8 GPUs", "parallel_size=2")),
    (PPO, {"trainer.n_gpus_per_node": 1}, ("tensor_model_parallel_size = 2 (reference)", "parallel_size=1")),
    (
        PPO,
        {"algorithm.adv_estimator": "grpo_passk"},
        ("rollout.n = 1 (reference)", "adv_estimator = 'grpo_passk'", "rollout.n=2"),
    ),
    (PPO, {f"{ROLLOUT}.do_sample": False, f"{ROLLOUT}.n": 8}, ("do_sample = false", "rollout.n = 8")),
    (PPO, {f"{ROLLOUT}.prompt_length": 700}, ("prompt_length = 700", "data.max_prompt_length = 512")),
    (
        PPO,
        {f"{ROLLOUT}.response_length": 700, "data.max_response_length": 600},
        ("response_length = 700", "data.max_response_length = 600"),
    ),
    (PPO, {"trainer.resume_mode": "resume_path"}, ("resume_mode = 'resume_path'", "resume_from_path")),
    (PPO, {"data.custom_cls.path": "mine.py"}, ("data.custom_cls.path", "data.custom_cls.name")),
    (MEGATRON, {f"{OPTIM}.min_lr": 1e-5}, ("min_lr = 1e-05", "lr = 1e-06", "at most")),
    (MEGATRON, {f"{OPTIM}.lr_decay_steps": 5, f"{OPTIM}.lr_warmup_steps": 9}, ("lr_decay_steps = 5", "steps=10")),
    (MEGATRON, {f"{OPTIM}.clip_grad": 1.0, f"{ACTOR}.grad_clip": 2.0}, ("grad_clip = 2.0", "clip_grad = 1.0")),
    (PPO, {"critic.ppo_mini_batch_size": 64}, ("critic.ppo_mini_batch_size = 64", "mini_batch_size = 256", "leave")),
    (PPO, {"critic.clip_ratio": 0.1}, ("critic.clip_ratio = 0.1", "actor.clip_ratio = 0.2")),
    (PPO, {"critic.strategy": "megatron"}, ("critic.strategy = 'megatron'", "actor.strategy = 'fsdp'")),
    (
        PPO,
        {"critic.ulysses_sequence_parallel_size": 2, "critic.model.use_remove_padding": False},
        ("critic.ulysses", "critic.model.use_remove_padding=true"),
    ),
    (PPO, {"critic.ppo_micro_batch_size_per_gpu": 12}, ("critic.ppo_micro_batch_size_per_gpu = 12", "per_gpu=8")),
    (PPO, {f"{ACTOR}.optimm.lr": 1}, ("unknown key", "did you mean")),
    (SFT, {"optim.lr_decay": 1}, ("optim.lr_decay",)),
]


@pytest.mark.parametrize(("plain", "changes", "words"), FAULTS, ids=[next(iter(one[1])) for one in FAULTS])
def test_keys_that_contradict_each_other_are_told(
    tmp_path: Path, plain: dict[str, Any], changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    message = told(tmp_path, plain, changes)
    for word in words:
        assert word in message


def test_dynamic_batches_hold_tokens_and_no_sequences(tmp_path: Path) -> None:
    tree = changed(PPO, {**DYNAMIC, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 5, f"{ACTOR}.ppo_micro_batch_size": 3})
    found = converted(tmp_path, "verl", changed(tree, {f"{ACTOR}.ppo_micro_batch_size": None}))
    assert natively(found, "actor.budget.sequences") is None
    assert natively(found, "critic.budget.tokens") == 16384
    assert natively(found, "actor.inference_budget.tokens") == 16384


def test_sequences_for_all_gpus_are_shared_out_over_those_that_have_their_own(tmp_path: Path) -> None:
    together = {**PACKED, f"{ACTOR}.ulysses_sequence_parallel_size": 2, "trainer.nnodes": 2}
    found = converted(tmp_path, "verl", changed(PPO, {**together, f"{ACTOR}.ppo_micro_batch_size": 32}))
    assert natively(found, "actor.budget.sequences") == 4


def test_steps_that_are_given_say_how_long_a_warmup_is(tmp_path: Path) -> None:
    ratio = {f"{OPTIM}.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": 200}
    found = converted(tmp_path, "verl", changed(PPO, ratio))
    assert natively(found, "training.steps") == 200
    assert natively(found, "data.epochs") is None
    assert natively(found, "actor.optimizer.warmup_steps") == 20
    assert natively(found, "actor.optimizer.warmup_ratio") == 0
    first = converted(tmp_path, "verl", changed(PPO, {**ratio, f"{OPTIM}.lr_warmup_steps": 0}))
    assert natively(first, "actor.optimizer.warmup_steps") == 0


CRITIC: list[tuple[str, Any, str, Any]] = [
    ("critic.optim.lr", 2e-5, "critic.optimizer.learning_rate", 2e-5),
    ("critic.optim.lr_warmup_steps", 7, "critic.optimizer.warmup_steps", 7),
    ("critic.optim.warmup_style", "cosine", "critic.optimizer.schedule", "cosine"),
    ("critic.grad_clip", 0.5, "critic.optimizer.max_grad_norm", 0.5),
    ("critic.ppo_micro_batch_size_per_gpu", 4, "critic.inference_budget.sequences", 4),
    ("critic.ppo_micro_batch_size", 16, "critic.budget.sequences", 2),
    ("critic.use_dynamic_bsz", True, "critic.budget.tokens", 16384),
    ("critic.strategy", "fsdp2", "critic.backend", "fsdp2"),
    ("critic.model.path", "other/model", "critic.path", "other/model"),
    ("critic.model.path", "some/model", "critic.path", None),
    ("critic.model.use_remove_padding", True, "critic.memory.remove_padding", True),
    ("critic.model.enable_gradient_checkpointing", False, "critic.gradient_checkpointing", False),
    ("critic.model.enable_activation_offload", True, "critic.memory.offload_activations", True),
    ("critic.model.fsdp_config.param_offload", True, "critic.memory.offload_parameters", True),
    ("critic.fsdp_config.fsdp_size", 2, "critic.sharding.group_size", 2),
    ("critic.ppo_mini_batch_size", 256, "training.mini_batches", 4),
]


@pytest.mark.parametrize(("key", "value", "native", "expected"), CRITIC)
def test_the_critic_takes_the_keys_of_the_actor(
    tmp_path: Path, key: str, value: Any, native: str, expected: Any
) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {key: value}))
    assert natively(found, native) == expected
    assert translated(found, "verl").lost == {}


def test_a_critic_of_which_nothing_is_said_is_verls_own(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {f"{OPTIM}.lr": 5e-7, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4}))
    assert natively(found, "critic.optimizer.learning_rate") == 1e-5
    assert natively(found, "critic.value_clip") == 0.5
    assert natively(found, "critic.budget.sequences") == 4


def test_megatrons_optimizer_is_the_critics_too(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", changed(MEGATRON, {"critic.optim.min_lr": 1e-6, "critic.optim.clip_grad": 0}))
    assert natively(found, "critic.optimizer.min_learning_rate_ratio") == pytest.approx(0.1)
    assert natively(found, "critic.optimizer.max_grad_norm") == 1e12
    assert natively(found, "critic.backend") == "megatron"
    assert translated(found, "verl").lost == {}


def test_an_engine_without_parts_isnt_split(tmp_path: Path) -> None:
    alone = {f"{ROLLOUT}.name": "hf", "trainer.n_gpus_per_node": 1}
    found = converted(tmp_path, "verl", changed(PPO, alone))
    assert natively(found, f"{ENGINE}.tensor_parallel") == 1
    assert translated(found, "verl").lost == {}


def test_without_a_divergence_there_is_no_reference(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {f"{REF}.log_prob_micro_batch_size_per_gpu": 4}))
    assert found.composed.experiment.algorithm.kl is None
    assert natively(found, "reference.inference_budget.sequences") is None


@pytest.mark.parametrize(
    ("changes", "above", "name"),
    [
        ({"trainer.experiment_name": "a"}, "checkpoints/verl_examples", "a"),
        ({"trainer.default_local_dir": "ckpt"}, ".", "ckpt"),
        ({"trainer.default_local_dir": "/ckpt/"}, "/", "ckpt"),
        ({"trainer.default_local_dir": "/disk/runs", "trainer.experiment_name": "a"}, "/disk/runs", "a"),
    ],
)
def test_a_run_lies_where_its_checkpoints_are_wanted(
    tmp_path: Path, changes: dict[str, Any], above: str, name: str
) -> None:
    found = converted(tmp_path, "verl", changed(PPO, changes))
    assert (natively(found, "output_dir"), natively(found, "name")) == (above, name)
    assert translated(found, "verl").lost == {}


@pytest.mark.parametrize("reference", DIALECTS["verl"].references, ids=lambda one: one.name)
def test_other_spellings_are_read_as_the_documented_key(tmp_path: Path, reference: Reference) -> None:
    plain: dict[str, dict[str, Any]] = {"verl_ppo_trainer": PPO, "verl_megatron_optim": MEGATRON}
    inside = f"{ACTOR}." if reference.name == "verl_megatron_optim" else ""
    values = {row[0]: row[1] for _, row in CASES}
    for row in reference.load():
        for alias in row.aliases:
            spelt = f"{inside}{alias}" if alias.startswith("optim.") else alias
            base = plain.get(reference.name, {})
            tree = changed(base, {**needed(base, row.key), spelt: values[f"{inside}{row.key}"]})
            remarks = converted(tmp_path, "verl", tree).composed.remarks
            is_noted = any(remark.startswith(f"{spelt} (") for remark in remarks)
            assert is_noted != (alias == row.wins), "verl's own name needs no remark"


def test_supervised_fine_tuning_takes_its_data_and_its_trainers_keys(tmp_path: Path) -> None:
    tree = changed(SFT, {"data.train_files": "train.parquet", "data.train_batch_size": 64, "trainer.total_epochs": 3})
    found = converted(tmp_path, "verl", changed(tree, {"trainer.default_local_dir": "sft/gsm8k"}))
    assert natively(found, "sft.batch") == 64
    assert natively(found, "sft.epochs") == 3
    assert natively(found, "data.train_files") == ("train.parquet",)
    assert natively(found, "name") == "gsm8k"
    assert found.composed.experiment.policy.preset is None
    assert translated(found, "verl").lost == {}


GROUP_OPTIONS = {"normalize_by_std": True, "length_weight": False, "deviation_weight": False, "whiten": False}
ESTIMATORS: list[tuple[str, dict[str, Any]]] = [
    ("gae", {"name": "gae", "gamma": 0.9, "lam": 0.8, "whiten": True}),
    ("grpo_vectorized", {"name": "grpo"} | GROUP_OPTIONS),
    ("grpo_passk", {"name": "grpo_passk"} | GROUP_OPTIONS),
    ("gdpo", {"name": "gdpo", "weights": {}, "normalize_by_std": True, "whiten": True}),
    ("rloo", {"name": "rloo", "whiten": False}),
    ("rloo_vectorized", {"name": "rloo", "whiten": False}),
    ("opo", {"name": "opo", "whiten": False}),
    ("remax", {"name": "remax", "whiten": False}),
    ("gpg", {"name": "gpg", "whiten": False}),
    ("reinforce_plus_plus", {"name": "reinforce_plus_plus", "gamma": 0.9, "whiten": True}),
    ("reinforce_plus_plus_baseline", {"name": "reinforce_plus_plus_baseline", "whiten": True}),
    ("optimal_token_baseline", {"name": "optimal_token_baseline", "zero_tail": True, "whiten": False}),
    ("tir_optimal_token_baseline", {"name": "tir_optimal_token_baseline", "zero_tail": True, "whiten": False}),
    (
        "mine.py:advantage",
        {
            "name": "custom",
            "function": "mine.py:advantage",
            "options": {"gamma": 0.9, "lam": 0.8},
            "needs_critic": False,
            "whiten": False,
        },
    ),
]


@pytest.mark.parametrize(("written", "native"), ESTIMATORS, ids=[one[0] for one in ESTIMATORS])
def test_an_estimator_has_its_own_options_and_idle_keys_are_told(
    tmp_path: Path, written: str, native: dict[str, Any]
) -> None:
    keys = {"algorithm.adv_estimator": written, f"{ROLLOUT}.n": 8, "algorithm.gamma": 0.9, "algorithm.lam": 0.8}
    found = converted(tmp_path, "verl", changed(PPO, keys))
    assert found.composed.experiment.algorithm.advantage.model_dump() == native
    idle = {remark.split(" = ")[0] for remark in found.composed.remarks if "has no effect" in remark}
    has = native.get("options", native)
    assert idle == {f"algorithm.{option}" for option in ("gamma", "lam") if option not in has}
    assert translated(found, "verl").lost == {}


DIVERGENCES = [
    *(("kl", "k1"), ("k1", "k1"), ("abs", "abs"), ("mse", "k2"), ("k2", "k2"), ("low_var_kl", "k3"), ("k3", "k3")),
    *(("kl+", "k1+"), ("k1+", "k1+"), ("abs+", "abs+"), ("mse+", "k2"), ("k2+", "k2"), ("low_var_kl+", "k3+")),
    *(("k3+", "k3+"), ("full", "full")),
]


@pytest.mark.parametrize(("written", "native"), DIVERGENCES)
def test_every_name_of_a_divergence_is_known(tmp_path: Path, written: str, native: str) -> None:
    for others in ({**IN_LOSS, f"{ACTOR}.kl_loss_type": written}, {**IN_REWARD, "algorithm.kl_penalty": written}):
        found = converted(tmp_path, "verl", changed(PPO, others))
        assert natively(found, "algorithm.kl.estimator") == native
        assert found.unsupported == ()
        assert translated(found, "verl").lost == {}


def test_a_name_of_another_package_is_no_estimator(tmp_path: Path) -> None:
    assert "adv_estimator = 'mine'" in told(tmp_path, PPO, {"algorithm.adv_estimator": "mine"})


def test_the_column_of_images_is_read_in_prompts_and_in_fine_tuning(tmp_path: Path) -> None:
    for tree in (PPO, SFT):
        for keys, column in (({}, "images"), ({"data.image_key": "pictures"}, "pictures")):
            found = converted(tmp_path, "verl", changed(tree, keys))
            assert natively(found, "data.image_key") == column
            assert "data.image_key" not in {fault.key for fault in found.unsupported}
            assert translated(found, "verl").lost == {}


def test_an_evaluation_is_named_for_the_answers_that_it_judges(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", {"data": {"path": "~/results/Qwen2 7B (math).parquet"}})
    assert natively(found, "name") == "Qwen2-7B-math"
    assert translated(found, "verl").lost == {}


def test_fine_tuning_has_all_devices_of_its_trainer(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", changed(SFT, {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 4}))
    assert natively(found, "sft.devices") == 8
    assert {fault.key for fault in found.unsupported} == {"trainer.nnodes", "trainer.n_gpus_per_node"}


def test_verl_has_no_envs(tmp_path: Path) -> None:
    puzzle = converted(tmp_path, "ragen", {"rl_or_sft": "rl", "model": {"base_model": "some/model"}})
    with pytest.raises(ConfigError, match="no environment sokoban"):
        translated(puzzle, "verl")


def test_what_waits_is_told_by_the_keys_that_ask_for_it(tmp_path: Path) -> None:
    tree = changed(PPO, {"trainer.nnodes": 2, f"{ROLLOUT}.temperature": 0.7})
    waits = {fault.key for fault in converted(tmp_path, "verl", tree).unsupported}
    assert waits == {"trainer.nnodes"}


def test_steps_beside_epochs_end_the_run_at_whichever_comes_first(tmp_path: Path) -> None:
    both = {"trainer.total_epochs": 3, "actor_rollout_ref.actor.optim.total_training_steps": 50}
    found = converted(tmp_path, "verl", changed(PPO, both))
    assert (natively(found, "data.epochs"), natively(found, "data.max_steps")) == (3, 50)
    assert translated(found, "verl").lost == {}


def test_a_name_with_slashes_is_replaced(tmp_path: Path) -> None:
    """As in verl's `on_policy_distillation_trainer/run_qwen_gsm8k.sh` of 2026-04."""
    found = converted(
        tmp_path,
        "verl",
        changed(
            {}, {"actor_rollout_ref.model.path": "some/model", "trainer.experiment_name": "fsdp/student-Qwen2.5 0.5B/"}
        ),
    )
    assert natively(found, "name") == "fsdp-student-Qwen2.5-0.5B"
    assert any("trainer.experiment_name = 'fsdp/" in remark for remark in found.composed.remarks)


@pytest.mark.proves("verl", "data.gen_batch_size")
def test_prompts_of_a_generation_fill_a_step_or_a_round_of_dynamic_sampling(tmp_path: Path) -> None:
    """As in verl's `recipe/dapo/run_dapo_qwen2.5_32b.sh`, which filters; without a filter verl trains on all."""
    model = {"actor_rollout_ref.model.path": "some/model", "actor_rollout_ref.rollout.n": 2}
    keys = model | {"data.train_batch_size": 512, f"{ACTOR}.ppo_mini_batch_size": 32, "data.gen_batch_size": 1536}
    rounds = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 10}
    config = converted(tmp_path, "verl", changed({}, keys | rounds)).composed.experiment
    assert (config.training.groups_per_step, config.training.mini_batches) == (512, 16)
    assert (config.algorithm.filter.groups_per_round, config.algorithm.filter.refill_rounds) == (1536, 9)
    config = converted(tmp_path, "verl", changed({}, keys)).composed.experiment
    assert (config.training.groups_per_step, config.training.mini_batches) == (1536, 48)
    uneven = converted(tmp_path, "verl", changed({}, keys | {"data.gen_batch_size": 1000}))
    assert [problem.key for problem in uneven.unsupported] == ["data.gen_batch_size"]


def test_verls_own_name_of_the_number_of_steps_gets_no_remark(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {"trainer.total_training_steps": 7}))
    assert natively(found, "training.steps") == 7
    assert not [remark for remark in found.composed.remarks if "is read as" in remark]
    other = converted(tmp_path, "verl", changed(PPO, {f"{OPTIM}.lr_scheduler_type": "cosine"}))
    assert [remark for remark in other.composed.remarks if "is read as" in remark]
