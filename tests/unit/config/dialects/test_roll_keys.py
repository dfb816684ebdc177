"""If these fail, a key of a ROLL file does not do what ROLL's reference says of it, or takes an illegal value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively, translated

from quintet.config.dialects.ledger import load_keys
from quintet.config.dialects.loader import ConversionResult
from quintet.errors import ConfigError

PLAIN: dict[str, Any] = {
    "rollout_batch_size": 64,
    "prompt_length": 2048,
    "response_length": 4096,
    "num_return_sequences_in_group": 8,
    "actor_train": {
        "training_args": {
            "learning_rate": 1.0e-6,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 32,
            "warmup_steps": 20,
        },
        "data_args": {"file_name": "train.json"},
        "infer_batch_size": 4,
    },
}
"""The values of ROLL's configuration guide that differ from the defaults of its code."""
TRAIN, INFER = "actor_train.strategy_args.strategy_name", "actor_infer.strategy_args.strategy_name"
OPTION, ENGINE, REFERENCE_OPTION, CRITIC_OPTION = (
    f"{worker}.strategy_args.strategy_config." for worker in ("actor_train", "actor_infer", "reference", "critic")
)
MODEL, ARGS, DATA = "actor_train.model_args.", "actor_train.training_args.", "actor_train.data_args."
GENERATION, VALIDATION = "actor_infer.generating_args.", "validation.generating_args."
VARIANT, WEIGHT, FILTERS = (
    "actor_train.pg_variant",
    "train_infer_correction.is_weight.",
    "train_infer_correction.filters",
)
ADVANTAGE, LOSS, KL = "algorithm.advantage.", "algorithm.loss.", "algorithm.kl."
ENGINE_OPTION, MEGATRON, SAMPLING = "rollout.engine_options.", "actor.megatron.", "validation.sampling."
FSDP2, SGLANG, CRITIC = {TRAIN: "fsdp2_train"}, {INFER: "sglang"}, {"critic.device_mapping": "list(range(0,16))"}
GIGPO, REINFORCE = {"adv_estimator": "gigpo"}, {"adv_estimator": "reinforce"}
PENALTY, TERM, RANGE = {"add_token_level_kl": True}, {"use_kl_loss": True}, {"use_pg_clip_range": True}
WEIGHTED, STAGES = {f"{WEIGHT}enabled": True}, {f"{OPTION}pipeline_model_parallel_size": 2}
ACCUMULATED = {f"{ARGS}gradient_accumulation_steps": 16}
PG_WORKER = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"

REACHED: list[tuple[Any, ...]] = [
    ("rollout_batch_size", 128, 0, "training.groups_per_step", 128),
    ("prompt_length", 512, "long", "rollout.max_prompt_tokens", 512),
    ("response_length", 1000, 0, "rollout.max_response_tokens", 1000),
    ("num_return_sequences_in_group", 16, 0, "training.samples_per_group", 16),
    (f"{MODEL}dtype", "fp32", "int8", "policy.dtype", "float32"),
    (f"{MODEL}disable_gradient_checkpointing", True, "no", "actor.gradient_checkpointing", False, FSDP2),
    (f"{MODEL}ulysses_size", 4, 0, "actor.parallel.ulysses", 4, FSDP2),
    (f"{ARGS}learning_rate", 2e-06, 0, "actor.optimizer.learning_rate", 2e-06),
    (f"{ARGS}weight_decay", 0.1, -1, "actor.optimizer.weight_decay", 0.1),
    (f"{ARGS}per_device_train_batch_size", 2, 0, "actor.budget.sequences", 2, ACCUMULATED),
    (f"{ARGS}gradient_accumulation_steps", 8, 0, "training.mini_batches", 4),
    (f"{ARGS}warmup_steps", 0, -1, "actor.optimizer.warmup_steps", 0),
    (f"{DATA}template", "qwen2_5", 1, "data.template", "qwen2_5"),
    (f"{DATA}file_name", ["a.json", "b.csv"], 1, "data.train_files", ("a.json", "b.csv")),
    (f"{DATA}prompt", "question", 1, "data.prompt_key", "question"),
    (f"{DATA}messages", "chat", 1, "data.messages_key", "chat"),
    (TRAIN, "fsdp2_train", "tgi", "actor.backend", "fsdp2"),
    (f"{OPTION}tensor_model_parallel_size", 2, 0, "actor.parallel.tensor", 2),
    (f"{OPTION}pipeline_model_parallel_size", 4, 0, "actor.parallel.pipeline", 4),
    (f"{OPTION}expert_model_parallel_size", 8, 0, "actor.parallel.expert", 8),
    (f"{OPTION}context_parallel_size", 2, 0, "actor.parallel.context", 2),
    (f"{OPTION}virtual_pipeline_model_parallel_size", 3, 0, "actor.parallel.virtual_pipeline", 3, STAGES),
    (f"{OPTION}sequence_parallel", True, 1, "actor.parallel.sequence", True),
    (f"{OPTION}recompute_granularity", "selective", "half", f"{MEGATRON}recompute_granularity", "selective"),
    (f"{OPTION}moe_layer_recompute", True, 1, f"{MEGATRON}moe_layer_recompute", True),
    (f"{OPTION}moe_token_dispatcher_type", "allgather", "flex", f"{MEGATRON}moe_token_dispatcher_type", "allgather"),
    (f"{OPTION}moe_grouped_gemm", True, 1, f"{MEGATRON}moe_grouped_gemm", True),
    (f"{OPTION}moe_shared_expert_overlap", True, 1, f"{MEGATRON}moe_shared_expert_overlap", True),
    (f"{OPTION}overlap_grad_reduce", True, 1, f"{MEGATRON}overlap_grad_reduce", True),
    (f"{OPTION}fsdp_size", 4, -2, "actor.sharding.group_size", 4, FSDP2),
    (f"{OPTION}param_dtype", "float", "int8", "actor.sharding.parameter_dtype", "float32", FSDP2),
    (f"{OPTION}reduce_dtype", "half", "int8", "actor.sharding.reduce_dtype", "float16", FSDP2),
    (f"{OPTION}reshard_after_forward", None, 1, "actor.sharding.reshard_after_forward", None, FSDP2),
    (f"{OPTION}offload_policy", True, 1, "actor.memory.sharded_offload", True, FSDP2),
    ("actor_train.infer_batch_size", 2, 0, "actor.inference_budget.sequences", 2),
    ("actor_train.device_mapping", "list(range(0,8))", 8, "placement.actor.devices", (0, 1, 2, 3, 4, 5, 6, 7)),
    ("actor_infer.model_args.dtype", "fp16", "int8", f"{ENGINE_OPTION}dtype", "float16"),
    (f"{GENERATION}max_new_tokens", 100, 0, "rollout.max_response_tokens", 100),
    (f"{GENERATION}temperature", 0.5, 0, "rollout.temperature", 0.5),
    (INFER, "hf_infer", "tgi", "rollout.engine", "hf"),
    (f"{ENGINE}gpu_memory_utilization", 0.9, 1.1, f"{ENGINE_OPTION}memory_share", 0.9),
    (f"{ENGINE}block_size", 32, 7, f"{ENGINE_OPTION}block_size", 32),
    (f"{ENGINE}max_model_len", 9000, 0, f"{ENGINE_OPTION}max_model_tokens", 9000),
    (f"{ENGINE}load_format", "auto", "zip", f"{ENGINE_OPTION}load_format", "auto"),
    (f"{ENGINE}mem_fraction_static", 0.7, 1, f"{ENGINE_OPTION}memory_share", 0.7, SGLANG),
    ("actor_infer.num_gpus_per_worker", 4, 0, f"{ENGINE_OPTION}tensor_parallel", 4),
    ("actor_infer.device_mapping", [4, 5, 6, 7], [-1], "placement.rollout.devices", (4, 5, 6, 7)),
    ("reference.model_args.dtype", "fp32", "int8", "reference.dtype", "float32"),
    ("reference.strategy_args.strategy_name", "hf_infer", "megatron_train", "reference.sharding.policy", "no_shard"),
    (f"{REFERENCE_OPTION}tensor_model_parallel_size", 8, 0, "reference.parallel.tensor", 8),
    ("reference.infer_batch_size", 1, 0, "reference.inference_budget.sequences", 1),
    ("reference.device_mapping", "[16, 17]", [0.5], "placement.reference.devices", (16, 17)),
    ("critic.strategy_args.strategy_name", "fsdp2_train", "vllm", "critic.backend", "fsdp2", CRITIC),
    ("critic.device_mapping", "list(range(16,20))", True, "placement.critic.devices", (16, 17, 18, 19)),
    ("pretrain", "some/model", 1, "policy.path", "some/model"),
    ("pretrain", "some/model", 1, "policy.preset", None),
    ("exp_name", "mine", 1, "name", "mine"),
    ("seed", 7, -1, "seed", 7),
    ("max_steps", 3, "many", "training.steps", 3),
    ("save_steps", 2, 0, "checkpoint.every_steps", 2),
    ("eval_steps", 5, -1, "validation.every_steps", 5),
    ("adv_estimator", "gae", "rloo", f"{ADVANTAGE}name", "gae"),
    ("adv_estimator", "reinforce", "step_reinforce", f"{ADVANTAGE}name", "reinforce"),
    ("adv_estimator", "grpo", "agentic_reinforce", f"{ADVANTAGE}name", "grpo"),
    ("adv_estimator", "gigpo", None, f"{ADVANTAGE}name", "gigpo"),
    ("adv_estimator", "mine.py:mine", "mine.py:", f"{ADVANTAGE}function", "mine.py:mine"),
    ("gamma", 0.9, 1.1, f"{ADVANTAGE}gamma", 0.9, {"adv_estimator": "gae"}),
    ("gamma", 0.9, -1, f"{ADVANTAGE}gamma", 0.9, REINFORCE),
    ("gamma", 0.9, "x", f"{ADVANTAGE}options.gamma", 0.9, {"adv_estimator": "mine.py:mine"}),
    ("lambd", 1, 2, f"{ADVANTAGE}lam", 1.0, {"adv_estimator": "gae"}),
    ("whiten_advantages", True, 1, f"{ADVANTAGE}whiten", True),
    ("step_reward_gamma", 0.8, 2, f"{ADVANTAGE}turn_gamma", 0.8, GIGPO),
    ("episode_reward_weight", 0.5, "x", f"{ADVANTAGE}episode_weight", 0.5, GIGPO),
    ("step_reward_weight", 2, "x", f"{ADVANTAGE}turn_weight", 2.0, GIGPO),
    ("norm_mean_type", "batch", "running", "algorithm.shaping.center", "batch", REINFORCE),
    ("norm_std_type", "group", "running", "algorithm.shaping.divide", "group", REINFORCE),
    ("reward_clip", 10, 0, "algorithm.shaping.clip", 10.0),
    ("ppo_epochs", 2, 0, "training.epochs", 2),
    ("pg_clip", 0.1, 1, f"{LOSS}clip_low", 0.1),
    ("pg_clip", 0.1, 0, f"{LOSS}clip_high", 0.1),
    ("use_pg_clip_range", True, 1, f"{LOSS}clip_low", 0.2, {"pg_clip": 0.3}),
    ("pg_clip_low", 0.1, 1, f"{LOSS}clip_low", 0.1, RANGE),
    ("pg_clip_high", 0.28, 0, f"{LOSS}clip_high", 0.28, RANGE),
    ("dual_clip_loss", True, 1, f"{LOSS}clip_dual", 1.4),
    ("pg_clip", 0.25, 1, f"{LOSS}clip_dual", 1.5, {"dual_clip_loss": True}),
    ("importance_sampling", "seq", "sequence", f"{LOSS}name", "gspo"),
    ("importance_sampling", "token", True, f"{LOSS}name", "ppo"),
    ("loss_agg_mode", "seq-mean-token-sum-norm", "mean", "algorithm.aggregation", "seq-mean-token-sum-norm"),
    ("entropy_loss_coef", 0.01, -1, "algorithm.entropy_coefficient", 0.01),
    ("value_clip", 0.5, 0, "critic.value_clip", 0.5),
    ("critic_warmup", 3, -1, "critic.warmup_steps", 3),
    ("actor_train.worker_cls", PG_WORKER, "mine.Worker", f"{LOSS}name", "topr", {VARIANT: "topr"}),
    (VARIANT, "vanilla", "plain", f"{LOSS}name", "reinforce"),
    (VARIANT, "ppo", "PPO", f"{LOSS}name", "ppo"),
    (VARIANT, "tis", 1, f"{LOSS}name", "cispo"),
    (VARIANT, "topr", 1, f"{LOSS}name", "topr"),
    (VARIANT, "cispo", 1, f"{LOSS}name", "cispo"),
    (VARIANT, "kimi15", "kimi", f"{LOSS}name", "kimi"),
    ("actor_train.tis_lower_bound", 0.5, 1, f"{LOSS}clip_low", 0.5, {VARIANT: "tis"}),
    ("actor_train.tis_upper_bound", 1.5, 0.9, f"{LOSS}clip_high", 0.5, {VARIANT: "tis"}),
    ("actor_train.cispo_epsilon_low", 0.3, 1, f"{LOSS}clip_low", 0.3, {VARIANT: "cispo"}),
    ("actor_train.cispo_epsilon_high", 4, 0, f"{LOSS}clip_high", 4.0, {VARIANT: "cispo"}),
    ("actor_train.topr_positive_weight", 2, -1, f"{LOSS}positive_weight", 2.0, {VARIANT: "topr"}),
    ("actor_train.topr_negative_weight", 0.5, -1, f"{LOSS}negative_weight", 0.5, {VARIANT: "topr"}),
    ("actor_train.kimi15_tau", 0.2, 0, f"{LOSS}tau", 0.2, {VARIANT: "kimi15"}),
    ("add_token_level_kl", True, 1, f"{KL}coefficient", 0.2),
    ("init_kl_coef", 0.1, -1, f"{KL}coefficient", 0.1, PENALTY),
    ("kl_penalty", "mse", "full", f"{KL}estimator", "k2", PENALTY),
    ("target_kl", 0.05, 0, f"{KL}target", 0.05, PENALTY),
    ("kl_horizon", 500, 0, f"{KL}horizon", 500, {**PENALTY, "target_kl": 0.05}),
    ("use_kl_loss", True, 1, f"{KL}apply_to", "loss"),
    ("kl_loss_coef", 0.01, -1, f"{KL}coefficient", 0.01, TERM),
    (f"{WEIGHT}enabled", True, 1, "algorithm.correction.level", "token"),
    (f"{WEIGHT}weight_type", "sequence", "turn", "algorithm.correction.level", "sequence", WEIGHTED),
    (f"{WEIGHT}upper_bound", 2, None, "algorithm.correction.upper", 2.0, WEIGHTED),
    (f"{WEIGHT}detach", True, False, "algorithm.correction.level", "token", WEIGHTED),
    (FILTERS, [{"enabled": True, "ratio_low": 0.5}], [{"ratio_low": 0}], "algorithm.correction.level", None),
    (f"{GENERATION}top_p", 0.99, 0, "rollout.top_p", 0.99),
    (f"{GENERATION}top_k", -1, -2, "rollout.top_k", 0),
    (f"{GENERATION}do_sample", False, 1, "rollout.do_sample", False),
    (f"{GENERATION}repetition_penalty", 1.1, 0, "rollout.repetition_penalty", 1.1),
    (f"{GENERATION}stop_strings", ["</answer>"], 3, "rollout.stop", ("</answer>",)),
    ("async_generation_ratio", 1.5, -1, "rollout.async_ratio", 1.5),
    ("async_generation_ratio", 1.5, "x", "rollout.max_staleness", 2),
    ("async_generation_ratio", 1, None, "rollout.partial", True),
    (f"{VALIDATION}temperature", 0.6, -1, f"{SAMPLING}temperature", 0.6),
    (f"{VALIDATION}top_p", 0.6, 0, f"{SAMPLING}top_p", 0.6),
    (f"{VALIDATION}top_k", -1, -2, f"{SAMPLING}top_k", 0),
    (f"{VALIDATION}do_sample", False, 1, f"{SAMPLING}do_sample", False),
    (f"{VALIDATION}do_sample", True, 1, f"{SAMPLING}do_sample", True),
    (f"{VALIDATION}num_return_sequences", 4, 0, f"{SAMPLING}samples", 4),
    (f"{VALIDATION}max_new_tokens", 4096, 100, "rollout.max_response_tokens", 4096),
    ("validation.data_args.file_name", "held_out.json", 1, "data.validation_files", ("held_out.json",)),
    # keys that ROLL documents for `actor_train` and that other workers take, too
    ("critic.training_args.learning_rate", 1e-5, 0, "critic.optimizer.learning_rate", 1e-5),
    ("critic.training_args.warmup_steps", 7, -1, "critic.optimizer.warmup_steps", 7),
    ("critic.training_args.per_device_train_batch_size", 32, 0, "critic.budget.sequences", 32),
    ("critic.infer_batch_size", 2, 0, "critic.inference_budget.sequences", 2),
    ("critic.model_args.dtype", "fp32", "int8", "critic.dtype", "float32"),
    (f"{CRITIC_OPTION}tensor_model_parallel_size", 2, 0, "critic.parallel.tensor", 2),
    (f"{CRITIC_OPTION}moe_grouped_gemm", True, 1, "critic.megatron.moe_grouped_gemm", True),
    (f"{CRITIC_OPTION}recompute_granularity", "full", "half", "critic.gradient_checkpointing", True),
    (f"{REFERENCE_OPTION}pipeline_model_parallel_size", 4, 0, "reference.parallel.pipeline", 4),
    (f"{REFERENCE_OPTION}sequence_parallel", True, 1, "reference.parallel.sequence", True),
]
"""Key, a legal value, an illegal one, the native key, what that becomes, and what else is written."""
ONE_BEAM = (f"{GENERATION}num_beams", f"{VALIDATION}num_beams")


def roll(tmp_path: Path, changes: dict[str, Any]) -> ConversionResult:
    """A file of ROLL's with prompts, and other values for these keys."""
    return converted(tmp_path, "roll", changed(PLAIN, changes))


def refused(tmp_path: Path, changes: dict[str, Any]) -> str:
    """The message that refuses such a file."""
    with pytest.raises(ConfigError) as error:
        roll(tmp_path, changes)
    return str(error.value)


@pytest.mark.proves("roll", *ONE_BEAM, *(case[0] for case in REACHED))
@pytest.mark.parametrize("case", REACHED, ids=lambda case: f"{case[0]}-{case[3]}-{case[4]}")
def test_a_key_reaches_the_run(tmp_path: Path, case: tuple[Any, ...]) -> None:
    key, value, illegal, native, expected, *rest = case
    others: dict[str, Any] = rest[0] if rest else {}
    found = roll(tmp_path, {**others, key: value})
    assert natively(found, native) == expected
    assert f"{key}: given.yaml:1" in found.composed.provenance[native]
    assert translated(found, "roll").lost == {}
    assert f"{key} = " in refused(tmp_path, {**others, key: illegal})


@pytest.mark.parametrize("key", ONE_BEAM)
def test_there_is_one_beam(tmp_path: Path, key: str) -> None:
    roll(tmp_path, {key: 1})
    assert f"{key} = 4" in refused(tmp_path, {key: 4})


@pytest.mark.parametrize("reference", ["roll", "roll_run", "roll_algorithm", "roll_sampling"])
def test_each_key_has_a_row_in_that_table(reference: str) -> None:
    assert {spec.key for spec in load_keys("roll", reference)} <= {*ONE_BEAM, *(case[0] for case in REACHED)}
