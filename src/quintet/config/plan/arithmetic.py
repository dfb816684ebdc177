"""How many games, optimizer steps, validations and checkpoints a run makes. Done at every load, so it stays cheap."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.config.faults import Fault, raise_faults
from quintet.config.plan.mixture import mixture_faults
from quintet.config.plan.shapes import PRESET_CONTEXTS
from quintet.config.plan.values import divisors, fault, nearest_number, source, told, value
from quintet.errors import nearest

if TYPE_CHECKING:
    from quintet.config.compose import Composed
    from quintet.config.native import Experiment

__all__ = ["Plan", "plan"]

COMPARING = ("grpo", "grpo_passk", "grpo_dynamic", "gdpo")
"""Estimators that have nothing to go by in a group of one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do, in numbers."""

    games_per_step: int
    games: int
    groups_per_mini_batch: float
    """Not whole where mini-batches are cut through groups."""
    games_per_mini_batch: int
    optimizer_steps: int
    """At most: groups without signal make some of them unnecessary."""
    warm_start_updates: int
    """At most: the warm start may end earlier."""
    validations: int
    """Before, during and after reinforcement learning."""
    checkpoints: int
    """Including the one after the warm start."""


def plan(composed: Composed, steps: int | None = None) -> Plan:
    """Do the arithmetic; `steps` where they follow from the rows of files and not from `training.steps`.

    Raises:
        ConfigError: something doesn't divide or doesn't fit; one message names every such key and the
            nearest legal values.
    """
    checks = (mixture_faults, _division, _groups, _teacher, _files, _preset, _context, _warmups)
    raise_faults(fault for check in checks for fault in check(composed))
    config = composed.experiment
    training = config.training
    planned = training.steps if steps is None else steps
    done = 0 if config.validation.only else planned
    per_step = training.groups_per_step * training.samples_per_group
    return Plan(
        games_per_step=per_step,
        games=per_step * done,
        groups_per_mini_batch=training.groups_per_step / training.mini_batches,
        games_per_mini_batch=per_step // training.mini_batches,
        optimizer_steps=done * training.epochs * training.mini_batches,
        warm_start_updates=config.warm_start.updates if config.warm_start else 0,
        validations=_validations(config, done),
        checkpoints=_occasions(done, config.checkpoint.every_steps),
    )


def _validations(config: Experiment, steps: int) -> int:
    validation = config.validation
    if validation.only:
        return 1
    if validation.every_steps < 0:
        return int(validation.before_training)
    return _occasions(steps, validation.every_steps) - (0 if validation.before_training else 1)


def _occasions(steps: int, every: int) -> int:
    """At the start, every n-th step, and at the end."""
    between = steps // every if every else 0
    last = 0 if steps == 0 or (every and steps % every == 0) else 1
    return 1 + between + last


def _division(composed: Composed) -> Iterator[Fault]:
    training = composed.experiment.training
    groups, samples, parts = training.groups_per_step, training.samples_per_group, training.mini_batches
    if groups * samples % parts == 0:
        return
    key, games = "training.mini_batches", groups * samples
    of_a_step = f"{told(composed, 'training.groups_per_step')} × {told(composed, 'training.samples_per_group')}"
    unit = parts // math.gcd(parts, samples)
    below = groups - groups % unit
    multiples = f"{below} or {below + unit}" if below else str(unit)
    fitting = nearest_number(parts, divisors(games))
    yield Fault(
        key,
        parts,
        source(composed, key),
        f"{told(composed, key)} doesn't divide the {games:,} games of a step, {of_a_step}",
        f"nearest: {key}={fitting}, or training.groups_per_step={multiples}",
    )


def _groups(composed: Composed) -> Iterator[Fault]:
    config = composed.experiment
    name = config.algorithm.advantage.name
    if name in COMPARING and config.training.samples_per_group < 2:
        problem = f"{name} compares games from the same start and has nothing to compare"
        hint = "give at least 2, or algorithm.advantage.name=gae"
        yield fault(composed, "training.samples_per_group", problem, hint)


def _teacher(composed: Composed) -> Iterator[Fault]:
    config = composed.experiment
    if config.algorithm.loss.name == "distillation" and config.reference.path is None:
        problem = "the policy follows a teacher, and none is named"
        yield fault(composed, "algorithm.loss.name", problem, "give its directory: reference.path=…")


def _files(composed: Composed) -> Iterator[Fault]:
    """Files that nothing would read."""
    config = composed.experiment
    if config.data is None or not config.data.train_files or config.sft is not None or config.evaluation is not None:
        return
    if config.world.name != "prompts":
        makes, leave = f"{config.world.name} makes its own starts and reads", ""
        if config.worlds:
            makes, leave = f"{', '.join(config.worlds)} make their own starts and read", "leave worlds out and "
        hint = f"{leave}set world.name=prompts, or data=null"
        yield fault(composed, "data.train_files", f"{makes} no files", hint)


def _preset(composed: Composed) -> Iterator[Fault]:
    preset = composed.experiment.policy.preset
    if preset is None or preset in PRESET_CONTEXTS:
        return
    key, close = "policy.preset", nearest(preset, PRESET_CONTEXTS)
    hint = (f"did you mean {close}? " if close else "") + f"known: {', '.join(PRESET_CONTEXTS)}"
    yield fault(composed, key, "no such preset", hint)


def _context(composed: Composed) -> Iterator[Fault]:
    config = composed.experiment
    limit = PRESET_CONTEXTS.get(config.policy.preset or "")
    prompt, response = config.rollout.max_prompt_tokens, config.rollout.max_response_tokens
    if limit is None or prompt + response <= limit:
        return
    key, other = "rollout.max_prompt_tokens", "rollout.max_response_tokens"
    if response >= limit:
        key, other, prompt, response = other, key, response, prompt
    problem = f"together exceed the {limit} tokens of policy.preset = {config.policy.preset}"
    hint = f"nearest: {key}={limit - response}" if response < limit else "make both smaller"
    larger = [name for name, tokens in PRESET_CONTEXTS.items() if tokens >= prompt + response]
    hint += f", or policy.preset={larger[0]}" if larger else ", or give a larger model as policy.path"
    message = f"{told(composed, key)} and {told(composed, other)} {problem}"
    yield Fault(key, prompt, source(composed, key), message, hint)


def _warmups(composed: Composed) -> Iterator[Fault]:
    """A share of all steps that a number of steps would go before."""
    for section in ("actor", "critic", "warm_start", "sft"):
        own = value(composed.experiment, f"{section}.optimizer")
        if own is not None and own.warmup_ratio and own.warmup_steps:
            key, steps = f"{section}.optimizer.warmup_ratio", f"{section}.optimizer.warmup_steps"
            problem = f"{told(composed, steps)} goes before it"
            yield fault(composed, key, problem, f"set {steps}=0, or leave {key} out")
