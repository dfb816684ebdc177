"""What Megatron's learners can't do, said before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from quintet.config.compose import Composed
from quintet.config.engines import accelerators
from quintet.config.faults import Fault
from quintet.config.megatron import TAKES, at_odds, unable, unknown_layers
from quintet.config.native import Experiment
from quintet.config.native.learners import LearnerConfig
from quintet.config.native.megatron import MegatronConfig
from quintet.config.plan.models import find_models
from quintet.config.plan.steps import fine_tuning
from quintet.config.plan.values import fault, value

__all__ = ["backend_faults", "option_faults"]

MEGATRON = "megatron"
ANYWHERE = ("pin", "remove_padding", "padding_side")
"""Options that change nothing of what is computed, whatever computes it."""
MOVED = ("offload_parameters", "offload_optimizer", "offload_gradients", "offload_activations")
"""What without a GPU is in main memory already."""
DEGREES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert")
"""What Megatron keeps of its groups for the whole process."""


def backend_faults(composed: Composed) -> Iterator[Fault]:
    """Of each key that asks a Megatron learner for something that it hasn't, why, and what to do."""
    config = composed.experiment
    held = _by_megatron(config)
    if "actor" in held:
        yield from _actor(composed)
        yield from _fine_tuned(composed)
    for name in ("actor", "critic"):
        if name in held and getattr(config, name).optimizer.kind == "muon":
            yield _muon(composed, f"{name}.optimizer.kind", name)
    yield from option_faults(composed)
    yield from _models(composed, held)
    for name in held:
        yield from _foreign(composed, name)
    yield from _degrees(composed, held)
    yield from _divergence(composed, held)


def _models(composed: Composed, held: Iterable[str]) -> Iterator[Fault]:
    """Models whose layers it hasn't, as far as their `config.json` is here."""
    config, found = composed.experiment, find_models(composed.experiment)
    policy = "sft.path" if config.sft and config.sft.path else "policy.path"
    for name in held:
        own, shape = f"{name}.path", found.of(name)
        key = own if name != "actor" and value(config, own) else policy
        why = (
            None if shape is None else unknown_layers(shape.family, shape.experts.dense_layers if shape.experts else 0)
        )
        if why is not None and value(config, key) is not None:
            yield fault(composed, key, why, TAKES)


def _foreign(composed: Composed, name: str) -> Iterator[Fault]:
    """Options of the other backends that would do nothing."""
    own: LearnerConfig = getattr(composed.experiment, name)
    nothing = ANYWHERE if accelerators() else (*ANYWHERE, *MOVED)
    for section in ("sharding", "memory"):
        given, plain = getattr(own, section), type(getattr(own, section))()
        for option in type(given).model_fields:
            if option not in nothing and getattr(given, option) != getattr(plain, option):
                key = f"{name}.{section}.{option}"
                yield fault(composed, key, "Megatron has no such option here", f"leave it out; or {name}.backend=fsdp2")
    if getattr(own, "dtype", None) not in (None, composed.experiment.policy.dtype):
        why, hint = "Megatron's learners all have the policy's type", "leave it out, and set policy.dtype"
        yield fault(composed, f"{name}.dtype", why, hint)


def option_faults(composed: Composed) -> Iterator[Fault]:
    """Of each of Megatron's own options that can't be honoured, on this machine or beside the others."""
    hosted, dtype = not accelerators(), composed.experiment.policy.dtype
    for name, own in _by_megatron(composed.experiment).items():
        options = own.megatron or MegatronConfig()
        for each in (*unable(options, hosted=hosted), *at_odds(options, own.parallel, dtype)):
            told = fault(composed, f"{name}.megatron.{each.option}", each.why, each.hint)
            yield replace(told, elsewhere=each.elsewhere)


def _by_megatron(config: Experiment) -> dict[str, LearnerConfig]:
    """Those of the run that it holds."""
    more = fine_tuning(config) is None
    there = {"actor": True, "critic": more and config.needs_critic, "reference": more and config.needs_reference}
    sections: Mapping[str, LearnerConfig] = {name: getattr(config, name) for name, needed in there.items() if needed}
    return {name: own for name, own in sections.items() if own.backend == MEGATRON}


def _actor(composed: Composed) -> Iterator[Fault]:
    config, instead = composed.experiment, "actor.backend=fsdp2 does it"
    if config.policy.lora is not None:
        why = "Megatron's layers have no adapters here"
        yield fault(composed, "policy.lora.rank", why, f"train all weights: policy.lora=null; or {instead}")
    if config.rollout.engine_options.validate_weights:
        key, why = "rollout.engine_options.validate_weights", "it reads the plain learner's own model"
        yield fault(composed, key, why, f"leave it out; or {instead}")
    if config.policy.attention is not None:
        why = "Megatron's layers have one kind of attention here"
        yield fault(composed, "policy.attention", why, f"leave it out; or {instead}")


def _fine_tuned(composed: Composed) -> Iterator[Fault]:
    """What the stage of supervised fine-tuning asks of the same learner."""
    sft, options = composed.experiment.sft, composed.experiment.actor.megatron
    if sft is None:
        return
    if sft.lora is not None:
        why = "Megatron's layers have no adapters here"
        yield fault(composed, "sft.lora.rank", why, "train all weights: sft.lora=null; or actor.backend=fsdp2 does it")
    if sft.liger:
        yield fault(composed, "sft.liger", "its kernels go into the layers of transformers", "set it to false")
    if sft.optimizer.kind == "muon":
        yield _muon(composed, "sft.optimizer.kind", "actor")
    if sft.path is None or options is None:
        return
    for key, path in {"checkpoint": options.checkpoint, "conversion.source": options.conversion.source}.items():
        if path is not None:
            why = f"fine-tuning starts from sft.path = {sft.path}"
            yield fault(composed, f"actor.megatron.{key}", why, "give one of the two")


def _muon(composed: Composed, key: str, name: str) -> Fault:
    return fault(composed, key, "Megatron has adamw and sgd", f"take one of them, or {name}.backend=fsdp2")


def _degrees(composed: Composed, held: Mapping[str, LearnerConfig]) -> Iterator[Fault]:
    """A process's Megatron learners are all split alike."""
    if not held:
        return
    first, own = next(iter(held.items()))
    for name, other in held.items():
        for degree in DEGREES:
            wanted = getattr(own.parallel, degree)
            if getattr(other.parallel, degree) != wanted:
                key, why = f"{name}.parallel.{degree}", f"Megatron's learners are all split alike, and {first} has"
                yield fault(composed, key, f"{why} {wanted}", f"{key}={wanted}; or {name}.backend=fsdp2")


def _divergence(composed: Composed, held: Mapping[str, LearnerConfig]) -> Iterator[Fault]:
    """Over the whole vocabulary two policies are compared pass by pass, inside one backend."""
    kl = composed.experiment.algorithm.kl if fine_tuning(composed.experiment) is None else None
    if kl is not None and kl.estimator == "full" and ("actor" in held) != ("reference" in held):
        key, why = "algorithm.kl.estimator", "one of actor and reference is Megatron's, and the other isn't"
        yield fault(composed, key, why, "give both the same backend, or take k3")
