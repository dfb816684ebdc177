"""Conversion of RLinf's training backends, FSDP and Megatron."""

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import switched
from quintet.config.dialects.rlinf.component_placement import PIPELINE, TENSOR

BACKEND, STRATEGY, PRECISION = "actor.training_backend", "actor.fsdp_config.strategy", "actor.model.precision"
MIXED_PRECISION, AUTOCAST = "actor.fsdp_config.mixed_precision", "actor.fsdp_config.amp_autocast"
PARAMETER_DTYPE, BUFFER_DTYPE = (
    "actor.fsdp_config.mixed_precision.param_dtype",
    "actor.fsdp_config.mixed_precision.buffer_dtype",
)
_AUTOCAST = switched(
    "actor.sharding.autocast", "actor.fsdp_config.amp_autocast.enabled", "actor.fsdp_config.amp_autocast.precision"
)
CONVERTER = "actor.megatron.ckpt"
MEGATRON_DEFAULTS = {
    "seq_length": ("actor.model.seq_length", "runner.seq_length"),
    "encoder_seq_length": ("actor.model.encoder_seq_length", "runner.seq_length"),
    "conversion.source": ("actor.megatron.ckpt.hf_model_path", "rollout.model.model_path"),
    "conversion.tensor_parallel": ("actor.megatron.ckpt.tensor_model_parallel_size", TENSOR),
    "conversion.pipeline_parallel": ("actor.megatron.ckpt.pipeline_model_parallel_size", PIPELINE),
}
"""By native key of Megatron: its foreign key, and another one with the same value by default; the native default is
null."""
FORMAT = "actor.megatron.ckpt_format"
CHECKPOINT, FROM_HF = "actor.model.megatron_checkpoint", "actor.megatron.use_hf_ckpt"
PROFILER, PROFILES = "actor.megatron.use_profiler", "actor.megatron.profiler"
REPEAT, EXPORTS = (
    "actor.megatron.profiler.schedule_repeat",
    [f"{PROFILES}.export_{kind}" for kind in ("tensorboard", "chrome_trace")],
)
MIXED_PRECISION_FLAGS = {"bf16": "bfloat16", "fp16": "float16"}


def backend_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the learner's backend and number types."""
    is_fsdp = values[BACKEND] == "fsdp"
    backend, origins = (values[STRATEGY].lower(), (BACKEND, STRATEGY)) if is_fsdp else ("megatron", (BACKEND,))
    has_reference = native.get("algorithm.kl.apply_to") == "loss"
    for component in ("actor", "reference") if has_reference else ("actor",):
        native.set(f"{component}.backend", backend, *origins)
    if not is_fsdp:
        return
    dtype = values.native(PARAMETER_DTYPE)
    is_policys = dtype == native.get("policy.dtype")
    native.set("actor.sharding.parameter_dtype", None if is_policys else dtype, PARAMETER_DTYPE)
    if values[BUFFER_DTYPE] is None:
        dtype = "float32" if values[PRECISION] is None else values.native(PRECISION)
        native.set("actor.sharding.buffer_dtype", dtype, BUFFER_DTYPE)
    _AUTOCAST.to_native(values, native)


def megatron_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set Megatron's lengths, checkpoint and number types."""
    if values[BACKEND] != "megatron":
        return
    for name, (key, default) in MEGATRON_DEFAULTS.items():
        native.set(f"actor.megatron.{name}", None if values[key] == values[default] else values[key], key)
    native.set("actor.megatron.checkpoint", values[CHECKPOINT], CHECKPOINT, FROM_HF)
    if values[CHECKPOINT] is not None:
        native.set("actor.megatron.ckpt_format", values[FORMAT], FORMAT, CHECKPOINT)
    for flag, dtype in MIXED_PRECISION_FLAGS.items():
        key = f"actor.optim.{flag}"
        enabled = values[key] if values.is_set(key) else native.get("policy.dtype") == dtype
        native.set(f"actor.megatron.{flag}", enabled, key, PRECISION)
    _profile_to_native(values, native)


def _profile_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the first steps, which are profiled on all ranks, unless RLinf writes no files of them."""
    if not values[PROFILER]:
        return
    if not any(values[key] for key in EXPORTS):
        native.set("tracking.profile", None, PROFILER, *EXPORTS)
        return
    native.set("tracking.profile.steps", [*range(1, values[REPEAT] + 1)] or None, REPEAT, PROFILER)
    native.set("tracking.profile.ranks", None, PROFILER)


def backend_from_native(foreign: ForeignBuilder) -> None:
    """Set the learner's backend, and FSDP's number types, which have no effect on another backend."""
    learner, policy = foreign.experiment.actor, foreign.experiment.policy
    foreign.set(BACKEND, "megatron" if learner.backend == "megatron" else "fsdp")
    foreign.set(STRATEGY, learner.backend)
    foreign.set_native(PARAMETER_DTYPE, learner.sharding.parameter_dtype or policy.dtype)
    _AUTOCAST.from_native(foreign)


def megatron_from_native(foreign: ForeignBuilder) -> None:
    """Set Megatron's keys, which have no effect on another backend."""
    keys = {name: key for name, (key, _) in MEGATRON_DEFAULTS.items()}
    keys |= {flag: f"actor.optim.{flag}" for flag in MIXED_PRECISION_FLAGS}
    for name, key in keys.items():
        foreign.set(key, foreign.native_value(f"actor.megatron.{name}"))
    foreign.set(FROM_HF, foreign.native_value("actor.megatron.checkpoint") is None)
    profile = foreign.experiment.tracking.profile
    if profile is not None and profile.torch is not None:
        foreign.set(PROFILER, True)
        foreign.set(REPEAT, len(profile.steps or ()))
