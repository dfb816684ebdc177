"""The arithmetic that people get wrong, done before anything heavy is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.config.faults import Fault, raise_faults
from quintet.errors import nearest

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
    """At most: the warm start may end earlier."""
    validations: int
    """Before, during and after reinforcement learning."""
    checkpoints: int
    """Including the one after the warm start."""


def plan(composed: Composed) -> Plan:
    """Do the arithmetic.

    Raises:
        ConfigError: something doesn't divide or doesn't fit; one message names every such key and the
            nearest legal values.
    """
    raise_faults([*_division(composed), *_groups(composed), *_preset(composed), *_context(composed)])
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


def _division(composed: Composed) -> Iterator[Fault]:
    training = composed.experiment.training
    groups, parts = training.groups_per_step, training.mini_batches
    if groups % parts == 0:
        return
    key, other = "training.mini_batches", "training.groups_per_step"
    source = _source(composed, key)
    below, above = groups - groups % parts, groups + parts - groups % parts
    multiples = f"{below} or {above}" if below else str(above)
    yield Fault(
        key,
        parts,
        source,
        f"{key} = {parts} ({source}) doesn't divide {other} = {groups} ({_source(composed, other)})",
        f"nearest: training.mini_batches={_nearest_divisor(groups, parts)}, or training.groups_per_step={multiples}",
    )


def _nearest_divisor(number: int, wanted: int) -> int:
    small = [n for n in range(1, min(math.isqrt(number), 10**6) + 1) if number % n == 0]
    return min([*small, *(number // n for n in small)], key=lambda n: abs(n - wanted))


def _groups(composed: Composed) -> Iterator[Fault]:
    config = composed.experiment
    if config.algorithm.advantage.name == "grpo" and config.training.samples_per_group < 2:
        key = "training.samples_per_group"
        source = _source(composed, key)
        problem = "grpo compares games from the same start and has nothing to compare"
        hint = "give at least 2, or algorithm.advantage.name=gae"
        yield Fault(key, 1, source, f"{key} = 1 ({source}): {problem}", hint)


def _preset(composed: Composed) -> Iterator[Fault]:
    preset = composed.experiment.policy.preset
    if preset is None or preset in PRESET_CONTEXTS:
        return
    key = "policy.preset"
    source, close = _source(composed, key), nearest(preset, PRESET_CONTEXTS)
    hint = (f"did you mean {close}? " if close else "") + f"known: {', '.join(PRESET_CONTEXTS)}"
    yield Fault(key, preset, source, f"{key} = {preset!r} ({source}): no such preset", hint)


def _context(composed: Composed) -> Iterator[Fault]:
    config = composed.experiment
    limit = PRESET_CONTEXTS.get(config.policy.preset or "")
    prompt, response = config.rollout.max_prompt_tokens, config.rollout.max_response_tokens
    if limit is None or prompt + response <= limit:
        return
    key, other = "rollout.max_prompt_tokens", "rollout.max_response_tokens"
    if response >= limit:
        key, other, prompt, response = other, key, response, prompt
    source = _source(composed, key)
    yield Fault(
        key,
        prompt,
        source,
        f"{key} = {prompt} ({source}) and {other} = {response} ({_source(composed, other)}) together exceed the "
        f"{limit} tokens of policy.preset = {config.policy.preset}",
        f"nearest: {key}={max(1, limit - response)}",
    )
