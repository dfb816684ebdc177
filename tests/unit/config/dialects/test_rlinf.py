"""If these fail, an RLinf user's run is something else than what their file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively, translated

from quintet.config.dialects.composition.foreign_config import compose_config
from quintet.config.dialects.loader import convert
from quintet.config.dialects.registry import DIALECTS
from quintet.errors import ConfigError

EXAMPLES = Path(__file__).parents[4] / "examples" / "rlinf"
MATH: dict[str, Any] = {"runner": {"task_type": "math"}, "rollout": {"model": {"model_path": "some/model"}}}
SHARDED: dict[str, Any] = changed(MATH, {"actor.training_backend": "fsdp", "actor.model.precision": "fp32"})
EMBODIED: dict[str, Any] = {
    "runner": {"task_type": "embodied"},
    "algorithm": {"group_size": 4},
    "env": {
        "train": {"total_num_envs": 16, "max_episode_steps": 80},
        "eval": {"total_num_envs": 8, "max_episode_steps": 80},
    },
    "actor": {"model": {"model_path": "some/policy"}},
}
"""16 environments of 10 chunks each: 160 samples, one optimizer step of the reference's size."""
ENV: dict[str, Any] = {"env_type": "libero"}

Reached = tuple[str, Any, Any, str, Any] | tuple[str, Any, Any, str, Any, dict[str, Any]]
LINE = "cluster.component_placement.actor,inference,rollout"
CRITIC = {"algorithm.adv_type": "gae", "critic.use_critic_model": True}
ENGINE = "rollout.engine_options"
SERVED = {"rollout.backend": "vllm"}
BY_SGLANG = {"rollout.backend": "sglang"}
REINFORCED = {"algorithm.adv_type": "reinpp"}
BONUS = {"algorithm.entropy_bonus": 0.01}
FROM_CHECKPOINT = {"actor.megatron.use_hf_ckpt": False}
CHECKPOINT = {"actor.model.megatron_checkpoint": "weights"}
SPLIT = {**SERVED, "actor.model.tensor_model_parallel_size": 2}
COMPARED = {"rollout.validate_weight": True}
COMPILED = {**SERVED, "rollout.use_torch_compile": True}
NO_OVERLAP = {"actor.optim.overlap_param_gather": False}
DECAY_STEPS = {"actor.lr_sched.lr_decay_iters": 100}
COSINE = {"actor.lr_sched.lr_decay_style": "cosine"}
TWO_DEVICES = {"actor.megatron.ckpt.use_gpu_num": 2}

BASIC: list[Reached] = [
    ("hydra.run.dir", "outputs", "", "tracking.config_dir", "outputs/.hydra", {"hydra.output_subdir": ".hydra"}),
    ("hydra.output_subdir", ".hydra", "", "tracking.config_dir", ".hydra"),
    ("cluster.num_nodes", 2, 0, "placement.nodes", 2),
    (LINE, "0-3", "0-x", "placement.actor.devices", (0, 1, 2, 3)),
    (LINE, "0-3", "0-x", "placement.rollout.devices", (0, 1, 2, 3)),
    (LINE, "0-3", "0-x", "placement.logprobs.devices", (0, 1, 2, 3)),
    (LINE, "0-3", "0-x", "placement.reference.devices", (0, 1, 2, 3), {"algorithm.kl_beta": 0.1}),
    (LINE, "0-3", "0-x", "placement.devices_per_node", 4),
    ("runner.task_type", "reasoning_eval", "maths", "validation.only", True),
    ("runner.task_type", "reasoning", "maths", "env.name", "prompts"),
    ("runner.logger.log_path", "logs", 5, "tracking.log_dir", "logs"),
    ("runner.logger.project_name", "mine", 5, "tracking.project", "mine"),
    ("runner.logger.experiment_name", "shown", 5, "tracking.run_name", "shown", {"runner.experiment_name": "mine"}),
    ("runner.logger.experiment_name", "shown", 5, "name", "shown"),
    ("runner.logger.logger_backends", ["wandb"], ["x"], "tracking.loggers", ("console", "jsonl", "wandb")),
    ("runner.logger.logger_backends", "wandb", "x", "tracking.loggers", ("console", "jsonl", "wandb")),
    ("runner.logger.logger_backends", None, 1, "tracking.loggers", ("console", "jsonl")),
    ("runner.max_epochs", 2, 0, "data.epochs", 2),
    ("runner.max_steps", 7, -2, "data.max_steps", 7),
    ("runner.val_check_interval", -1, "often", "validation.every_steps", -1),
    ("runner.save_interval", 7, "often", "checkpoint.every_steps", 7),
    ("runner.seq_length", 4096, 0, "rollout.max_response_tokens", 3072),
    ("runner.resume_dir", "runs/global_step_5", 5, "resume", "runs/global_step_5"),
    ("runner.experiment_name", "mine", 5, "name", "mine"),
    ("runner.output_dir", "out", 5, "output_dir", "out"),
    ("algorithm.group_size", 4, 0, "training.samples_per_group", 4),
    ("algorithm.logprob_forward_micro_batch_size", 4, 0, "actor.inference_budget.sequences", 4),
    ("algorithm.logprob_forward_micro_batch_size", 4, 0, "reference.inference_budget.sequences", 4),
    ("algorithm.val_rollout_batch_size_per_gpu", 8, 0, "validation.prompts_per_device", 8),
    ("algorithm.loss_type", "opd", "pposs", "algorithm.loss.name", "distillation"),
    ("algorithm.loss_agg_func", "seq-mean-token-sum", "mean", "algorithm.aggregation", "seq-mean-token-sum"),
    ("algorithm.kl_beta", 0.1, -1, "algorithm.kl.coefficient", 0.1),
    ("algorithm.kl_penalty_type", "mse", "kll", "algorithm.kl.estimator", "k2", {"algorithm.kl_beta": 0.1}),
    ("algorithm.ratio_clip_eps", 0.3, 1.5, "algorithm.loss.clip_low", 0.3),
    ("algorithm.ratio_clip_eps", 0.3, 0, "algorithm.loss.clip_high", 0.3),
    ("algorithm.entropy_bonus", 0.01, -1, "algorithm.entropy_coefficient", 0.01, {"algorithm.calculate_entropy": True}),
    ("algorithm.calculate_entropy", True, "yes", "algorithm.entropy_coefficient", 0.01, BONUS),
    ("algorithm.calculate_entropy", False, 0, "algorithm.entropy_coefficient", 0.0, BONUS),
    ("algorithm.clip_ratio_c", 2.0, 1.0, "algorithm.loss.clip_dual", 2.0),
    ("algorithm.adv_type", "reinpp", "gea", "algorithm.advantage.name", "reinforce_plus_plus"),
    ("algorithm.adv_type", None, "gea", "algorithm.advantage.name", "none"),
    ("algorithm.normalize_advantages", False, 1, "algorithm.advantage.whiten", False),
    ("algorithm.early_stop_imp_ratio", 2.0, 0, "algorithm.stop_ratio", 2.0),
    ("algorithm.use_valid_token_scale", True, 1, "algorithm.micro_batch_weights", "tokens"),
    ("algorithm.sampling_params.do_sample", False, 1, "rollout.do_sample", False, REINFORCED),
    ("algorithm.sampling_params.temperature", 0.7, 0, "rollout.temperature", 0.7),
    ("algorithm.sampling_params.top_k", 50, -2, "rollout.top_k", 50),
    ("algorithm.sampling_params.top_k", -1, 0.5, "rollout.top_k", 0),
    ("algorithm.sampling_params.top_p", 0.9, 1.5, "rollout.top_p", 0.9),
    ("algorithm.sampling_params.repetition_penalty", 1.1, 0, "rollout.repetition_penalty", 1.1),
    ("rollout.group_name", "Players", 5, "placement.rollout.group", "Players"),
    ("rollout.gpu_memory_utilization", 0.4, 1.5, f"{ENGINE}.memory_share", 0.4),
    ("rollout.model.model_path", "other/model", 5, "policy.path", "other/model"),
    ("rollout.model.model_type", "qwen3", "qwen9", "policy.kind", "qwen3"),
    ("rollout.recompute_logprobs", False, 1, "rollout.recompute_logprobs", False),
    ("actor.group_name", "Learners", 5, "placement.actor.group", "Learners"),
    ("actor.model.megatron_checkpoint", "weights", 5, "actor.megatron.checkpoint", "weights", FROM_CHECKPOINT),
    ("actor.seed", 7, -1, "seed", 7),
    ("reward.use_reward_model", False, 1, "reward.model", None),
    ("critic.use_critic_model", True, 1, "critic.shares_policy", False, CRITIC),
]

TEXT: list[Reached] = [
    ("runner.enable_dynamic_batch_size", True, 1, "actor.budget.tokens", 2048),
    ("runner.enable_dynamic_batch_size", True, 1, "actor.budget.sequences", None),
    ("runner.max_tokens_per_mbs", 4096, 0, "actor.budget.tokens", 4096, {"runner.enable_dynamic_batch_size": True}),
    ("algorithm.n_minibatches", 8, 0, "training.mini_batches", 8),
    ("algorithm.training_batch_size_per_gpu", 2, 0, "actor.budget.sequences", 2),
    ("algorithm.rollout_batch_size_per_gpu", 16, 0, f"{ENGINE}.prompts_per_device", 16),
    ("algorithm.sampling_params.max_new_tokens", 512, 0, "rollout.max_response_tokens", 512),
    ("algorithm.sampling_params.min_new_tokens", 4, -1, "rollout.min_response_tokens", 4),
    ("rollout.enforce_eager", True, 1, f"{ENGINE}.eager", True, SERVED),
    ("rollout.distributed_executor_backend", "ray", "spawn", f"{ENGINE}.executor", "ray", SERVED),
    ("rollout.disable_log_stats", True, 1, f"{ENGINE}.log_statistics", False, SERVED),
    ("rollout.detokenize", True, 1, f"{ENGINE}.detokenize", True, SERVED),
    ("rollout.padding", 0, -1, "rollout.pad_token", 0),
    ("rollout.eos", 2, "</s>", "rollout.end_token", 2),
    ("rollout.attention_backend", "flashinfer", 5, f"{ENGINE}.attention_backend", "flashinfer", SERVED),
    ("rollout.tensor_parallel_size", 2, 0, f"{ENGINE}.tensor_parallel", 2, SPLIT),
    ("rollout.pipeline_parallel_size", 2, 0, f"{ENGINE}.pipeline_parallel", 2, SERVED),
    ("rollout.validate_weight", True, 1, f"{ENGINE}.validate_weights", True),
    ("rollout.validate_save_dir", "compared", 5, f"{ENGINE}.validate_weights_dir", "compared", COMPARED),
    ("rollout.print_outputs", True, 1, f"{ENGINE}.print_responses", True),
    ("rollout.sglang_decode_log_interval", 100, 0, f"{ENGINE}.log_every_steps", 100, BY_SGLANG),
    ("rollout.max_running_requests", 32, 0, "rollout.max_concurrent", 32),
    ("rollout.cuda_graph_max_bs", 64, 0, f"{ENGINE}.cuda_graph_max_batch", 64, SERVED),
    ("rollout.use_torch_compile", True, 1, f"{ENGINE}.torch_compile", True, SERVED),
    ("rollout.torch_compile_max_bs", 64, 0, f"{ENGINE}.torch_compile_max_batch", 64, COMPILED),
    ("rollout.backend", "vllm", "tgi", "rollout.engine", "vllm"),
    ("data.type", "vlm", "maths", "data.image_key", "image"),
    ("data.type", "vision_language", "maths", "data.image_key", "image"),
    ("data.max_prompt_length", 512, 0, "rollout.max_prompt_tokens", 512),
    ("data.rollout_batch_size", 128, 0, "training.groups_per_step", 128),
    ("data.val_rollout_batch_size", 16, 0, "data.validation_batch", 16),
    ("data.val_rollout_batch_size", None, 0, "data.validation_batch", 64),
    ("data.num_workers", 0, -1, "data.workers", 0),
    ("data.prompt_key", "question", 5, "data.prompt_key", "question"),
    ("data.shuffle", False, 1, "data.shuffle", False),
    ("data.validation_shuffle", False, 1, "data.validation_shuffle", False),
    ("data.seed", 5, -1, "data.seed", 5),
    ("data.train_data_paths", ["a.jsonl", "b.jsonl"], 5, "data.train_files", ("a.jsonl", "b.jsonl")),
    ("data.val_data_paths", "c.jsonl", 5, "data.validation_files", ("c.jsonl",)),
    ("actor.training_backend", "fsdp", "deepspeed", "actor.backend", "fsdp"),
    ("actor.mcore_gpt", False, 1, "actor.megatron.mcore_gpt", False),
    ("actor.spec_name", "te_gpt", "gpt", "actor.megatron.spec_name", "te_gpt"),
    ("actor.offload_optimizer", False, 1, "actor.memory.offload_optimizer", False),
    ("actor.offload_weight", False, 1, "actor.memory.offload_parameters", False),
    ("actor.offload_grad", False, 1, "actor.memory.offload_gradients", False),
    ("actor.enable_dp_load_balance", True, 1, "actor.balance_ranks", True),
    ("actor.calculate_flops", True, 1, "tracking.flops", True),
    ("actor.model.precision", "bf16", "fp8", "policy.dtype", "bfloat16"),
    ("actor.model.precision", 32, 64, "policy.dtype", "float32"),
    ("actor.model.add_bias_linear", True, 1, "actor.megatron.add_bias_linear", True),
    ("actor.model.tensor_model_parallel_size", 2, 0, "actor.parallel.tensor", 2),
    ("actor.model.tensor_model_parallel_size", 2, 0, "reference.parallel.tensor", 2),
    ("actor.model.pipeline_model_parallel_size", 2, 0, "actor.parallel.pipeline", 2),
    ("actor.model.pipeline_model_parallel_size", 2, 0, "reference.parallel.pipeline", 2),
    ("actor.model.activation", "gelu", "relu", "actor.megatron.activation", "gelu"),
    ("actor.model.sequence_parallel", False, 1, "actor.parallel.sequence", False),
    ("actor.model.recompute_method", "uniform", "all", "actor.megatron.recompute_method", "uniform"),
    ("actor.model.recompute_granularity", None, "half", "actor.megatron.recompute_granularity", None),
    ("actor.model.recompute_num_layers", 4, 0, "actor.megatron.recompute_num_layers", 4),
    ("actor.model.seq_length", 4096, 0, "actor.megatron.seq_length", 4096),
    ("actor.model.encoder_seq_length", 512, 0, "actor.megatron.encoder_seq_length", 512),
    ("actor.model.normalization", "layernorm", "batchnorm", "actor.megatron.normalization", "layernorm"),
    ("actor.model.position_embedding_type", "yarn", "alibi", "actor.megatron.position_embedding_type", "yarn"),
    ("actor.model.apply_rope_fusion", False, 1, "actor.megatron.apply_rope_fusion", False),
    ("actor.model.bias_dropout_fusion", True, 1, "actor.megatron.bias_dropout_fusion", True),
    ("actor.model.persist_layer_norm", True, 1, "actor.megatron.persist_layer_norm", True),
    ("actor.model.bias_activation_fusion", True, 1, "actor.megatron.bias_activation_fusion", True),
    ("actor.model.attention_softmax_in_fp32", False, 1, "actor.megatron.attention_softmax_in_fp32", False),
    ("actor.model.batch_p2p_comm", True, 1, "actor.megatron.batch_p2p_comm", True),
    ("actor.model.variable_seq_lengths", False, 1, "actor.megatron.variable_seq_lengths", False),
    ("actor.model.gradient_accumulation_fusion", True, 1, "actor.megatron.gradient_accumulation_fusion", True),
    ("actor.model.moe_token_dispatcher_type", "flex", "ring", "actor.megatron.moe_token_dispatcher_type", "flex"),
    ("actor.model.use_cpu_initialization", True, 1, "actor.megatron.use_cpu_initialization", True),
    ("actor.optim.optimizer", "sgd", "adamw", "actor.optimizer.kind", "sgd"),
    ("actor.optim.bf16", True, 1, "actor.megatron.bf16", True, {"actor.model.precision": "bf16"}),
    ("actor.optim.fp16", False, 1, "actor.megatron.fp16", False),
    ("actor.optim.lr", 1e-5, 0, "actor.optimizer.learning_rate", 1e-5),
    ("actor.optim.adam_beta1", 0.8, 1, "actor.optimizer.betas", (0.8, 0.95)),
    ("actor.optim.adam_beta2", 0.99, -1, "actor.optimizer.betas", (0.9, 0.99)),
    ("actor.optim.adam_eps", 1e-8, 0, "actor.optimizer.epsilon", 1e-8),
    ("actor.optim.min_lr", 1e-5, -1, "actor.optimizer.min_learning_rate_ratio", 0.5),
    ("actor.optim.weight_decay", 0.1, -1, "actor.optimizer.weight_decay", 0.1),
    ("actor.optim.use_distributed_optimizer", False, 1, "actor.megatron.use_distributed_optimizer", False, NO_OVERLAP),
    ("actor.optim.overlap_grad_reduce", False, 1, "actor.megatron.overlap_grad_reduce", False),
    ("actor.optim.overlap_param_gather", False, 1, "actor.megatron.overlap_param_gather", False),
    ("actor.optim.optimizer_enable_pin", True, 1, "actor.megatron.optimizer_enable_pin", True),
    (
        "actor.optim.overlap_param_gather_with_optimizer_step",
        True,
        1,
        "actor.megatron.overlap_param_gather_with_optimizer_step",
        True,
    ),
    ("actor.optim.clip_grad", 0.5, -1, "actor.optimizer.max_grad_norm", 0.5),
    ("actor.optim.clip_grad", 0, -1, "actor.optimizer.max_grad_norm", 1e9),
    ("actor.optim.loss_scale_window", 100, 0, "actor.megatron.loss_scale_window", 100),
    ("actor.lr_sched.lr_warmup_fraction", 0.1, 2, "actor.optimizer.warmup_steps", 10, DECAY_STEPS),
    ("actor.lr_sched.lr_warmup_init", 1e-7, -1, "actor.optimizer.warmup_start", 1e-7),
    ("actor.lr_sched.lr_warmup_iters", 7, -1, "actor.optimizer.warmup_steps", 7),
    ("actor.lr_sched.max_lr", 1e-5, 0, "actor.optimizer.learning_rate", 1e-5),
    ("actor.lr_sched.min_lr", 1e-5, -1, "actor.optimizer.min_learning_rate_ratio", 0.5),
    ("actor.lr_sched.lr_decay_style", "inverse-square-root", "exp", "actor.optimizer.schedule", "inverse_square_root"),
    ("actor.lr_sched.lr_decay_iters", 100, 0, "actor.optimizer.decay_steps", 100, COSINE),
    ("actor.tokenizer.tokenizer_model", "other/words", 5, "policy.tokenizer", "other/words"),
    ("actor.tokenizer.use_fast", True, 1, "policy.fast_tokenizer", True),
    ("actor.tokenizer.trust_remote_code", False, 1, "policy.trust_tokenizer_code", False),
    ("actor.tokenizer.padding_side", "left", "middle", "actor.memory.padding_side", "left"),
    ("actor.megatron.ddp_bucket_size", 1000, 0, "actor.megatron.ddp_bucket_size", 1000),
    ("actor.megatron.distributed_backend", "gloo", "mpi", "actor.megatron.distributed_backend", "gloo"),
    ("actor.megatron.distributed_timeout_minutes", 10, 0, "actor.megatron.distributed_timeout_minutes", 10),
    ("actor.megatron.ckpt_format", "zarr", "zip", "actor.megatron.ckpt_format", "zarr"),
    ("actor.megatron.use_dist_ckpt", True, 1, "actor.megatron.use_dist_ckpt", True),
    ("actor.megatron.tp_comm_bootstrap_backend", "mpi", "x", "actor.megatron.tp_comm_bootstrap_backend", "mpi"),
    ("actor.megatron.tp_comm_overlap_cfg", "tp.yaml", 5, "actor.megatron.tp_comm_overlap_cfg", "tp.yaml"),
    ("actor.megatron.use_hf_ckpt", False, 1, "actor.megatron.checkpoint", "weights", CHECKPOINT),
    ("actor.megatron.ckpt.model", "Qwen3-8B", 5, "actor.megatron.conversion.model", "Qwen3-8B"),
    ("actor.megatron.ckpt.hf_model_path", "other", 5, "actor.megatron.conversion.source", "other"),
    ("actor.megatron.ckpt.save_path", "there", 5, "actor.megatron.conversion.target", "there"),
    ("actor.megatron.ckpt.use_gpu_num", 2, -1, "actor.megatron.conversion.devices", 2),
    ("actor.megatron.ckpt.use_gpu_index", [0, 2], [-1], "actor.megatron.conversion.device_ranks", (0, 2), TWO_DEVICES),
    ("actor.megatron.ckpt.process_num", 4, 0, "actor.megatron.conversion.processes", 4),
    ("actor.megatron.ckpt.tensor_model_parallel_size", 2, 0, "actor.megatron.conversion.tensor_parallel", 2),
    ("actor.megatron.ckpt.pipeline_model_parallel_size", 2, 0, "actor.megatron.conversion.pipeline_parallel", 2),
    ("reward.reward_type", "code_offline", "codes", "reward.kind", "code"),
    ("reward.reward_scale", 1.0, "one", "reward.scale", 1.0),
]

FSDP, MIXED = "actor.fsdp_config", "actor.fsdp_config.mixed_precision"
AUTOCAST = {f"{FSDP}.amp_autocast.enabled": True}
SCALED = {f"{FSDP}.grad_scaler.enabled": True}
SHARDS: list[Reached] = [
    (f"{FSDP}.strategy", "FSDP2", "zero", "actor.backend", "fsdp2"),
    (f"{FSDP}.sharding_strategy", "full_shard", "half", "actor.sharding.policy", "full_shard"),
    (f"{FSDP}.cpu_offload", True, 1, "actor.memory.sharded_offload", True),
    (f"{FSDP}.offload_pin_memory", True, 1, "actor.memory.pin", True, {f"{FSDP}.cpu_offload": True}),
    (f"{FSDP}.reshard_after_forward", False, 1, "actor.sharding.reshard_after_forward", False),
    (f"{FSDP}.enable_gradient_accumulation", False, 1, "actor.sharding.sync_every_micro_batch", True),
    (f"{FSDP}.forward_prefetch", True, 1, "actor.sharding.forward_prefetch", True),
    (f"{FSDP}.limit_all_gathers", True, 1, "actor.sharding.limit_all_gathers", True),
    (f"{FSDP}.backward_prefetch", "pre", "now", "actor.sharding.backward_prefetch", "pre"),
    (f"{FSDP}.use_orig_params", True, 1, "actor.sharding.keep_original_parameters", True),
    (f"{FSDP}.use_liger_kernel", True, 1, "actor.memory.liger", True),
    (f"{FSDP}.fsdp_size", 4, 0, "actor.sharding.group_size", 4),
    (f"{FSDP}.fsdp_size", -1, -2, "actor.sharding.group_size", None),
    (f"{MIXED}.param_dtype", "bf16", "fp8", "actor.sharding.parameter_dtype", "bfloat16"),
    (f"{MIXED}.reduce_dtype", "16-mixed", "fp8", "actor.sharding.reduce_dtype", "float16"),
    (f"{MIXED}.buffer_dtype", "bf16", "fp8", "actor.sharding.buffer_dtype", "bfloat16"),
    (f"{FSDP}.amp_autocast.enabled", True, 1, "actor.sharding.autocast", "bfloat16"),
    (f"{FSDP}.amp_autocast.precision", "fp16", "fp8", "actor.sharding.autocast", "float16", AUTOCAST),
    (f"{FSDP}.grad_scaler.enabled", True, 1, "actor.sharding.grad_scaler", True),
    (f"{FSDP}.grad_scaler.init_scale", 1024.0, 0, "actor.sharding.grad_scaler_start", 1024.0, SCALED),
    (f"{FSDP}.grad_scaler.growth_interval", 100, 0, "actor.sharding.grad_scaler_growth_steps", 100, SCALED),
]

VALUED = {"algorithm.adv_type": "gae"}
ROBOTS: list[Reached] = [
    ("runner.task_type", "embodied_eval", "robots", "validation.only", True),
    ("runner.max_epochs", 7, 0, "training.steps", 7),
    ("runner.max_steps", 3, -2, "training.steps", 3),
    ("runner.max_steps", 30, -2, "training.steps", 5),
    ("runner.only_eval", True, 1, "validation.only", True),
    ("runner.logger.log_path", "logs", 5, "output_dir", "logs"),
    ("runner.max_prompt_length", 64, 0, "rollout.max_prompt_tokens", 64),
    ("runner.seq_length", 512, 0, f"{ENGINE}.max_model_tokens", 512),
    ("algorithm.group_size", 2, 0, "training.samples_per_group", 2),
    ("algorithm.normalize_advantages", False, 1, "algorithm.advantage.whiten", False, VALUED),
    ("algorithm.rollout_epoch", 2, 0, "training.groups_per_step", 8),
    ("algorithm.rollout_epoch", 2, 0, "env.epochs", 2),
    ("algorithm.rollout_epoch", 2, 0, "training.mini_batches", 2),
    ("algorithm.reward_type", "action_level", "token_level", "algorithm.reward_level", "action"),
    ("algorithm.logprob_type", "action_level", "turn_level", "algorithm.level", "action"),
    ("algorithm.entropy_type", "chunk_level", "turn_level", "algorithm.entropy_level", "chunk"),
    ("algorithm.length_params.max_new_token", 7, 0, "rollout.max_response_tokens", 7),
    ("algorithm.length_params.max_new_token", None, 0, "rollout.max_response_tokens", 56),
    ("algorithm.length_params.max_length", 512, 0, f"{ENGINE}.max_model_tokens", 512),
    ("algorithm.length_params.min_length", 0, -1, "rollout.min_response_tokens", 0),
    ("env.group_name", "Envs", 5, "placement.envs.group", "Envs"),
    ("env.channel.name", "pipe", 5, "placement.envs.channel.name", "pipe"),
    ("env.channel.queue_name", "seen", 5, "placement.envs.channel.queue", "seen"),
    ("env.channel.queue_size", 4, -1, "placement.envs.channel.size", 4),
    ("env.enable_offload", False, 1, "placement.offload_envs", False),
    ("env.train.total_num_envs", 32, 0, "env.environments", 32),
    ("env.train.total_num_envs", 32, 0, "training.groups_per_step", 8),
    ("env.train.auto_reset", True, 1, "env.auto_reset", True),
    ("env.train.ignore_terminations", True, 1, "env.ignore_terminations", True),
    ("env.train.use_fixed_reset_state_ids", False, 1, "env.fixed_start_states", False),
    ("env.train.max_episode_steps", 160, 0, "env.max_steps", 160),
    ("env.train.max_episode_steps", 160, 0, "rollout.max_turns", 20),
    ("env.eval.total_num_envs", 16, 0, "validation.episodes", 16),
    ("env.eval.total_num_envs", 16, 0, "validation.simulator.environments", 16),
    ("env.eval.auto_reset", True, 1, "validation.simulator.auto_reset", True),
    ("env.eval.ignore_terminations", True, 1, "validation.simulator.ignore_terminations", True),
    ("env.eval.use_fixed_reset_state_ids", False, 1, "validation.simulator.fixed_start_states", False),
    ("env.eval.max_episode_steps", 160, 0, "validation.simulator.max_steps", 160),
    ("rollout.channel.name", "pipe", 5, "placement.rollout.action_channel.name", "pipe"),
    ("rollout.channel.queue_name", "done", 5, "placement.rollout.action_channel.queue", "done"),
    ("rollout.channel.queue_size", 4, -1, "placement.rollout.action_channel.size", 4),
    ("rollout.mode", "disaggregated", "apart", "placement.colocated", False),
    ("rollout.backend", "vllm", "tgi", "rollout.engine", "vllm"),
    ("rollout.enforce_eager", False, 1, f"{ENGINE}.eager", False),
    ("rollout.enable_offload", False, 1, f"{ENGINE}.offload", False),
    ("rollout.pipeline_stage_num", 1, 0, "env.pipeline_stages", 1),
    ("actor.channel.name", "pipe", 5, "placement.rollout.channel.name", "pipe"),
    ("actor.channel.queue_name", "episodes", 5, "placement.rollout.channel.queue", "episodes"),
    ("actor.channel.queue_size", 4, -1, "placement.rollout.channel.size", 4),
    ("actor.training_backend", "megatron", "deepspeed", "actor.backend", "megatron"),
    ("actor.micro_batch_size", 4, 0, "actor.budget.sequences", 4),
    ("actor.global_batch_size", 80, 0, "training.mini_batches", 2),
    ("actor.enable_offload", False, 1, "actor.memory.offload_parameters", False),
    ("actor.enable_offload", False, 1, "actor.memory.offload_optimizer", False),
    ("actor.model.model_path", "other/policy", 5, "policy.path", "other/policy"),
    ("actor.model.model_type", "openpi", "openpie", "policy.kind", "openpi"),
    ("actor.model.action_dim", 14, 0, "policy.vla.action_dim", 14),
    ("actor.model.num_action_chunks", 4, 0, "policy.vla.action_chunk", 4),
    ("actor.model.num_action_chunks", 4, 0, "rollout.max_turns", 20),
    ("actor.model.use_proprio", True, 1, "policy.vla.use_proprioception", True),
    ("actor.model.unnorm_key", "libero", 5, "policy.vla.normalization_key", "libero"),
    ("actor.model.value_type", "action_level", "token_level", "policy.vla.value_level", "action"),
    ("actor.model.val_micro_batch_size", 4, 0, "critic.inference_budget.sequences", 4),
    ("actor.model.center_crop", False, 1, "policy.vla.center_crop", False),
    ("actor.model.do_sample", True, 1, "validation.sampling.do_sample", True),
    ("actor.model.do_sample", True, 1, "validation.sampling.temperature", 1.0),
    ("actor.model.precision", "fp32", "fp8", "policy.dtype", "float32"),
    ("actor.model.precision", None, "fp8", "policy.dtype", "auto"),
    ("actor.model.add_bias_linear", True, 1, "policy.vla.linear_bias", True),
    ("actor.model.add_qkv_bias", False, 1, "policy.vla.qkv_bias", False),
    ("actor.model.vocab_size", 64000, 0, "policy.vla.vocabulary", 64000),
    ("actor.model.hidden_size", 2048, 0, "policy.vla.hidden_size", 2048),
    ("actor.model.policy_setup", "panda-qpos", 5, "policy.vla.policy_setup", "panda-qpos"),
    ("actor.model.image_size", [256, 128], [256], "policy.vla.image_size", (256, 128)),
    ("actor.model.is_lora", False, 1, "policy.lora", None),
    ("actor.model.lora_rank", 8, 0, "policy.lora.rank", 8),
    ("actor.model.lora_rank", 8, 0, "policy.lora.alpha", 8.0),
    ("actor.model.lora_path", "some/adapters", 5, "policy.lora.path", "some/adapters"),
    ("actor.model.num_images_in_input", 2, 0, "policy.vla.images", 2),
    ("actor.model.attn_implementation", "sdpa", "fast", "policy.attention", "sdpa"),
    ("actor.model.low_cpu_mem_usage", False, 1, "policy.low_memory_loading", False),
    ("actor.model.trust_remote_code", False, 1, "policy.trust_remote_code", False),
    ("actor.tokenizer.tokenizer_model", "other/words", 5, "policy.tokenizer", "other/words"),
    ("actor.tokenizer.extra_vocab_size", 0, -1, "policy.vla.extra_vocabulary", 0),
    ("actor.tokenizer.use_fast", True, 1, "policy.fast_tokenizer", True),
    ("actor.tokenizer.trust_remote_code", False, 1, "policy.trust_tokenizer_code", False),
    ("actor.tokenizer.padding_side", "left", "middle", "actor.memory.padding_side", "left"),
    ("actor.optim.lr", 2e-5, 0, "actor.optimizer.learning_rate", 2e-5),
    ("actor.optim.value_lr", 2e-4, 0, "critic.optimizer.learning_rate", 2e-4),
    ("actor.optim.adam_beta1", 0.8, 1, "actor.optimizer.betas", (0.8, 0.999)),
    ("actor.optim.adam_beta2", 0.99, 1, "actor.optimizer.betas", (0.9, 0.99)),
    ("actor.optim.adam_eps", 1e-8, 0, "actor.optimizer.epsilon", 1e-8),
    ("actor.optim.clip_grad", 1.0, 0, "actor.optimizer.max_grad_norm", 1.0),
    ("actor.optim.clip_grad", 1.0, 0, "critic.optimizer.max_grad_norm", 1.0, VALUED),
    ("critic.use_critic_model", False, 1, "critic.shares_policy", True, VALUED),
    (f"{FSDP}.strategy", "fsdp2", "zero", "actor.backend", "fsdp2"),
    ("env.train.env_type", "maniskill", "gazebo", "env.simulator", "maniskill"),
    ("env.eval.env_type", "maniskill", "gazebo", "validation.simulator.simulator", "maniskill"),
    ("env.eval.reward_coef", 1.0, "one", "validation.simulator.reward_coefficient", 1.0),
    ("env.train.group_size", 4, 0, "training.samples_per_group", 4),
    ("env.eval.group_size", 2, 0, "validation.sampling.samples", 2),
    ("env.eval.group_size", 2, 0, "validation.episodes", 4),
    ("env.train.video_cfg.save_video", False, 1, "tracking.video", None),
    ("env.eval.video_cfg.save_video", False, 1, "tracking.validation_video", None),
    ("env.eval.video_cfg.video_base_dir", "films", 5, "tracking.validation_video.directory", "films"),
]

SIMULATOR: list[Reached] = [
    ("env_type", "maniskill", "gazebo", "env.simulator", "maniskill"),
    ("env_type", "maniskill", "gazebo", "env.name", "simulator"),
    ("task_suite_name", "libero_goal", "libero_11", "env.task_suite", "libero_goal"),
    ("auto_reset", True, 1, "env.auto_reset", True),
    ("ignore_terminations", True, 1, "env.ignore_terminations", True),
    ("max_episode_steps", 80, 0, "env.max_steps", 80),
    ("use_rel_reward", False, 1, "env.relative_reward", False),
    ("reward_coef", 1.0, "one", "env.reward_coefficient", 1.0),
    ("seed", 5, -1, "env.seed", 5),
    ("group_size", 8, 0, "training.samples_per_group", 8),
    ("use_fixed_reset_state_ids", False, 1, "env.fixed_start_states", False),
    ("total_num_envs", 64, 0, "env.environments", 64),
    ("total_num_envs", 64, 0, "training.groups_per_step", 64),
    ("video_cfg.save_video", False, 1, "tracking.video", None),
    ("video_cfg.info_on_video", False, 1, "tracking.video.overlay", False),
    ("video_cfg.video_base_dir", "films", 5, "tracking.video.directory", "films"),
    ("init_params.camera_heights", 128, 0, "env.camera_height", 128),
    ("init_params.camera_widths", 128, 0, "env.camera_width", 128),
]

REACHED = [
    (plain, *row, *({},) * (6 - len(row)))
    for plain, rows in ((MATH, BASIC), (MATH, TEXT), (SHARDED, SHARDS), (EMBODIED, ROBOTS), (ENV, SIMULATOR))
    for row in rows
]
ELSEWHERE = {"defaults", "hydra.searchpath", "actor.tokenizer.tokenizer_type", "algorithm.kl_penalty"}
"""Keys with tests of their own: two name files, the third has one legal value, and the fourth has no effect."""


@pytest.mark.proves("rlinf", *(case[1] for case in REACHED))
@pytest.mark.parametrize(
    ("plain", "key", "value", "illegal", "native", "expected", "others"),
    REACHED,
    ids=[f"{one[1]}-{one[4]}" for one in REACHED],
)
def test_a_key_reaches_the_run(
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
    provenance = found.composed.provenance[native]
    assert f"{key}: " in provenance
    assert "given.yaml:" in provenance
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, "rlinf", changed(plain, {**others, key: illegal}))
    assert key in str(error.value)


def test_each_key_has_a_row_in_these_tables() -> None:
    documented = {row.key for reference in DIALECTS["rlinf"].references for row in reference.load()}
    assert documented <= {one[1] for one in REACHED} | ELSEWHERE


PLACED = "cluster.component_placement"
RULES: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (MATH, {"algorithm.group_size": 1}, ["algorithm.group_size = 1", "adv_type = 'grpo'", "algorithm.group_size=2"]),
    (MATH, {"algorithm.loss_type": "actor_critic"}, ["trains a critic", "adv_type = 'grpo'", "algorithm.adv_type=gae"]),
    (
        EMBODIED,
        {"algorithm.adv_type": "gae", "algorithm.loss_type": "actor"},
        ["trains no value head", "adv_type = 'gae'", "loss_type=ppo, or algorithm.loss_type=actor_critic"],
    ),
    (
        MATH,
        {f"{PLACED}.actor": "0-3", f"{PLACED}.rollout": "4-7", "actor.enable_dp_load_balance": True},
        ["enable_dp_load_balance = true", f"{PLACED}.actor = '0-3'", "actor.enable_dp_load_balance=false, or"],
    ),
    (MATH, {"critic.use_critic_model": True}, ["does not use a critic", "set critic.use_critic_model=false"]),
    (
        SHARDED,
        {f"{FSDP}.amp_autocast.enabled": True, f"{MIXED}.param_dtype": "fp16"},
        ["amp_autocast.precision = 'bf16'", "param_dtype = 'fp16'", f"set {MIXED}.param_dtype=fp32"],
    ),
    (
        MATH,
        {"runner.seq_length": 1024},
        [
            "runner.seq_length = 1024",
            "max_prompt_length = 1024 (reference)",
            "nearest valid value: runner.seq_length=1025",
        ],
    ),
    (
        MATH,
        {"algorithm.sampling_params.max_new_tokens": 1500},
        ["max_new_tokens = 1500", "max_prompt_length = 1024", "seq_length = 2048", "max_new_tokens=1024"],
    ),
    (
        MATH,
        {"runner.enable_dynamic_batch_size": True, "runner.seq_length": 4096},
        ["max_tokens_per_mbs = 2048", "seq_length = 4096", "nearest valid value: runner.max_tokens_per_mbs=4096"],
    ),
    (MATH, {"actor.optim.min_lr": 1e-3}, ["min_lr = 0.001", "actor.optim.lr = 2e-05", "actor.optim.min_lr=2e-05"]),
    (
        MATH,
        {"actor.model.megatron_checkpoint": "x"},
        ["use_hf_ckpt = true", "megatron_checkpoint = 'x'", "set actor.megatron.use_hf_ckpt=false"],
    ),
    (
        MATH,
        {"actor.megatron.use_hf_ckpt": False},
        ["no checkpoint to start from", "actor.model.megatron_checkpoint=DIRECTORY"],
    ),
    (MATH, {"actor.optim.bf16": True}, ["bf16 = true", "precision = 'fp16'", "set actor.optim.bf16=false"]),
    (
        MATH,
        {"actor.optim.use_distributed_optimizer": False},
        ["overlap_param_gather = true", "use_distributed_optimizer = false", "overlap_param_gather=false"],
    ),
    (
        MATH,
        {"actor.megatron.ckpt.use_gpu_index": [0, 1]},
        ["use_gpu_index = [0, 1]", "use_gpu_num = 0", "nearest valid value: actor.megatron.ckpt.use_gpu_num=2"],
    ),
    (
        MATH,
        {"algorithm.n_minibatches": 5},
        ["n_minibatches = 5", "rollout_batch_size = 64", "group_size = 2", "128", "algorithm.n_minibatches=4"],
    ),
    (
        MATH,
        {f"{PLACED}.actor,rollout": "0-7", "algorithm.training_batch_size_per_gpu": 3},
        ["training_batch_size_per_gpu = 3", "4 sequences", "8 data-parallel ranks", "training_batch_size_per_gpu=2"],
    ),
    (
        MATH,
        {f"{PLACED}.actor,rollout": "0-3", "actor.model.tensor_model_parallel_size": 8},
        ["tensor_model_parallel_size = 8", "4 devices of actor", f"{PLACED}.actor,rollout = '0-3'", "parallel_size=4"],
    ),
    (
        MATH,
        {"rollout.tensor_parallel_size": 2},
        [
            "rollout.tensor_parallel_size = 2",
            "tensor_model_parallel_size = 1",
            "nearest valid value: rollout.tensor_parallel_size=1",
        ],
    ),
    (
        MATH,
        {f"{PLACED}.actor": "0-3", f"{PLACED}.rollout": "2-5"},
        [f"{PLACED}.rollout = '2-5'", f"{PLACED}.actor = '0-3'", "the same devices, or none in common"],
    ),
    (
        MATH,
        {f"{PLACED}.actor": 0, f"{PLACED}.rollout": 1, f"{PLACED}.inference": 2, "rollout.recompute_logprobs": False},
        [f"{PLACED}.inference = 2", "recompute_logprobs = false", "or rollout.recompute_logprobs=true"],
    ),
    (EMBODIED, {"runner.task_type": "math"}, ["runner.task_type = 'math'", "embodied"]),
    (
        EMBODIED,
        {"runner.val_check_interval": 20},
        ["save_interval = 50", "val_check_interval = 20", "runner.save_interval=40"],
    ),
    (
        EMBODIED,
        {"env.train.group_size": 3},
        ["env.train.group_size = 3", "algorithm.group_size = 4", "env.train.group_size=${algorithm.group_size}"],
    ),
    (
        EMBODIED,
        {"env.train.total_num_envs": 20},
        ["total_num_envs = 20", "pipeline_stage_num = 2", "group_size = 4", "env.train.total_num_envs=16"],
    ),
    (
        EMBODIED,
        {f"{PLACED}.actor,rollout,env": "0-1", "env.eval.total_num_envs": 6},
        ["env.eval.total_num_envs = 6", "2 processes", "nearest valid value: env.eval.total_num_envs=8"],
    ),
    (
        EMBODIED,
        {"env.train.max_episode_steps": 82},
        ["max_episode_steps = 82", "num_action_chunks = 8", "nearest valid value: env.train.max_episode_steps=80"],
    ),
    (
        EMBODIED,
        {"actor.global_batch_size": 100},
        ["global_batch_size = 100", "160 samples", "total_num_envs = 16", "rollout_epoch = 1", "global_batch_size=80"],
    ),
    (
        EMBODIED,
        {f"{PLACED}.actor,rollout": "0-3", "actor.micro_batch_size": 16},
        [
            "micro_batch_size = 16",
            "global_batch_size = 160",
            "4 devices",
            "nearest valid value: actor.micro_batch_size=20",
        ],
    ),
]


@pytest.mark.parametrize(("plain", "changes", "words"), RULES, ids=[next(iter(one[1])) for one in RULES])
def test_keys_that_contradict_each_other_are_refused(
    tmp_path: Path, plain: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, "rlinf", changed(plain, changes))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("lines", "native"),
    [
        ({"actor,rollout": "all"}, {"actor.devices": None, "rollout.devices": None, "devices_per_node": 1}),
        ({"actor": 3, "rollout": "0,2"}, {"actor.devices": (3,), "rollout.devices": (0, 2), "devices_per_node": 4}),
        ({"actor, rollout": "0-3 , 5"}, {"actor.devices": (0, 1, 2, 3, 5), "rollout.devices": (0, 1, 2, 3, 5)}),
        (
            {"actor": "0-1", "rollout": "2-3:0-3"},
            {"rollout.devices": (2, 3), "rollout.processes_per_device": 2, "devices_per_node": 4},
        ),
        (
            {"actor": "0", "rollout": "1:0-1,2:2"},
            {"rollout.devices": (1, 1, 2), "rollout.processes_per_device": 1, "devices_per_node": 3},
        ),
        (
            {"actor": "0-1", "rollout": "2-5:0-1"},
            {"rollout.devices": (2, 3, 4, 5), "rollout.devices_per_worker": 2},
        ),
        ({"actor,rollout": "0-1", "env": "2:0-2"}, {"envs.devices": (2,), "envs.processes_per_device": 3}),
        ({"actor": "0-3", "rollout": "4-7"}, {"colocated": False, "devices_per_node": 8}),
        ({"actor": "all", "rollout": "0-3"}, {"colocated": True, "actor.devices": None}),
    ],
    ids=str,
)
def test_lines_of_the_placement_put_components_on_devices(
    tmp_path: Path, lines: dict[str, Any], native: dict[str, Any]
) -> None:
    tree = changed(MATH, {f"{PLACED}.{names}": spec for names, spec in lines.items()})
    if "0-3 , 5" in lines.values():
        tree = changed(tree, {"data.rollout_batch_size": 80})
    found = converted(tmp_path, "rlinf", tree)
    assert {key: natively(found, f"placement.{key}") for key in native} == native
    assert translated(found, "rlinf").lost == {}


def test_devices_are_counted_over_all_nodes(tmp_path: Path) -> None:
    tree = changed(MATH, {"cluster.num_nodes": 2, f"{PLACED}.actor,rollout": "0-15"})
    found = converted(tmp_path, "rlinf", tree)
    assert natively(found, "placement.devices_per_node") == 8
    assert natively(found, "placement.actor.devices") == tuple(range(16))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ({"actor,rollout": "3-1"}, ["'3-1'", "descending", "valid: all, 3, 0,2,3"]),
        ({"actor,rollout": "0,0"}, ["'0,0'", "ascending"]),
        ({"actor,rollout": "0-1:0-2"}, ["cannot share 2 devices evenly"]),
        ({"actor,rollout": "first"}, ["'first'", "must be ranks such as all, 3, 0,2,3"]),
        ({"actor,rollout": "all", "rollout,env": "0"}, ["rollout", "actor,rollout = 'all'", "already"]),
        ({"actor,rollout": "0:0,1-2:1"}, ["the same number of devices"]),
        ({"actor,rollout": "0-3:0"}, ["a process of actor has one device", "actor,rollout=0-3"]),
        ({"actor": "0-1:0-3"}, ["the processes of actor cannot share a device", f"{PLACED}.actor=0-1"]),
        (
            {"actor,rollout": "0-3", "reward": "0-1:0-3"},
            ["the processes of reward cannot share", f"{PLACED}.reward=0-1"],
        ),
        ({"actor,rollout": "0-3", "env": "4-5:0"}, ["a process of env has one device", f"{PLACED}.env=4-5"]),
        ({"actr,rollout": "all"}, [f"{PLACED}.actr,rollout", f"did you mean {PLACED}.actor,rollout?"]),
        ({"actor,judge": "all"}, [f"unknown key {PLACED}.actor,judge"]),
    ],
    ids=str,
)
def test_a_placement_that_says_nothing_is_refused(tmp_path: Path, lines: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, "rlinf", changed(MATH, {f"{PLACED}.{names}": spec for names, spec in lines.items()}))
    for word in words:
        assert word in str(error.value)


ALIASES = [
    (MATH, "rollout.sampling_params.temperature", 0.5, "rollout.temperature", 0.5),
    (MATH, "rollout.model_dir", "older/model", "policy.path", "older/model"),
    (MATH, "rollout.rollout_backend", "vllm", "rollout.engine", "vllm"),
    (changed(MATH, BY_SGLANG), "rollout.sglang.decode_log_interval", 10, f"{ENGINE}.log_every_steps", 10),
    (MATH, "algorithm.recompute_logprobs", False, "rollout.recompute_logprobs", False),
    (MATH, "actor.megatron.ckpt_convertor.process_num", 3, "actor.megatron.conversion.processes", 3),
    (SHARDED, f"{FSDP}.amp.enabled", True, "actor.sharding.autocast", "bfloat16"),
    (SHARDED, f"{FSDP}.amp.use_grad_scaler", True, "actor.sharding.grad_scaler", True),
    (EMBODIED, "env.train.rollout_epoch", 2, "env.epochs", 2),
    (EMBODIED, "env.eval.num_envs", 16, "validation.episodes", None),
    (EMBODIED, "env.train.simulator_type", "robotwin", "env.simulator", "robotwin"),
    (EMBODIED, "algorithm.sampling_params.max_new_tokens", 7, "rollout.max_response_tokens", 7),
    (ENV, "num_envs", 8, "env.environments", 8),
]


@pytest.mark.parametrize(("plain", "alias", "value", "native", "expected"), ALIASES, ids=[one[1] for one in ALIASES])
def test_other_spellings_are_read_and_never_beside_the_documented_one(
    tmp_path: Path, plain: dict[str, Any], alias: str, value: Any, native: str, expected: Any
) -> None:
    rows = {name: row.key for row in _rows(plain) for name in row.aliases}
    winners = {row.wins for row in _rows(plain)}
    if rows[alias] == "env.eval.total_num_envs":
        plain = changed(plain, {"env.eval": {"max_episode_steps": 80}})
        expected = value
    found = converted(tmp_path, "rlinf", _without(changed(plain, {alias: value}), rows[alias]))
    assert natively(found, native) == expected
    assert any(f"is read as {rows[alias]}" in remark for remark in found.composed.remarks)
    twice = converted(tmp_path, "rlinf", changed(plain, {alias: value, rows[alias]: value}))
    assert any("says the same" in remark for remark in twice.composed.remarks)
    if rows[alias] in winners:
        both = converted(tmp_path, "rlinf", changed(plain, {alias: value, rows[alias]: 2 * value}))
        assert any(f"has no effect, because of {rows[alias]}" in remark for remark in both.composed.remarks)
        return
    with pytest.raises(ConfigError, match=r"leave .* out"):
        converted(tmp_path, "rlinf", changed(plain, {alias: value, rows[alias]: "another"}))


def _rows(plain: dict[str, Any]) -> list[Any]:
    return list(DIALECTS["rlinf"].narrowed(plain).specs().values())


def _without(tree: dict[str, Any], key: str) -> dict[str, Any]:
    *sections, last = key.split(".")
    place = tree
    for section in sections:
        place = place.get(section, {})
    place.pop(last, None)
    return tree


def test_what_refers_to_another_spelling_finds_it(tmp_path: Path) -> None:
    tree = {"rollout": {"model_dir": "a/b"}, "actor": {"tokenizer": {"tokenizer_model": "${rollout.model_dir}"}}}
    found = converted(tmp_path, "rlinf", tree)
    assert natively(found, "policy.path") == "a/b"
    assert natively(found, "policy.tokenizer") is None


def test_environments_inherit_from_the_algorithm(tmp_path: Path) -> None:
    tree = changed(EMBODIED, {"algorithm.auto_reset": True, "env.eval.auto_reset": False})
    found = converted(tmp_path, "rlinf", tree)
    assert natively(found, "env.auto_reset") is True
    assert natively(found, "validation.simulator.auto_reset") is False
    assert "algorithm.auto_reset: " in found.composed.provenance["env.auto_reset"]


def test_the_critic_learns_as_the_policy_does(tmp_path: Path) -> None:
    changes = {
        **CRITIC,
        "actor.optim.lr": 1e-5,
        "actor.training_backend": "fsdp",
        "algorithm.training_batch_size_per_gpu": 4,
    }
    found = converted(tmp_path, "rlinf", changed(MATH, changes))
    for key, value in {
        "optimizer.learning_rate": 1e-5,
        "optimizer.betas": (0.9, 0.95),
        "budget.sequences": 4,
        "backend": "fsdp",
    }.items():
        assert natively(found, f"critic.{key}") == value
    assert natively(found, "critic.path") is None


LOSSES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"algorithm.loss_type": "actor"}, {"name": "ppo", "clip_low": 0.3, "clip_high": 0.3, "clip_dual": 2.0}),
    (
        {"algorithm.loss_type": "decoupled_actor_critic", **CRITIC},
        {"name": "decoupled_ppo", "clip_low": 0.3, "clip_high": 0.3, "clip_dual": 2.0, "max_weight": None},
    ),
    (
        {"algorithm.loss_type": "opd", "algorithm.adv_type": "opd"},
        {
            "name": "distillation",
            "clip_low": 0.3,
            "clip_high": 0.3,
            "clip_dual": None,
            "max_divergence": None,
            "estimator": "k1",
            "gradient": "policy",
            "policy_logprobs": "old",
            "weight": 1.0,
            "task": None,
        },
    ),
    ({"algorithm.loss_type": "embodied_sac", "algorithm.adv_type": "embodied_sac"}, {"name": "sac"}),
    (
        {"algorithm.loss_type": "mine.py:loss"},
        {
            "name": "custom",
            "function": "mine.py:loss",
            "options": {"clip_low": 0.3, "clip_high": 0.3, "clip_dual": 2.0},
        },
    ),
]


@pytest.mark.parametrize(("changes", "native"), LOSSES, ids=[one[1]["name"] for one in LOSSES])
def test_a_loss_has_its_own_bounds_and_idle_ones_are_told(
    tmp_path: Path, changes: dict[str, Any], native: dict[str, Any]
) -> None:
    bounds = {"algorithm.ratio_clip_eps": 0.3, "algorithm.clip_ratio_c": 2.0}
    found = converted(tmp_path, "rlinf", changed(MATH, {**changes, **bounds}))
    assert found.composed.experiment.algorithm.loss.model_dump() == native
    idle = {remark.split(" = ")[0] for remark in found.composed.remarks if "has no effect" in remark}
    has = native.get("options", native)
    without = {"algorithm.ratio_clip_eps": "clip_low", "algorithm.clip_ratio_c": "clip_dual"}
    assert idle == {key for key, option in without.items() if has.get(option) is None}
    assert translated(found, "rlinf").lost == {}


def test_what_embodied_policies_learn_by_waits(tmp_path: Path) -> None:
    sac = {"algorithm.loss_type": "embodied_sac", "algorithm.adv_type": "embodied_sac"}
    waits = {fault.key for fault in converted(tmp_path, "rlinf", changed(MATH, sac)).unsupported}
    assert {"algorithm.loss_type", "algorithm.adv_type"} <= waits
    teacher = converted(tmp_path, "rlinf", changed(MATH, {"algorithm.loss_type": "opd", "algorithm.adv_type": None}))
    assert natively(teacher, "algorithm.advantage.name") == "raw"


@pytest.mark.parametrize("estimator", ["gae", "reinpp", "reinpp_baseline", "raw", "grpo_dynamic", "mine.py:advantage"])
@pytest.mark.parametrize("normalize", [True, False])
def test_advantages_of_every_estimator_are_normalised_as_the_key_says(
    tmp_path: Path, estimator: str, normalize: bool
) -> None:
    critic = {"critic.use_critic_model": True} if estimator in ("gae", "mine.py:advantage") else {}
    keys = {"algorithm.adv_type": estimator, "algorithm.normalize_advantages": normalize, **critic}
    found = converted(tmp_path, "rlinf", changed(MATH, keys))
    assert natively(found, "algorithm.advantage.whiten") is normalize
    assert found.composed.experiment.needs_critic is bool(critic)
    assert translated(found, "rlinf").lost == {}


def test_a_wrong_answer_costs_what_a_right_one_earns(tmp_path: Path) -> None:
    found = converted(tmp_path, "rlinf", changed(MATH, {"reward.reward_scale": 2.5}))
    assert (natively(found, "reward.scale"), natively(found, "reward.wrong_reward")) == (2.5, -1.0)
    assert "reward.reward_scale: given.yaml" in found.composed.provenance["reward.wrong_reward"]


@pytest.mark.parametrize(("weighs", "native"), [(True, "tokens"), (False, "exact")])
def test_micro_batches_weigh_by_their_tokens_or_the_whole_batch_is_exact(
    tmp_path: Path, weighs: bool, native: str
) -> None:
    found = converted(tmp_path, "rlinf", changed(MATH, {"algorithm.use_valid_token_scale": weighs}))
    assert natively(found, "algorithm.micro_batch_weights") == native


ENV_FILE = "env_type: libero\ntask_suite_name: libero_goal\ntotal_num_envs: null\nmax_episode_steps: 160\nseed: 3\n"
RUN_FILE = """\
defaults:
  - env/goal@env.train
  - env/goal@env.eval
  - override hydra/job_logging: stdout
  - _self_
runner: {task_type: embodied}
algorithm: {group_size: 4}
env: {train: {total_num_envs: 16}, eval: {seed: 5}}
actor: {global_batch_size: 320, model: {model_path: some/policy}}
"""


@pytest.mark.proves("rlinf", "defaults")
def test_defaults_put_files_into_sections(tmp_path: Path) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "goal.yaml").write_text(ENV_FILE)
    path = tmp_path / "run.yaml"
    path.write_text(RUN_FILE)
    found = convert(compose_config(path, []), DIALECTS["rlinf"])
    assert natively(found, "env.task_suite") == "libero_goal"
    assert natively(found, "env.max_steps") == 160
    assert natively(found, "validation.simulator.task_suite") == "libero_goal"
    assert (natively(found, "env.seed"), natively(found, "validation.simulator.seed")) == (3, 5)
    assert "goal.yaml:2" in found.composed.provenance["env.task_suite"]
    assert "run.yaml:8" in found.composed.provenance["validation.simulator.seed"]
    (tmp_path / "env" / "goal.yaml").write_text(ENV_FILE + "task_suite_nam: x\n")
    with pytest.raises(ConfigError, match=r"env\.train\.task_suite_nam .*did you mean env\.train\.task_suite_name"):
        convert(compose_config(path, []), DIALECTS["rlinf"])
    for wrong in ("- env/gaol@env.train", "5"):
        path.write_text(RUN_FILE.replace("- env/goal@env.train", wrong))
        with pytest.raises(ConfigError, match="defaults"):
            compose_config(path, [])


@pytest.mark.proves("rlinf", "hydra.searchpath")
def test_a_search_path_says_where_such_files_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = tmp_path / "repo" / "config" / "env", tmp_path / "mine"
    there.mkdir(parents=True)
    here.mkdir()
    (there / "goal.yaml").write_text(ENV_FILE)
    path = here / "run.yaml"
    path.write_text("hydra: {searchpath: ['file://${oc.env:REPO_PATH}/config/']}\n" + RUN_FILE)
    with pytest.raises(ConfigError, match="REPO_PATH"):
        compose_config(path, [])
    monkeypatch.setenv("REPO_PATH", str(tmp_path / "repo"))
    found = convert(compose_config(path, []), DIALECTS["rlinf"])
    assert natively(found, "env.task_suite") == "libero_goal"
    path.write_text("hydra: {searchpath: 5}\n" + RUN_FILE)
    with pytest.raises(ConfigError, match="searchpath"):
        compose_config(path, [])


@pytest.mark.proves("rlinf", "actor.tokenizer.tokenizer_type")
def test_there_is_one_kind_of_tokenizer(tmp_path: Path) -> None:
    key = "actor.tokenizer.tokenizer_type"
    converted(tmp_path, "rlinf", changed(EMBODIED, {key: "HuggingFaceTokenizer"}))
    with pytest.raises(ConfigError, match=key):
        converted(tmp_path, "rlinf", changed(EMBODIED, {key: "SentencePieceTokenizer"}))


def test_a_envs_own_file_is_a_run_with_that_env(tmp_path: Path) -> None:
    reference = Path(__file__).parent / "keys" / "rlinf_env.yaml"
    found = convert(compose_config(reference, []), DIALECTS["rlinf"])
    assert natively(found, "env.name") == "simulator"
    assert natively(found, "policy.preset") == "grid-1m"
    assert natively(found, "training.steps") == 70
    assert translated(found, "rlinf").lost == {}
    with pytest.raises(ConfigError, match="algorithm"):
        converted(tmp_path, "rlinf", changed(ENV, {"algorithm.group_size": 4}))


@pytest.mark.parametrize("plain", [MATH, SHARDED, EMBODIED, ENV, changed(MATH, CRITIC)], ids=str)
def test_a_run_comes_back_from_its_translation(tmp_path: Path, plain: dict[str, Any]) -> None:
    found = converted(tmp_path, "rlinf", plain)
    there = translated(found, "rlinf")
    assert there.lost == {}
    (tmp_path / "again.yaml").write_text(there.text())
    again = convert(compose_config(tmp_path / "again.yaml", []), DIALECTS["rlinf"])
    assert again.composed.experiment == found.composed.experiment


def test_other_envs_have_no_name_there(tmp_path: Path) -> None:
    found = converted(tmp_path, "ragen", {"sft": {"env_type": "frozenlake"}})
    with pytest.raises(ConfigError, match="no environment frozenlake"):
        translated(found, "rlinf")


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: path.name)
def test_an_example_is_read_and_comes_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBODIED_PATH", str(EXAMPLES))
    found = convert(compose_config(path, []), DIALECTS["rlinf"])
    assert translated(found, "rlinf").lost == {}


def test_there_are_examples() -> None:
    assert len(list(EXAMPLES.glob("*.yaml"))) == 8


def test_a_run_that_only_evaluates_draws_as_training_would(tmp_path: Path) -> None:
    drawn = {"algorithm.sampling_params.temperature": 0.6, "algorithm.sampling_params.top_p": 0.9}
    tree = changed(MATH, {"runner.task_type": "reasoning_eval", "algorithm.group_size": 4, **drawn})
    found = converted(tmp_path, "rlinf", tree)
    sampling = found.composed.experiment.validation.sampling
    assert (sampling.do_sample, sampling.temperature, sampling.top_p, sampling.samples) == (True, 0.6, 0.9, 4)
    assert translated(found, "rlinf").lost == {}
    assert not natively(converted(tmp_path, "rlinf", changed(MATH, drawn)), "validation.sampling.do_sample")


def test_replies_that_are_all_the_same_have_nothing_to_be_compared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"do_sample = false .* would be the same"):
        converted(tmp_path, "rlinf", changed(MATH, {"algorithm.sampling_params.do_sample": False}))


BOTH_ENGINES = {"rollout.vllm.attention_backend": "XFORMERS", "rollout.sglang.attention_backend": "flashinfer"}


@pytest.mark.parametrize(("engine", "expected"), [("vllm", "XFORMERS"), ("sglang", "flashinfer")])
def test_of_the_attention_backends_of_both_engines_that_of_the_engine_counts(
    tmp_path: Path, engine: str, expected: str
) -> None:
    tree = changed(MATH, BOTH_ENGINES | {"rollout.rollout_backend": engine})
    tree["rollout"].pop("attention_backend", None)
    tree["rollout"].pop("backend", None)
    found = converted(tmp_path, "rlinf", tree)
    assert natively(found, f"{ENGINE}.attention_backend") == expected
    (other,) = {"vllm", "sglang"} - {engine}
    remarks = [remark for remark in found.composed.remarks if remark.startswith(f"rollout.{other}.attention_backend")]
    assert len(remarks) == 1
    assert f"has no effect: rollout.backend is '{engine}', not '{other}'" in remarks[0]
    overridden = converted(tmp_path, "rlinf", tree, "+rollout.attention_backend=triton")
    assert natively(overridden, f"{ENGINE}.attention_backend") == "triton"
    assert any(
        f"rollout.{engine}.attention_backend" in each and "has no effect, because of" in each
        for each in overridden.composed.remarks
    )


@pytest.mark.parametrize("plain", [MATH, EMBODIED], ids=["text", "robot"])
def test_groups_of_nodes_wait_in_every_kind_of_run(tmp_path: Path, plain: dict[str, Any]) -> None:
    found = converted(tmp_path, "rlinf", changed(plain, {"cluster.node_groups": [{"label": "a", "node_ranks": "0"}]}))
    (problem,) = (problem for problem in found.unsupported if problem.key == "cluster.node_groups")
    assert "groups of nodes" in problem.message
