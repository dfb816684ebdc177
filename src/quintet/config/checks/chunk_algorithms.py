"""Algorithms that are not defined for chunks of robot actions, and options of chunks in other runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quintet.config.composed import ComposedConfig, config_value
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "algorithm.aggregation": ("token-mean", "seq-mean-token-mean"),
    "algorithm.micro_batch_weights": ("exact",),
    "algorithm.correction": (None,),
    "algorithm.filter.refill_rounds": (0,),
    "algorithm.filter.keep_by": (
        *("deviation", "least_deviation", "variance", "least_variance", "lead"),
        *("mean", "least_mean", "total", "least_total"),
    ),
    "algorithm.filter.scale_advantages": ("none",),
    "algorithm.filter.after_advantages": (False,),
    "algorithm.filter.stop_after_empty_steps": (0,),
    "algorithm.zero_advantages": (False,),
    "algorithm.shaping.length_penalty": (0.0,),
    "algorithm.shaping.center": ("none",),
    "algorithm.shaping.divide": ("none",),
    "algorithm.shaping.clip": (None,),
    "algorithm.shaping.clip_negative": (None,),
    "algorithm.advantage_clip": (None,),
    "algorithm.mask_truncated": (False,),
    "algorithm.train_on_observations": (False,),
    "algorithm.turn_rewards": (True,),
    "algorithm.advantage_over_response_tokens": (True,),
}
"""Values of keys that concern tokens, of which the first one is suggested in a run on a simulator."""
OF_CHUNKS: dict[str, Any] = {
    "algorithm.level": "token",
    "algorithm.entropy_level": "token",
    "algorithm.reward_level": "turn",
    "algorithm.bootstrap": "truncated",
    "critic.huber_delta": None,
}
"""Default values of keys that only have an effect in a run on a simulator."""


def chunk_algorithm_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield what a run on a simulator cannot do, or the keys of chunks in a run without one."""
    config = composed.experiment
    if not any(env.config.is_simulator for env in config.run_envs):
        for key, default in OF_CHUNKS.items():
            if config_value(config, key) != default:
                reason = "only has an effect in runs on simulators"
                yield composed.problem(key, reason, f"{key}={format_value(default)}")
        return
    for key, values in SUPPORTED.items():
        if config_value(config, key) not in values:
            yield composed.problem(key, "is not possible with chunks of actions", f"{key}={format_value(values[0])}")
    yield from _algorithm_problems(composed)


def _algorithm_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    algorithm = composed.experiment.algorithm
    if not algorithm.advantage.supports_chunks and algorithm.advantage.requires is None:
        key = "algorithm.advantage.name"
        yield composed.problem(
            key, "is not defined for chunks of actions", f"{key}=gae critic.shares_policy=true, or {key}=grpo"
        )
    if not algorithm.loss.supports_chunks and algorithm.loss.requires is None:
        key = "algorithm.loss.name"
        yield composed.problem(key, "is not defined for chunks of actions", f"{key}=ppo")
    for name in ("length_weight", "deviation_weight"):
        if getattr(algorithm.advantage, name, False):
            key = f"algorithm.advantage.{name}"
            yield composed.problem(key, "is not possible with chunks of actions", f"{key}=false")
    if algorithm.kl_in_reward is not None:
        key, remedy = ("kl.apply_to", "loss") if algorithm.reward_kl is None else ("reward_kl", "null")
        key = f"algorithm.{key}"
        yield composed.problem(key, "rewards belong to actions, not to tokens", f"{key}={remedy}")
    if algorithm.kl is not None and algorithm.kl.estimator == "full":
        key = "algorithm.kl.estimator"
        yield composed.problem(key, "needs the distribution over a vocabulary", f"{key}=k3")
