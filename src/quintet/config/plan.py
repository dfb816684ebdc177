"""The arithmetic that people get wrong, done before anything heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.errors import ConfigError

if TYPE_CHECKING:
    from quintet.config.compose import Composed

__all__ = ["PRESET_CONTEXTS", "Plan", "plan"]

PRESET_CONTEXTS = {"grid-1m": 2048, "grid-3m": 4096}
"""Context windows of the policies made on the spot, tokens."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do, in numbers."""

    games_per_step: int
    games: int
    groups_per_mini_batch: int
    games_per_mini_batch: int
    optimizer_steps: int
    """At most: groups without signal make some of them unnecessary."""
    warm_start_updates: int
    validations: int
    checkpoints: int


def plan(composed: Composed) -> Plan:
    """Do the arithmetic.

    Raises:
        ConfigError: something doesn't divide or doesn't fit; the message names the nearest legal values.
    """
    _check_division(composed)
    _check_groups(composed)
    _check_context(composed)
    config = composed.experiment
    training = config.training
    per_step = training.groups_per_step * training.samples_per_group
    groups = training.groups_per_step // training.mini_batches
    return Plan(
        games_per_step=per_step,
        games=per_step * training.steps,
        groups_per_mini_batch=groups,
        games_per_mini_batch=groups * training.samples_per_group,
        optimizer_steps=training.steps * training.epochs * training.mini_batches,
        warm_start_updates=config.warm_start.updates if config.warm_start else 0,
        validations=_occasions(training.steps, config.validation.every_steps),
        checkpoints=_occasions(training.steps, config.checkpoint.every_steps),
    )


def _occasions(steps: int, every: int) -> int:
    """At the start, every n-th step, and at the end."""
    between = steps // every if every else 0
    last = 0 if steps == 0 or (every and steps % every == 0) else 1
    return 1 + between + last


def _source(composed: Composed, key: str) -> str:
    return composed.provenance.get(key, "default")


def _check_division(composed: Composed) -> None:
    training = composed.experiment.training
    groups, parts = training.groups_per_step, training.mini_batches
    if groups % parts == 0:
        return
    divisors = [n for n in range(1, groups + 1) if groups % n == 0]
    below, above = groups - groups % parts, groups + parts - groups % parts
    multiples = f"{below} or {above}" if below else str(above)
    source = _source(composed, "training.mini_batches")
    raise ConfigError(
        f"training.groups_per_step = {groups} doesn't divide into training.mini_batches = {parts} ({source})",
        key="training.mini_batches",
        value=parts,
        source=source,
        hint=f"nearest: mini_batches={min(divisors, key=lambda n: abs(n - parts))}, or groups_per_step={multiples}",
    )


def _check_groups(composed: Composed) -> None:
    config = composed.experiment
    if config.algorithm.advantage.name == "grpo" and config.training.samples_per_group < 2:
        key = "training.samples_per_group"
        raise ConfigError(
            f"{key} = 1 ({_source(composed, key)}): grpo compares games from the same start and has nothing to compare",
            key=key,
            value=1,
            source=_source(composed, key),
            hint="give at least 2, or algorithm.advantage.name=gae",
        )


def _check_context(composed: Composed) -> None:
    config = composed.experiment
    limit = PRESET_CONTEXTS.get(config.policy.preset or "")
    prompt, response = config.rollout.max_prompt_tokens, config.rollout.max_response_tokens
    if limit is None or prompt + response <= limit:
        return
    key = "rollout.max_prompt_tokens"
    raise ConfigError(
        f"{key} = {prompt} ({_source(composed, key)}) and rollout.max_response_tokens = {response} together exceed the "
        f"{limit} tokens of {config.policy.preset}",
        key=key,
        value=prompt,
        source=_source(composed, key),
        hint=f"nearest: max_prompt_tokens={max(1, limit - response)}",
    )
