"""Keys that were set and have no effect because of the value of another key."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from quintet.config.schema import documented_key, format_value, keys


class _Rule(NamedTuple):
    """Keys of a section that only have an effect for some values of another key."""

    section: str
    """Last part of the section's name, or of an enclosing section."""
    names: tuple[str, ...]
    """Keys, or sections with all their keys."""
    other_key: str
    values: tuple[object, ...]
    """Values of `other_key` with which the keys have an effect."""


DEFAULT = "default"
FSDP = ("fsdp", "fsdp2")
LEARNERS = ("actor", "critic", "reference")
DECAYS = ("linear", "cosine", "wsd", "inverse_square_root")
RULES = (
    _Rule("optimizer", ("betas", "epsilon"), "kind", ("adamw", "muon")),
    _Rule("optimizer", ("decay_steps", "min_learning_rate_ratio"), "schedule", DECAYS),
    _Rule("optimizer", ("cycles",), "schedule", ("cosine",)),
    _Rule("optimizer", ("stable_decay", "stable_decay_steps"), "schedule", ("wsd",)),
    _Rule("optimizer", ("weight_decay_start",), "weight_decay_schedule", ("linear", "cosine")),
    _Rule("sharding", ("grad_scaler_start", "grad_scaler_growth_steps"), "grad_scaler", (True,)),
    _Rule("loss", ("clip_low", "clip_high", "clip_dual", "policy_logprobs"), "gradient", ("policy",)),
    *(_Rule(name, ("sharding",), "backend", FSDP) for name in LEARNERS),
    *(_Rule(name, ("megatron",), "backend", ("megatron",)) for name in LEARNERS),
)
ALWAYS_USED = ("megatron.moe_token_dispatcher_type", "megatron.use_checkpoint_opt_param_scheduler")
"""Keys under `megatron` that other backends use, too."""


def unused_keys(values: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each dotted key in `values` that was set, differs from its default and has no effect."""
    for key, value in values.items():
        source = sources.get(key, DEFAULT)
        if source == DEFAULT or key.endswith(ALWAYS_USED):
            continue
        overriding = [*_overriding_keys(key, values)]
        if overriding and not _is_default(key, value):
            yield from (
                f"{key} = {format_value(value)} ({source}) has no effect with {other} = {format_value(values[other])}"
                for other in overriding
            )


def _is_default(key: str, value: Any) -> bool:
    defaults = {each.name: each.default for each in keys() if not each.is_section}
    return bool((list(value) if isinstance(value, tuple) else value) == defaults.get(documented_key(key)))


def _overriding_keys(key: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys whose values leave `key` without effect."""
    parts = key.split(".")
    if "processes" in parts and values[key] is not None:
        # an environment service has worker processes of its own
        service = ".".join([*parts[: parts.index("processes")], "service", "urls"])
        if service in values:
            yield service
    for rule in RULES:
        for depth, part in enumerate(parts[:-1]):
            if part != rule.section or parts[depth + 1] not in rule.names:
                continue
            other = ".".join([*parts[: depth + 1], rule.other_key])
            if other in values and values[other] not in rule.values:
                yield other
