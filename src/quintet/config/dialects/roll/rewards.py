"""Conversion of the sections of `rewards`: the verifier of each domain, and the prompts that a filter drops."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.roll.judge import is_judge, judge_to_native
from quintet.config.dialects.roll.kinds import TABLES
from quintet.config.dialects.roll.workers import max_response
from quintet.config.native.algorithm import FilterConfig

SHARES, TAG = "actor_train.data_args.domain_interleave_probs", "actor_train.data_args.tag"
VERIFIER_OPTIONS = ("reward_type", "response_length_penalty_coef")
"""Keys of a domain that are options of its verifier."""
DEFAULT_DOMAIN = "math_rule"
"""Domain of rows whose tag no domain has."""
VERIFIERS: Mapping[str, str] = TABLES["verifiers"]
"""Verifier of each of ROLL's reward classes."""
CODE_SECONDS = 360.0
"""Time that ROLL gives to all tests of a response."""
ADDITIONAL_PROMPTS, LOW, HIGH, MASK = (
    *("is_use_additional_prompts", "difficulty_low_threshold", "difficulty_high_threshold"),
    "difficulty_mask",
)
REFILL_ROUNDS = 8
"""Further rollouts that replace dropped prompts; ROLL generates until the step is complete."""
FILTER = "algorithm.filter"


def domain_names(values: ForeignValues) -> tuple[str, ...]:
    """Return the names of the domains in the section `rewards`."""
    keys = (key for key in values.dialect.specs() if key.startswith("rewards."))
    return tuple(dict.fromkeys(key.split(".")[1] for key in keys))


def rewards_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the domains with their verifiers, and the prompts that are left out of training by their rewards."""
    names = domain_names(values)
    judged = [name for name in names if is_judge(values, f"rewards.{name}")]
    if names == (DEFAULT_DOMAIN,) and not judged and set(values[SHARES] or names) == set(names):
        section, verifier = f"rewards.{DEFAULT_DOMAIN}", _verifier(values, DEFAULT_DOMAIN, native)
        native.set("reward.kind", verifier["kind"], f"{section}.worker_cls")
        options = (f"{section}.{key}" for key in VERIFIER_OPTIONS)
        native.set("reward.function_arguments", verifier.get("arguments", {}), *options)
    else:
        _domains_to_native(values, names, native)
    sections = {name: f"rewards.{name}.world_size" for name in names if name not in judged}
    processes = {key: values[key] for key in sections.values()}
    if any(count is not None for count in processes.values()):
        native.set("reward.workers", sum(count or 1 for count in processes.values()), *processes)
    filters = [_filter_to_native(values, name, native) for name in names]
    if len(set(filters)) > 1:
        native.require(f"rewards.{names[0]}.query_filter_config.type", Capability.REWARD_DOMAINS)
    if values[MASK]:
        # ROLL's thresholds are exclusive
        native.set(f"{FILTER}.min_mean", math.nextafter(values[LOW], math.inf), MASK, LOW)
        native.set(f"{FILTER}.max_mean", math.nextafter(values[HIGH], -math.inf), MASK, HIGH)
    if values[ADDITIONAL_PROMPTS] and len(names) > 1:
        native.require(ADDITIONAL_PROMPTS, Capability.REWARD_DOMAINS)
    elif values[ADDITIONAL_PROMPTS]:
        native.set(f"{FILTER}.refill_rounds", REFILL_ROUNDS, ADDITIONAL_PROMPTS)


def _domains_to_native(values: ForeignValues, names: Sequence[str], native: NativeBuilder) -> None:
    """Set the prompts and the verifier of each domain, in the order of their shares."""
    shares = values[SHARES] or {names[0]: 1.0}
    for name in (*(name for name in shares if name in names), *(name for name in names if name not in shares)):
        tags, domain = f"rewards.{name}.tag_included", f"data.domains.{name}"
        native.set(f"{domain}.sources", [*values[tags], *(["*"] if name == DEFAULT_DOMAIN else [])], tags)
        native.set(f"{domain}.share", float(shares.get(name) or 0.0), SHARES)
        if is_judge(values, f"rewards.{name}"):
            judge_to_native(values, f"rewards.{name}", native, f"reward.verifiers.{name}.judge")
            continue
        verifier = _verifier(values, name, native)
        native.set(f"reward.verifiers.{name}.kind", verifier["kind"], f"rewards.{name}.worker_cls")
        if "arguments" in verifier:
            options = (f"rewards.{name}.{key}" for key in VERIFIER_OPTIONS)
            native.set(f"reward.verifiers.{name}.arguments", verifier["arguments"], *options)
    native.set("data.source_key", values[TAG], TAG)


def _verifier(values: ForeignValues, name: str, native: NativeBuilder) -> dict[str, Any]:
    """Return the verifier of a domain with its options."""
    section = f"rewards.{name}"
    kind = VERIFIERS.get(values[f"{section}.worker_cls"], "math_rule")
    if kind == "code_sandbox":
        native.set("reward.timeout_seconds", CODE_SECONDS, f"{section}.worker_cls")
        if not values[f"{section}.use_local"]:
            native.require(f"{section}.use_local", Capability.REWARD_WORKERS)
    if kind != "crossthinkqa":
        return {"kind": kind}
    style, coefficient = (values[f"{section}.{key}"] for key in VERIFIER_OPTIONS)
    length = {"length_coefficient": coefficient, "padded_length": max_response(values)[0]} if coefficient else {}
    return {"kind": kind, "arguments": {"reward_type": style or "soft", **length}}


def _filter_to_native(values: ForeignValues, name: str, native: NativeBuilder) -> tuple[Any, ...]:
    """Set the filter of a domain's prompts, and return it; several domains have to have the same one."""
    section = f"rewards.{name}.query_filter_config"
    kind, low, high, deviation = (
        f"{section}.{key}"
        for key in ("type", "filter_args.threshold_down", "filter_args.threshold_up", "filter_args.std_threshold")
    )
    if values[kind] in (None, "no_filter"):
        return ()
    if values[kind] == "mean_filter":
        native.set(f"{FILTER}.min_mean", values[low], kind, low)
        native.set(f"{FILTER}.max_mean", values[high], kind, high)
    else:
        native.set("algorithm.drop_groups_without_signal", True, kind)
        native.set("algorithm.signal_threshold", float(values[deviation] or 0.0), deviation, kind)
    return values[kind], values[low], values[high], values[deviation]


def filters_from_native(foreign: ForeignBuilder) -> None:
    """Set the filter of prompts by their mean reward."""
    if foreign.experiment.env.name != "prompts":
        return
    algorithm, changes = foreign.experiment.algorithm, _bounds(foreign.experiment.algorithm.filter)
    for key, value in changes.items():
        foreign.set(key, value)
    if algorithm.drop_groups_without_signal:
        foreign.set("rewards.math_rule.query_filter_config.type", "std_filter")
        threshold = "rewards.math_rule.query_filter_config.filter_args.std_threshold"
        foreign.set(threshold, algorithm.signal_threshold)


def _bounds(config: FilterConfig) -> Mapping[str, Any]:
    section = "rewards.math_rule.query_filter_config"
    bounds = {"filter_args.threshold_down": config.min_mean, "filter_args.threshold_up": config.max_mean}
    values: dict[str, Any] = {f"{section}.{key}": bound for key, bound in bounds.items() if bound is not None}
    if values:
        values[f"{section}.type"] = "mean_filter"
    if config.refill_rounds:
        values[ADDITIONAL_PROMPTS] = True
    return values
