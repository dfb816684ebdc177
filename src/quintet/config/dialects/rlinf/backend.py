"""Conversion of RLinf's training backends, FSDP and Megatron, and of settings of policy and optimizer shared by all."""

from __future__ import annotations

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import (
    ConversionRule,
    Derived,
    Same,
    apply_from_native,
    apply_to_native,
    inverted,
)
from quintet.config.dialects.rlinf.value_maps import DTYPES

BACKEND, STRATEGY, PRECISION = "actor.training_backend", "actor.fsdp_config.strategy", "actor.model.precision"
PARAMETER_DTYPE, REDUCE_DTYPE, BUFFER_DTYPE = (
    f"actor.fsdp_config.mixed_precision.{name}_dtype" for name in ("param", "reduce", "buffer")
)
TOKENIZER = "actor.tokenizer.tokenizer_model"
LEARNER_RULES: tuple[ConversionRule, ...] = (
    Same(
        ("actor.inference_budget.sequences", "reference.inference_budget.sequences"),
        "algorithm.logprob_forward_micro_batch_size",
        export_none=False,
    ),
    Derived(
        "actor.optimizer.betas",
        ("actor.optim.adam_beta1", "actor.optim.adam_beta2"),
        lambda first, second: [first, second],
        tuple,
    ),
)
_DTYPE_NAMES = inverted(DTYPES)
FSDP_RULES: tuple[ConversionRule, ...] = (
    Same("actor.sharding.reduce_dtype", REDUCE_DTYPE, to_value=DTYPES.get, from_value=_DTYPE_NAMES.get),
    Derived(
        "actor.sharding.autocast",
        ("actor.fsdp_config.amp_autocast.enabled", "actor.fsdp_config.amp_autocast.precision"),
        lambda enabled, precision: DTYPES[precision] if enabled else None,
        lambda dtype: (False,) if dtype is None else (True, _DTYPE_NAMES[dtype]),
    ),
)
MEGATRON_DEFAULTS = {
    "actor.megatron.seq_length": ("actor.model.seq_length", "runner.seq_length"),
    "actor.megatron.encoder_seq_length": ("actor.model.encoder_seq_length", "runner.seq_length"),
    "actor.megatron.conversion.source": ("actor.megatron.ckpt.hf_model_path", "rollout.model.model_path"),
    "actor.megatron.conversion.tensor_parallel": (
        "actor.megatron.ckpt.tensor_model_parallel_size",
        "actor.model.tensor_model_parallel_size",
    ),
    "actor.megatron.conversion.pipeline_parallel": (
        "actor.megatron.ckpt.pipeline_model_parallel_size",
        "actor.model.pipeline_model_parallel_size",
    ),
}
"""By native key: its foreign key, and another one with the same value by default; the native default is null."""
CHECKPOINT, FROM_HF = "actor.model.megatron_checkpoint", "actor.megatron.use_hf_ckpt"
MIXED_PRECISION_FLAGS = {"bf16": "bfloat16", "fp16": "float16"}


def tokenizer_to_native(values: ForeignValues, native: NativeBuilder, path: str) -> None:
    """Set the tokenizer if the user chose another one than the model's; the reference's belongs to its own model."""
    is_other = values.is_set(TOKENIZER) and values[TOKENIZER] != values[path]
    native.set("policy.tokenizer", values[TOKENIZER] if is_other else None, TOKENIZER)


def backend_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the learner's backend, and FSDP's number types."""
    is_fsdp = values[BACKEND] == "fsdp"
    backend, origins = (values[STRATEGY].lower(), (BACKEND, STRATEGY)) if is_fsdp else ("megatron", (BACKEND,))
    for component in ("actor", "reference") if values["algorithm.kl_beta"] else ("actor",):
        native.set(f"{component}.backend", backend, *origins)
    if not is_fsdp:
        return
    dtype = DTYPES.get(values[PARAMETER_DTYPE])
    is_policys = dtype == native.get("policy.dtype")
    native.set("actor.sharding.parameter_dtype", None if is_policys else dtype, PARAMETER_DTYPE)
    buffer_dtype = DTYPES.get(values[BUFFER_DTYPE]) or DTYPES.get(values[PRECISION], "float32")
    native.set("actor.sharding.buffer_dtype", buffer_dtype, BUFFER_DTYPE)
    apply_to_native(FSDP_RULES, values, native)


def backend_from_native(foreign: ForeignBuilder) -> None:
    """Set the tokenizer, the learner's backend and FSDP's number types."""
    learner, policy = foreign.experiment.actor, foreign.experiment.policy
    foreign.set(TOKENIZER, policy.tokenizer or policy.path)
    foreign.set(BACKEND, "megatron" if learner.backend == "megatron" else "fsdp")
    if learner.backend == "megatron":
        return
    foreign.set(STRATEGY, learner.backend)
    foreign.set(PARAMETER_DTYPE, _DTYPE_NAMES.get(learner.sharding.parameter_dtype or policy.dtype))
    foreign.set(BUFFER_DTYPE, _DTYPE_NAMES.get(learner.sharding.buffer_dtype))
    apply_from_native(FSDP_RULES, foreign)


def megatron_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set Megatron's lengths, checkpoint and number types."""
    if values[BACKEND] != "megatron":
        return
    for key, (foreign, default) in MEGATRON_DEFAULTS.items():
        native.set(key, None if values[foreign] == values[default] else values[foreign], foreign)
    native.set("actor.megatron.checkpoint", values[CHECKPOINT], CHECKPOINT, FROM_HF)
    for flag, dtype in MIXED_PRECISION_FLAGS.items():
        key = f"actor.optim.{flag}"
        enabled = values[key] if values.is_set(key) else native.get("policy.dtype") == dtype
        native.set(f"actor.megatron.{flag}", enabled, key, PRECISION)


def megatron_from_native(foreign: ForeignBuilder) -> None:
    """Set Megatron's keys."""
    megatron = foreign.experiment.actor.megatron
    if megatron is None:
        return
    for native, (key, _) in MEGATRON_DEFAULTS.items():
        if (value := foreign.native_value(native)) is not None:
            foreign.set(key, value)
    foreign.set(CHECKPOINT, megatron.checkpoint)
    foreign.set(FROM_HF, megatron.checkpoint is None)
    for flag in MIXED_PRECISION_FLAGS:
        foreign.set(f"actor.optim.{flag}", getattr(megatron, flag))
