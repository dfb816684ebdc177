"""Defaults that depend on whether the policy is pretrained, and on LoRA: warm start and learning rates."""

from collections.abc import Iterator, Mapping
from typing import Any

from quintet.config.composed import config_value, with_value
from quintet.config.dotted import has_key
from quintet.config.native.experiment import Experiment
from quintet.config.plan.models import policy_path

RATE = "optimizer.learning_rate"
PRETRAINED_RATES = {"actor": (1e-6, 1e-5), "critic": (1e-5, 1e-5), "warm_start": (1e-5, 1e-4), "sft": (1e-5, 1e-4)}
"""Learning rates of a model from a directory: of all its weights, and of LoRA adapters."""
NEW_SFT_RATE = 1e-3
"""Learning rate of fine-tuning that begins with random weights."""


def is_new_policy(config: Experiment) -> bool:
    """Return whether the run begins with random weights."""
    megatron = config.actor.megatron
    return policy_path(config) is None and (megatron is None or megatron.checkpoint is None)


def suitable_rate(config: Experiment, section: str) -> float | None:
    """Return the learning rate that suits the policy in a section; None if the default of the section does."""
    if is_new_policy(config):
        return NEW_SFT_RATE if section == "sft" else None
    return PRETRAINED_RATES[section][trains_adapters(config, section)]


def trains_adapters(config: Experiment, section: str) -> bool:
    """Return whether a section trains LoRA adapters of the policy."""
    owner = {"sft": config.sft, "critic": None}.get(section, config.policy)
    return owner is not None and owner.lora is not None


def with_suitable_defaults(config: Experiment, tree: Mapping[str, Any]) -> Experiment:
    """Return the configuration with what suits its policy where the `tree` of the user sets nothing: no warm start of
    a policy that is pretrained or fine-tuned first, and learning rates."""
    is_tuned_first = config.sft is not None and config.sft.then_reinforce
    if (is_tuned_first or not is_new_policy(config)) and not has_key(tree, "warm_start"):
        config = with_value(config, "warm_start", None)
    for key, rate in _unset_rates(config, tree):
        config = with_value(config, key, rate)
    return config


def _unset_rates(config: Experiment, tree: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for section in PRETRAINED_RATES:
        key, rate = f"{section}.{RATE}", suitable_rate(config, section)
        if rate is not None and config_value(config, section) is not None and not has_key(tree, key):
            yield key, rate
