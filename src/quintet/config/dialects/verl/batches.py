"""verl's batch arithmetic: what one forward pass holds on one GPU, and which sizes must divide which."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.verl.separate_engines import (
    ENGINE_GPUS,
    ENGINE_NODES,
    TRAINER_GPUS,
    TRAINER_NODES,
    has_separate_engines,
    is_fully_async,
    num_engine_gpus,
)
from quintet.config.divisors import nearest_divisor, nearest_multiple
from quintet.config.problems import ConfigProblem

ACTOR, MODEL, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "ref", "rollout"))
GPUS, ENGINE_KEYS = (TRAINER_NODES, TRAINER_GPUS), (ENGINE_NODES, ENGINE_GPUS)


@dataclass(frozen=True, slots=True)
class PassKeys:
    """Keys of the micro-batch size of one kind of forward pass."""

    native: tuple[str, ...]
    """Native micro-batch budgets."""
    per_gpu: str
    """Sequences on one GPU."""
    total: str
    """Sequences on all GPUs, in older releases."""
    dynamic: str
    """Whether tokens are limited instead of sequences."""
    tokens: str
    """Tokens on one GPU."""
    ulysses: str
    """GPUs that share one sequence."""
    section: str = field(kw_only=True)
    """Section with the sizes by which the learner is split."""
    has_backward: bool = field(default=False, kw_only=True)
    """Passes with a backward pass must fill whole optimizer steps."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """Size of a training step on all GPUs, with the keys that it follows from."""

    sequences: int
    mini_batch: int
    """Sequences of one optimizer step."""
    max_tokens: int
    """Tokens of the longest sequence."""
    sequences_from: tuple[str, ...]
    """The first of these is the one to change."""
    mini_batch_from: str
    max_tokens_from: tuple[str, ...]


_SPLITS = {
    "veomni": ("ulysses_parallel_size",),
    "torchtitan": ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
}
"""Sizes by which VeOmni and TorchTitan split a sequence or a copy of the weights. The first one multiplies the tokens
of a pass."""


_POLICY = PassKeys(
    native=("actor.budget",),
    per_gpu="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    total="actor_rollout_ref.actor.ppo_micro_batch_size",
    dynamic="actor_rollout_ref.actor.use_dynamic_bsz",
    tokens="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    ulysses="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    section=ACTOR,
    has_backward=True,
)
_POLICY_LOG_PROBS = PassKeys(
    native=("actor.inference_budget",),
    per_gpu="actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    total="actor_rollout_ref.rollout.log_prob_micro_batch_size",
    dynamic="actor_rollout_ref.rollout.log_prob_use_dynamic_bsz",
    tokens="actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    ulysses="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    section=ACTOR,
)
_REFERENCE = PassKeys(
    native=("reference.inference_budget",),
    per_gpu="actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    total="actor_rollout_ref.ref.log_prob_micro_batch_size",
    dynamic="actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
    tokens="actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    ulysses="actor_rollout_ref.ref.ulysses_sequence_parallel_size",
    section=REF,
)
_CRITIC = PassKeys(
    native=("critic.budget", "critic.inference_budget"),
    per_gpu="critic.ppo_micro_batch_size_per_gpu",
    total="critic.ppo_micro_batch_size",
    dynamic="critic.use_dynamic_bsz",
    tokens="critic.ppo_max_token_len_per_gpu",
    ulysses="critic.ulysses_sequence_parallel_size",
    section="critic",
    has_backward=True,
)


def _critic_pass(values: ForeignValues) -> PassKeys:
    """Return the critic's keys; those without values are replaced by the actor's."""

    def unset(*names: str) -> dict[str, Any]:
        keys = [getattr(_CRITIC, name) for name in names]
        has_value = any(values.is_set(key) or values[key] is not None for key in keys)
        return {} if has_value else {name: getattr(_POLICY, name) for name in names}

    return replace(_CRITIC, **unset("per_gpu", "total"), **unset("dynamic"), **unset("tokens"), **unset("ulysses"))


def passes(values: ForeignValues, *, critic: bool, reference: bool) -> Iterator[PassKeys]:
    """Yield the kinds of forward passes in a run."""
    yield _POLICY
    yield _POLICY_LOG_PROBS
    if reference:
        yield _REFERENCE
    if critic:
        yield _critic_pass(values)


def num_gpus(values: ForeignValues) -> int:
    """Return the number of GPUs on all nodes."""
    return int(values[GPUS[0]] * values[GPUS[1]])


def budgets_to_native(values: ForeignValues, native: NativeBuilder, kinds: Iterable[PassKeys]) -> None:
    """Set the native micro-batch budgets."""
    for keys in kinds:
        is_dynamic = values[keys.dynamic]
        key = keys.tokens if is_dynamic else _sequences_key(values, keys)
        size = values[key]
        if size is None:
            native.remarks.append(f"{key} is not set: passes are filled up to training.micro_batch_tokens")
        elif key == keys.total:
            size //= _num_replicas(values, keys)
        for budget in keys.native:
            native.set(f"{budget}.sequences", None if is_dynamic else size, key, keys.dynamic)
            native.set(f"{budget}.tokens", size if is_dynamic else None, key, keys.dynamic)


def budgets_from_native(foreign: ForeignBuilder) -> None:
    """Set verl's micro-batch sizes; passes without a native limit hold `training.micro_batch_tokens`.

    A critic with the actor's budget has no keys of its own, unless verl documents its default.
    """
    run = foreign.experiment
    for keys in (_POLICY, _POLICY_LOG_PROBS, *([_REFERENCE] if run.algorithm.kl else [])):
        _budget_from_native(foreign, keys)
    if not run.needs_critic:
        return
    if run.critic.budget != run.actor.budget:
        _budget_from_native(foreign, _CRITIC)
    elif _CRITIC.per_gpu in foreign.dialect.specs() and run.critic.budget.sequences is not None:
        foreign.set(_CRITIC.per_gpu, run.critic.budget.sequences)


def _budget_from_native(foreign: ForeignBuilder, keys: PassKeys) -> None:
    budget = foreign.native_value(keys.native[0])
    tokens = budget.tokens
    if tokens is None and budget.sequences is None:
        tokens = foreign.experiment.training.micro_batch_tokens
    foreign.set(keys.dynamic, tokens is not None)
    if tokens is not None:
        foreign.set(keys.tokens, tokens)
    else:
        foreign.set(keys.per_gpu, budget.sequences)


def _sequences_key(values: ForeignValues, keys: PassKeys) -> str:
    """Return the key of the number of sequences: the older one, for all GPUs, if only that one is set."""
    uses_total = values[keys.total] is not None and not _is_set_to_value(values, keys.per_gpu)
    return keys.total if uses_total else keys.per_gpu


def _is_set_to_value(values: ForeignValues, key: str) -> bool:
    return values.is_set(key) and values[key] is not None


def _num_replicas(values: ForeignValues, keys: PassKeys) -> int:
    """Return the number of GPUs, or groups of GPUs, with sequences of their own."""
    return max(1, num_gpus(values) // _model_size(values, keys))


def _model_size(values: ForeignValues, keys: PassKeys) -> int:
    """Return the number of GPUs that share one sequence, or one copy of the weights under Megatron and TorchTitan."""
    if engine_keys := _engine_keys(values, keys):
        return math.prod(int(values[key] or 1) for key in engine_keys)
    if values["actor_rollout_ref.actor.strategy"] != "megatron":
        return int(values[keys.ulysses])
    return math.prod(int(values[_megatron_key(keys, size)] or 1) for size in ("tensor", "pipeline", "context"))


def _engine_keys(values: ForeignValues, keys: PassKeys) -> tuple[str, ...]:
    """Return the keys by which VeOmni or TorchTitan splits a learner; none under other engines."""
    engine = values["actor_rollout_ref.actor.strategy"]
    return tuple(f"{keys.section}.{engine}.{name}" for name in _SPLITS.get(engine, ()))


def _megatron_key(keys: PassKeys, size: str) -> str:
    name = "context_parallel_size" if size == "context" else f"{size}_model_parallel_size"
    return f"{keys.ulysses.rpartition('.')[0]}.megatron.{name}"


def batch_problems(values: ForeignValues, step: StepSize, *, critic: bool, reference: bool) -> Iterator[ConfigProblem]:
    """Yield problems of a step that the GPUs cannot share, and of passes that do not fill it or cannot hold it."""
    yield from _split_problems(values, step)
    for keys in passes(values, critic=critic, reference=reference):
        problems = _token_problems if values[keys.dynamic] else _sequence_problems
        yield from problems(values, step, keys)


def _token_problems(values: ForeignValues, step: StepSize, keys: PassKeys) -> Iterator[ConfigProblem]:
    ulysses = int(values[keys.ulysses]) * int(values[_megatron_key(keys, "context")] or 1)
    if engine_keys := _engine_keys(values, keys):
        ulysses = int(values[engine_keys[0]] or 1)
    follows_policy = keys is not _POLICY and values[_POLICY.dynamic] and not values.is_set(keys.tokens)
    if values[keys.tokens] * ulysses < step.max_tokens and not follows_policy:
        lengths = values.describe(*step.max_tokens_from)
        problem = f"cannot hold the longest sequence of {step.max_tokens} tokens, from {lengths}"
        yield values.problem(keys.tokens, problem, f"at least: {keys.tokens}={math.ceil(step.max_tokens / ulysses)}")


def _sequence_problems(values: ForeignValues, step: StepSize, keys: PassKeys) -> Iterator[ConfigProblem]:
    replicas = _num_replicas(values, keys)
    if _is_set_to_value(values, keys.per_gpu) and _is_set_to_value(values, keys.total):
        problem = f"{values.describe(keys.per_gpu)} already sets the size for one GPU"
        yield values.problem(keys.total, problem, f"keep {keys.per_gpu} alone: {keys.total}=null")
        return
    key = _sequences_key(values, keys)
    size = values[key]
    if size is None:
        return
    if key == keys.total:
        if size % replicas:
            yield from values.multiple_problems(key, replicas, f"{replicas}, from {values.describe(*GPUS)}")
            return
        size //= replicas
    if keys.has_backward and values.is_set(key):
        yield from _mini_batch_problems(values, step, key, size, replicas)


def _mini_batch_problems(
    values: ForeignValues, step: StepSize, key: str, size: int, replicas: int
) -> Iterator[ConfigProblem]:
    local = step.mini_batch // replicas
    if local == 0 or (local % size and size <= local):
        scale = values[key] // size
        source = f"{values.describe(step.mini_batch_from)} over {replicas} GPUs"
        problem = f"must divide the {local} sequences that one GPU has in an optimizer step, from {source}"
        nearest = f"nearest valid value: {key}={nearest_divisor(local, size) * scale}" if local else None
        smallest = math.ceil(replicas * values[step.mini_batch_from] / step.mini_batch)
        yield values.problem(key, problem, nearest or f"at least: {step.mini_batch_from}={smallest}")


def _split_problems(values: ForeignValues, step: StepSize) -> Iterator[ConfigProblem]:
    """Yield a problem if the GPUs cannot share the sequences evenly, or one sequence, or one model."""
    gpus, source = num_gpus(values), values.describe(*GPUS)
    engine = (
        ("actor_rollout_ref.rollout.tensor_model_parallel_size",)
        if values["actor_rollout_ref.rollout.name"] != "hf"
        else ()
    )
    separate = filter(values.is_set, (_REFERENCE.ulysses, "critic.ulysses_sequence_parallel_size"))
    for key in _engine_keys(values, _POLICY) or (_POLICY.ulysses, *separate):
        yield from values.divisor_problems(key, gpus, f"GPU{'s' if gpus > 1 else ''}, from {source}")
    for key in engine:
        count, keys = num_engine_gpus(values), ENGINE_KEYS if has_separate_engines(values) else GPUS
        yield from values.divisor_problems(key, count, f"GPU{'s' if count > 1 else ''}, from {values.describe(*keys)}")
    replicas = _num_replicas(values, _POLICY)
    # verl pads the batches of its trainer without steps
    if step.sequences % replicas and not is_fully_async(values):
        first, *others = step.sequences_from
        unit = replicas // math.gcd(replicas, step.sequences // values[first])
        product = f" with {values.describe(*others)}" if others else ""
        sequences = f"the {step.sequences} sequences of a step{product}"
        problem = f"{sequences} must be a multiple of {replicas} GPUs, from {source}"
        yield values.nearest_problem(first, problem, nearest_multiple(values[first], unit))
