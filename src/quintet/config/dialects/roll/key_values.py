"""Values of ROLL's keys: native values, key prefixes, and types that a type expression cannot describe."""

from collections.abc import Mapping
from typing import Any

from quintet.config.dialects.roll.device_mapping import parse_device_mapping
from quintet.config.dialects.value_types import BOOLEAN, POSITIVE_NUMBER, ValueType, optional, parse_type

POLICY = "actor_train."
VALIDATION = "validation.generating_args."
LEVELS = {"token": "token", "geometric": "sequence_mean", "sequence": "sequence_sum"}
"""Native rejection levels by the `agg_type` of ROLL's ratio filters."""
SEGMENT = "segment"
"""`agg_type` of the response of one turn."""

_FILTER = {"enabled", "agg_type", "ratio_enabled", "ratio_low", "ratio_high", "diff_enabled", "diff_low", "diff_high"}


def _is_ratio_filter(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value or not set(value) <= _FILTER:
        return False
    switches = all(BOOLEAN.accepts(value[key]) for key in _FILTER if key.endswith("enabled") and key in value)
    low, high = value.get("ratio_low", 0.8), value.get("ratio_high", 1.2)
    bounds = POSITIVE_NUMBER.accepts(low) and POSITIVE_NUMBER.accepts(high) and low < high
    return switches and bounds and value.get("agg_type", "token") in (*LEVELS, SEGMENT)


def _is_device_0(mapping: object) -> bool:
    try:
        devices = parse_device_mapping(mapping) if isinstance(mapping, str) else mapping
    except ValueError:
        return False
    return devices in (None, (0,), [0])


VALUE_TYPES = {
    "strategy": optional(
        parse_type(
            "one of fsdp2_train | megatron_train | deepspeed_train | fsdp2_infer | megatron_infer | deepspeed_infer |"
            " hf_infer | vllm | sglang".replace("  ", " ")
        )
    ),
    "ratio_filter": ValueType(
        "sections with enabled, agg_type (token, segment, geometric or sequence), ratio_low > 0 and ratio_high",
        _is_ratio_filter,
    ),
    "device_0": ValueType("device 0 alone, or null", _is_device_0),
}
