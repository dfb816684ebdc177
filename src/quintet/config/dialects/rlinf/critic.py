"""Conversion of the critic of RLinf's runs on text."""

from quintet.config.dialects.conversion import ForeignValues, NativeBuilder
from quintet.config.dialects.rlinf.critic_keys import BACKEND, DTYPE, STRATEGY, WEIGHTS
from quintet.config.dialects.rlinf.optimizer import optimizer_to_native


def critic_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the critic's own optimizer, number types, weights and backend."""
    optimizer_to_native(values, native, "critic")
    if values.is_set(DTYPE):
        native.set("critic.dtype", values.native(DTYPE), DTYPE)
    if values.is_set(WEIGHTS) and values[WEIGHTS] != native.get("policy.path"):
        native.set("critic.path", values[WEIGHTS], WEIGHTS)
    for flag, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if values[BACKEND] == "megatron":
            native.set(f"critic.megatron.{flag}", values.native(DTYPE) == dtype, f"critic.optim.{flag}", DTYPE)
    if values.is_set(BACKEND):
        backend = values[STRATEGY].lower() if values[BACKEND] == "fsdp" else values[BACKEND]
        native.set("critic.backend", backend, BACKEND, STRATEGY)
