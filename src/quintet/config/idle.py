"""Keys that were set and do nothing beside others: each is told, for whoever set it expects something of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from quintet.config.keys import documented, keys, show

__all__ = ["idle_keys"]


class _Rule(NamedTuple):
    """Keys of a section that count for some values of another key alone."""

    section: str
    """Its last name, or the last of the sections around it."""
    names: tuple[str, ...]
    """Keys, or sections with all that is in them."""
    beside: str
    values: tuple[object, ...]


DEFAULT = "default"
FSDP = ("fsdp", "fsdp2")
LEARNERS = ("actor", "critic", "reference")
RULES = (
    _Rule("optimizer", ("betas", "epsilon"), "kind", ("adamw", "muon")),
    _Rule(
        "optimizer",
        ("decay_steps", "min_learning_rate_ratio"),
        "schedule",
        ("linear", "cosine", "wsd", "inverse_square_root"),
    ),
    _Rule("optimizer", ("cycles",), "schedule", ("cosine",)),
    _Rule("optimizer", ("stable_decay", "stable_decay_steps"), "schedule", ("wsd",)),
    _Rule("optimizer", ("weight_decay_start",), "weight_decay_schedule", ("linear", "cosine")),
    _Rule("sharding", ("grad_scaler_start", "grad_scaler_growth_steps"), "grad_scaler", (True,)),
    *(_Rule(name, ("sharding",), "backend", FSDP) for name in LEARNERS),
    *(_Rule(name, ("megatron",), "backend", ("megatron",)) for name in LEARNERS),
)
ANYWHERE = ("megatron.moe_token_dispatcher_type", "megatron.use_checkpoint_opt_param_scheduler")
"""Of Megatron's names, those that other backends follow, too."""


def idle_keys(values: Mapping[str, Any], sources: Mapping[str, str]) -> Iterator[str]:
    """A line for each of the dotted keys in `values` that has another value than by default, was set by somebody as
    `sources` tell, and has no effect."""
    defaults = {key.name: key.default for key in keys() if not key.is_section}
    for key, value in values.items():
        source = sources.get(key, DEFAULT)
        if source == DEFAULT or key.endswith(ANYWHERE) or _same(value, defaults.get(documented(key))):
            continue
        for beside in _silencers(key, values):
            yield f"{key} = {show(value)} ({source}) has no effect beside {beside} = {show(values[beside])}"


def _silencers(key: str, values: Mapping[str, Any]) -> Iterator[str]:
    """The keys whose values leave another one without effect."""
    parts = key.split(".")
    for rule in RULES:
        for place, part in enumerate(parts[:-1]):
            if part != rule.section or parts[place + 1] not in rule.names:
                continue
            beside = ".".join([*parts[: place + 1], rule.beside])
            if beside in values and values[beside] not in rule.values:
                yield beside


def _same(value: object, default: object) -> bool:
    plain = list(value) if isinstance(value, tuple) else value
    return plain == default
