"""Values of ROLL's keys: native values, key prefixes, and types that a type expression cannot describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quintet.config.dialects.roll.device_mapping import parse_device_mapping
from quintet.config.dialects.value_types import BOOLEAN, POSITIVE_NUMBER, ValueType

POLICY = "actor_train."
VALIDATION = "validation.generating_args."
VARIANTS: Mapping[str | None, str] = {
    None: "ppo",
    "ppo": "ppo",
    "vanilla": "reinforce",
    "topr": "topr",
    "cispo": "cispo",
    "tis": "cispo",
    "kimi15": "kimi",
}
"""Native policy losses by `pg_variant`. `tis` is `cispo` with other bounds on the same weight."""
LEVELS = {"token": "token", "geometric": "sequence_mean", "sequence": "sequence_sum"}
"""Native rejection levels by the `agg_type` of ROLL's ratio filters."""
MODEL_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", None: "auto"}
SHARD_DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16", "half"), "float16"),
    **dict.fromkeys(("float32", "fp32", "float"), "float32"),
    **dict.fromkeys(("fp64", "float64"), "float64"),
}
OPTIMIZER: Mapping[str, Any] = {
    "schedule": "linear",
    "min_learning_rate_ratio": 0.0,
    "betas": [0.9, 0.999],
    "epsilon": 1e-8,
    "max_grad_norm": 1.0,
}
OPTIMIZER_DEFAULTS: dict[str, Any] = {
    **{f"{learner}.optimizer.{key}": value for learner in ("actor", "critic") for key, value in OPTIMIZER.items()},
    "critic.optimizer.learning_rate": 5e-5,
    "critic.optimizer.weight_decay": 0.0,
    "critic.optimizer.warmup_steps": 0,
}
"""ROLL's optimizer, as far as it has no keys in the reference."""

_FILTER = {"enabled", "agg_type", "ratio_enabled", "ratio_low", "ratio_high", "diff_enabled", "diff_low", "diff_high"}


def _is_ratio_filter(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value or not set(value) <= _FILTER:
        return False
    switches = all(BOOLEAN.accepts(value[key]) for key in _FILTER if key.endswith("enabled") and key in value)
    low, high = value.get("ratio_low", 0.8), value.get("ratio_high", 1.2)
    bounds = POSITIVE_NUMBER.accepts(low) and POSITIVE_NUMBER.accepts(high) and low < high
    return switches and bounds and value.get("agg_type", "token") in LEVELS and not value.get("diff_enabled", False)


def _is_device_0(mapping: object) -> bool:
    try:
        devices = parse_device_mapping(mapping) if isinstance(mapping, str) else mapping
    except ValueError:
        return False
    return devices in (None, (0,), [0])


VALUE_TYPES = {
    "ratio_filter": ValueType(
        "sections with enabled, agg_type (token, geometric or sequence), ratio_low > 0 and ratio_high", _is_ratio_filter
    ),
    "device_0": ValueType("device 0 alone, or null", _is_device_0),
}
NATIVE_VALUES: Mapping[str, Mapping[Any, Any]] = {
    "backends": {"megatron_train": "megatron", "fsdp2_train": "fsdp2"},
    "model_dtypes": MODEL_DTYPES,
    "shard_dtypes": SHARD_DTYPES,
}
