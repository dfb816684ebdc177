"""verl's batch arithmetic: what one forward pass may hold on one GPU, and what must divide what."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quintet.config.dialects.conversion import Native, Values
from quintet.config.divisors import nearest_divisor
from quintet.config.faults import Fault

if TYPE_CHECKING:
    from quintet.config.translate import Foreign

__all__ = [
    "ACTOR",
    "GPUS",
    "MODEL",
    "REF",
    "ROLLOUT",
    "Pass",
    "Step",
    "budgets",
    "devices",
    "express_budgets",
    "pass_faults",
    "passes",
    "share_faults",
]

ACTOR, MODEL, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "ref", "rollout"))
GPUS = ("trainer.nnodes", "trainer.n_gpus_per_node")


@dataclass(frozen=True, slots=True)
class Pass:
    """The keys that say what one kind of forward pass holds."""

    native: tuple[str, ...]
    """The native budgets that they become."""
    each: str
    """Sequences on one GPU."""
    whole: str
    """Sequences over all GPUs, the older key."""
    dynamic: str
    """Whether tokens hold instead."""
    tokens: str
    """Tokens on one GPU."""
    ulysses: str
    """GPUs that share one sequence."""
    learns: bool = False
    """Gradients are computed too, so passes must fill whole optimizer steps."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one training step has, over all GPUs."""

    sequences: int
    update: int
    """Sequences of one optimizer step."""
    longest: int
    """Tokens of the longest sequence."""
    of: tuple[str, ...]
    """The keys from which `sequences` follows, the one to change first."""
    update_of: str
    """The key from which `update` follows."""
    longest_of: tuple[str, ...]
    """The keys from which `longest` follows."""


_POLICY = Pass(
    ("actor.budget",),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{ACTOR}.ppo_micro_batch_size",
    f"{ACTOR}.use_dynamic_bsz",
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ACTOR}.ulysses_sequence_parallel_size",
    learns=True,
)


def _log_probs(native: str, section: str, ulysses: str) -> Pass:
    names = ("micro_batch_size_per_gpu", "micro_batch_size", "use_dynamic_bsz", "max_token_len_per_gpu")
    each, whole, dynamic, tokens = (f"{section}.log_prob_{name}" for name in names)
    return Pass((native,), each, whole, dynamic, tokens, ulysses)


_PLAYED = _log_probs("actor.inference_budget", ROLLOUT, _POLICY.ulysses)
_REFERENCE = _log_probs("reference.inference_budget", REF, f"{REF}.ulysses_sequence_parallel_size")


def _critic(values: Values) -> Pass:
    """The critic's own keys, where it has some; else it does as the actor does."""

    def own(*keys: str) -> bool:
        return any(values.given(_theirs(key)) or values[_theirs(key)] is not None for key in keys)

    def first(key: str) -> str:
        return _theirs(key) if own(key) else key

    sizes = (_POLICY.each, _POLICY.whole)
    each, whole = map(_theirs, sizes) if own(*sizes) else sizes
    return Pass(
        ("critic.budget", "critic.inference_budget"),
        each,
        whole,
        first(_POLICY.dynamic),
        first(_POLICY.tokens),
        first(_POLICY.ulysses),
        learns=True,
    )


def _theirs(key: str) -> str:
    """The critic's key of the same name."""
    return key.replace(ACTOR, "critic", 1)


def passes(values: Values, *, critic: bool, reference: bool) -> Iterator[Pass]:
    """The kinds of forward pass that the run makes."""
    yield _POLICY
    yield _PLAYED
    if reference:
        yield _REFERENCE
    if critic:
        yield _critic(values)


def devices(values: Values) -> int:
    """All GPUs of the run."""
    return int(values[GPUS[0]] * values[GPUS[1]])


def budgets(values: Values, native: Native, kinds: Iterable[Pass]) -> None:
    """What each kind of pass may hold."""
    for kind in kinds:
        if values[kind.dynamic]:
            sequences, tokens, origins = None, values[kind.tokens], (kind.tokens, kind.dynamic)
        elif _counts_all(values, kind):
            sequences, tokens, origins = values[kind.whole] // _replicas(values, kind), None, (kind.whole, kind.dynamic)
        else:
            sequences, tokens, origins = values[kind.each], None, (kind.each, kind.dynamic)
        for budget in kind.native:
            native.put(f"{budget}.sequences", sequences, *origins)
            native.put(f"{budget}.tokens", tokens, *origins)


def _counts_all(values: Values, kind: Pass) -> bool:
    """Whether the older key, for all GPUs, says how many sequences."""
    return values[kind.whole] is not None and not _says(values, kind.each)


def _says(values: Values, key: str) -> bool:
    return values.given(key) and values[key] is not None


def _replicas(values: Values, kind: Pass) -> int:
    """GPUs, or groups of them, that each have sequences of their own."""
    return max(1, devices(values) // int(values[kind.ulysses]))


def pass_faults(values: Values, step: Step, kinds: Iterable[Pass]) -> Iterator[Fault]:
    """Passes that don't fill whole optimizer steps, or can't hold the longest sequence."""
    for kind in kinds:
        if values[kind.dynamic]:
            yield from _token_faults(values, step, kind)
        else:
            yield from _sequence_faults(values, step, kind)


def _token_faults(values: Values, step: Step, kind: Pass) -> Iterator[Fault]:
    together = int(values[kind.ulysses])
    follows = kind is not _POLICY and values[_POLICY.dynamic] and not values.given(kind.tokens)
    if values[kind.tokens] * together < step.longest and not follows:
        lengths = " and ".join(map(values.told, step.longest_of))
        least = math.ceil(step.longest / together)
        yield values.fault(
            kind.tokens,
            f"can't hold the longest sequence of {step.longest} tokens, by {lengths}",
            f"at least: {kind.tokens}={least}",
        )


def _sequence_faults(values: Values, step: Step, kind: Pass) -> Iterator[Fault]:
    replicas = _replicas(values, kind)
    if _says(values, kind.each) and values[kind.whole] is not None:
        problem = f"{values.told(kind.each)} says the same for one GPU"
        yield values.fault(kind.whole, problem, f"keep {kind.each} alone: {kind.whole}=null")
        return
    if values[kind.each] is None and values[kind.whole] is None:
        problem = f"neither it nor {kind.whole} says how many sequences one forward pass holds"
        yield values.fault(kind.each, problem, f"give a number, or set {kind.dynamic}=true")
        return
    key, size = kind.each, values[kind.each]
    if _counts_all(values, kind):
        key, size = kind.whole, values[kind.whole]
        if size % replicas:
            fits = max(1, round(size / replicas)) * replicas
            told = " and ".join(map(values.told, GPUS))
            yield values.fault(key, f"must be a multiple of {replicas}, by {told}", f"nearest: {key}={fits}")
            return
        size //= replicas
    if kind.learns and values.given(key):
        yield from _fill_faults(values, step, key, size, replicas)


def _fill_faults(values: Values, step: Step, key: str, size: int, replicas: int) -> Iterator[Fault]:
    share = step.update // replicas
    if share == 0 or share % size:
        fits = nearest_divisor(share, size) if share else 1
        scale = values[key] // size
        problem = f"must divide the {share} sequences that one GPU has in an optimizer step"
        told = f"{values.told(step.update_of)} over {replicas} GPUs"
        hint = f"nearest: {key}={fits * scale}" if share else f"raise {step.update_of}, or take fewer GPUs"
        yield values.fault(key, f"{problem}, by {told}", hint)


def share_faults(values: Values, step: Step) -> Iterator[Fault]:
    """GPUs that can't share out the sequences, or a sequence, or a weight matrix."""
    gpus, told = devices(values), " × ".join(map(values.told, GPUS))
    tensor = f"{ROLLOUT}.tensor_model_parallel_size"
    engine = (tensor,) if values[f"{ROLLOUT}.name"] != "hf" else ()
    given = filter(values.given, (_REFERENCE.ulysses, "critic.ulysses_sequence_parallel_size"))
    for key in (_POLICY.ulysses, *given, *engine):
        if gpus % values[key]:
            hint = f"nearest: {key}={nearest_divisor(gpus, values[key])}"
            yield values.fault(key, f"must divide the {gpus} GPU{'s' if gpus > 1 else ''}, {told}", hint)
    replicas = _replicas(values, _POLICY)
    if step.sequences % replicas:
        first, *others = step.of
        unit = replicas // math.gcd(replicas, step.sequences // values[first])
        fits = max(1, round(values[first] / unit)) * unit
        by = f" with {' and '.join(map(values.told, others))}" if others else ""
        problem = (
            f"{by.strip() or 'it'} makes {step.sequences} sequences, which {replicas} GPUs ({told}) can't share out"
        )
        yield values.fault(first, problem, f"nearest: {first}={fits}")


def express_budgets(foreign: Foreign, documented: Container[str]) -> None:
    """Budgets in verl's words; where a native one sets no limit, all passes hold `training.micro_batch_tokens`. The
    critic's are left out where they are the actor's, unless its own key is `documented` with a value of its own."""
    run = foreign.experiment
    kinds = [_POLICY, _PLAYED, *([_REFERENCE] if run.algorithm.kl else [])]
    for kind in kinds:
        _express(foreign, kind)
    each, whole, dynamic, tokens = map(_theirs, (_POLICY.each, _POLICY.whole, _POLICY.dynamic, _POLICY.tokens))
    if not run.needs_critic:
        return
    if run.critic.budget == run.actor.budget:
        if each in documented and run.critic.budget.sequences is not None:
            foreign.put(each, run.critic.budget.sequences)
    else:
        _express(foreign, Pass(("critic.budget",), each, whole, dynamic, tokens, _POLICY.ulysses))


def _express(foreign: Foreign, kind: Pass) -> None:
    budget = kind.native[0]
    sequences, tokens = foreign.native(f"{budget}.sequences"), foreign.native(f"{budget}.tokens")
    if tokens is None and sequences is None:
        tokens = foreign.experiment.training.micro_batch_tokens
    foreign.put(kind.dynamic, tokens is not None)
    if tokens is not None:
        foreign.put(kind.tokens, tokens)
    else:
        foreign.put(kind.each, sequences)
