"""Numbers of episodes, optimizer steps, validations and checkpoints of a run, computed at every load."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from quintet.config.composed import ComposedConfig
from quintet.config.divisors import nearest_divisor
from quintet.config.model_locations.published_models import published_models
from quintet.config.native.experiment import Experiment
from quintet.config.plan.batches import max_mini_batches
from quintet.config.plan.mixed_envs import mixture_problems
from quintet.config.plan.model_shapes import PRESET_CONTEXTS
from quintet.config.plan.robot_batches import robot_problems
from quintet.config.problems import ConfigProblem, raise_problems
from quintet.errors import nearest


@dataclass(frozen=True, slots=True)
class BatchArithmetic:
    """Counts of what a run will do."""

    episodes_per_step: int
    episodes: int
    groups_per_mini_batch: float
    """Not an integer if mini-batches split groups."""
    episodes_per_mini_batch: int
    optimizer_steps: int
    """Maximum: updates whose groups all lack a learning signal are skipped."""
    warm_start_updates: int
    """Maximum: the warm start may end early."""
    validations: int
    """Before, during and after reinforcement learning."""
    checkpoints: int
    """Including the one after the warm start."""


def compute_batch_arithmetic(composed: ComposedConfig, steps: int | None = None) -> BatchArithmetic:
    """Compute the counts; `steps` replaces `training.steps` if the data files determine the number of steps.

    Raises:
        ConfigError: batch sizes do not divide, or keys contradict each other; one message names each such key and
            the nearest valid values.
    """
    raise_problems(problem for check in CHECKS for problem in check(composed))
    config = composed.experiment
    training = config.training
    num_steps = 0 if config.validation.only else training.steps if steps is None else steps
    per_step = training.groups_per_step * training.samples_per_group
    return BatchArithmetic(
        episodes_per_step=per_step,
        episodes=per_step * num_steps,
        groups_per_mini_batch=training.groups_per_step / training.mini_batches,
        episodes_per_mini_batch=per_step // training.mini_batches,
        optimizer_steps=num_steps * training.epochs * max_mini_batches(config),
        warm_start_updates=config.warm_start.updates if config.warm_start else 0,
        validations=_num_validations(config, num_steps),
        checkpoints=num_occasions(num_steps, config.checkpoint.every_steps),
    )


def _num_validations(config: Experiment, steps: int) -> int:
    validation = config.validation
    if validation.only:
        return 1
    if validation.every_steps < 0:
        return int(validation.before_training)
    return num_occasions(steps, validation.every_steps) - (0 if validation.before_training else 1)


def num_occasions(steps: int, every: int) -> int:
    """Count the start, every n-th step and the end."""
    between = steps // every if every else 0
    last = 0 if steps == 0 or (every and steps % every == 0) else 1
    return 1 + between + last


def _check_division(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    training = composed.experiment.training
    if composed.experiment.env.is_simulator:
        yield from robot_problems(composed)
        return
    groups, samples, parts = training.groups_per_step, training.samples_per_group, training.mini_batches
    if groups * samples % parts == 0:
        return
    key, episodes = "training.mini_batches", groups * samples
    factors = [composed.describe(f"training.{name}") for name in ("groups_per_step", "samples_per_group")]
    unit = parts // math.gcd(parts, samples)
    sizes = filter(None, (groups - groups % unit, groups - groups % unit + unit))
    changes = (f"{key}={nearest_divisor(episodes, parts)}", *(f"training.groups_per_step={size}" for size in sizes))
    problem = f"it does not divide the {episodes:,} episodes of a step, {' × '.join(factors)}"
    yield composed.problem(key, problem, f"nearest valid value: {', or '.join(changes)}")


def _check_domains(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the domains of which a step would have no prompt, verifiers of others, and fine-tuning, which has none."""
    config = composed.experiment
    data, prompts = config.data, config.training.groups_per_step
    if data is None or not data.domains:
        return
    if config.sft is not None and config.sft.episodes is None:
        yield composed.problem("data.domains", "fine-tuning takes all rows alike", "sft=null, or data.domains={}")
    for name in config.reward.verifiers if config.reward else ():
        if name not in data.domains:
            problem = f"no domain has this name; the domains are {', '.join(data.domains)}"
            yield composed.problem(f"reward.verifiers.{name}.kind", problem)
    for name, count in data.prompts_per_domain(prompts).items():
        share = data.domains[name].share
        if share and count < 1:
            key = f"data.domains.{name}.share"
            problem = f"a step of {composed.describe('training.groups_per_step')} prompts has none of this domain"
            hint = f"at least: training.groups_per_step={math.ceil(1 / share)}, or {key}=0"
            yield composed.problem(key, problem, hint)


def _check_groups(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    config = composed.experiment
    advantage = config.algorithm.advantage
    if advantage.needs_several_samples and config.training.samples_per_group < 2:
        problem = f"{advantage.name} compares the episodes of a group, and a group has one"
        hint = "at least: training.samples_per_group=2, or algorithm.advantage.name=gae"
        yield composed.problem("training.samples_per_group", problem, hint)
    yield from _check_rounds(composed)


def _check_rounds(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Refuse rounds that cannot fill a step, and those of rollouts that replace one group at a time."""
    config, key = composed.experiment, "algorithm.filter.groups_per_round"
    selection, needed = config.algorithm.filter, config.training.groups_per_step
    if selection.groups_per_round is None:
        return
    if config.rollout.async_ratio or config.training.pipelined:
        other = "rollout.async_ratio" if config.rollout.async_ratio else "training.pipelined"
        yield composed.problem(key, f"with {composed.describe(other)} groups are replaced one by one", f"{key}=null")
    elif selection.groups_per_round * (1 + selection.refill_rounds) < needed:
        rounds = composed.describe("algorithm.filter.refill_rounds")
        problem = f"with {rounds} it gives fewer than the {needed} groups of a step"
        yield composed.problem(key, problem, f"{key}={needed}, or {key}=null")


def _check_teacher(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    config = composed.experiment
    if config.env.is_simulator:
        return
    if config.algorithm.loss.needs_teacher and config.reference.path is None:
        problem = "this loss needs a teacher model, and none is set"
        yield composed.problem("algorithm.loss.name", problem, "reference.path=DIRECTORY")


def _check_files(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Refuse data files that no env reads."""
    config = composed.experiment
    if config.data is None or not config.data.train_files or config.sft is not None or config.evaluation is not None:
        return
    if config.env.reads_prompts:
        return
    problem = f"{config.env.name} makes its own start states and reads no files"
    hint = "env.name=prompts, or data=null"
    if config.envs:
        problem = f"{', '.join(config.envs)} make their own start states and read no files"
        hint = "envs={} env.name=prompts, or data=null"
    yield composed.problem("data.train_files", problem, hint)


def _check_preset(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    preset = composed.experiment.policy.preset
    if preset is not None and preset not in PRESET_CONTEXTS and not composed.experiment.env.is_simulator:
        known = (*PRESET_CONTEXTS, *published_models())
        close = nearest(preset, known)
        hint = (f"did you mean policy.preset={close}? " if close else "") + f"known: {', '.join(known)}"
        yield composed.problem("policy.preset", "no such preset", hint)


def _check_context(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    config = composed.experiment
    limit = PRESET_CONTEXTS.get(config.policy.preset or "")
    prompt, response = config.rollout.max_prompt_tokens, config.rollout.max_response_tokens
    if limit is None or prompt + response <= limit or config.env.is_simulator:
        return
    key, other = "rollout.max_prompt_tokens", "rollout.max_response_tokens"
    if response >= limit:
        key, other, prompt, response = other, key, response, prompt
    problem = f"with {composed.describe(other)} it exceeds the {limit} tokens of policy.preset = "
    half = "" if response < limit else f" {other}={limit // 2}"
    hint = f"nearest valid value: {key}={limit // 2 if half else limit - response}{half}"
    larger = [name for name, tokens in PRESET_CONTEXTS.items() if tokens >= prompt + response]
    hint += f", or policy.preset={larger[0]}" if larger else ", or policy.path=DIRECTORY policy.preset=null"
    yield composed.problem(key, f"{problem}{config.policy.preset}", hint)


def _check_warmup(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Refuse a warm-up given both as a ratio and as a number of steps."""
    for section in ("actor", "critic", "warm_start", "sft"):
        optimizer = composed.value(f"{section}.optimizer")
        if optimizer is not None and optimizer.warmup_ratio and optimizer.warmup_steps:
            key, steps = f"{section}.optimizer.warmup_ratio", f"{section}.optimizer.warmup_steps"
            problem = f"{composed.describe(steps)} takes precedence"
            yield composed.problem(key, problem, f"{steps}=0, or {key}=0")


CHECKS = (
    mixture_problems,
    _check_division,
    _check_domains,
    _check_groups,
    _check_teacher,
    _check_files,
    _check_preset,
    _check_context,
    _check_warmup,
)
"""In the order of their messages."""
