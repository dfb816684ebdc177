"""Settings that learners on Megatron do not support."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from quintet import hardware
from quintet.config.checks.megatron import (
    SUPPORTED_MODELS,
    conflicting_megatron_options,
    unsupported_architecture,
    unsupported_megatron_options,
)
from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import LearnerConfig
from quintet.config.native.megatron import MegatronConfig
from quintet.config.plan.models import find_models
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value

NO_EFFECT_ANYWHERE = ("pin", "remove_padding", "padding_side")
"""Options that do not change results on any backend."""
OFFLOAD_OPTIONS = ("offload_parameters", "offload_optimizer", "offload_gradients", "offload_activations")
"""Options without effect on a machine without a GPU."""
NO_LORA = "LoRA is not supported on Megatron"
UNSUPPORTED_WITH_ACTOR: Mapping[str, tuple[str, str]] = {
    "policy.lora.rank": (NO_LORA, "train all weights: policy.lora=null"),
    "rollout.engine_options.validate_weights": (
        "it needs a learner on FSDP",
        "rollout.engine_options.validate_weights=false",
    ),
    "policy.attention": ("Megatron has its own attention", "policy.attention=null"),
    "sft.lora.rank": (NO_LORA, "train all weights: sft.lora=null"),
    "sft.liger": ("its kernels replace layers of transformers", "sft.liger=false"),
}
"""Keys that must not be set with an actor on Megatron: problem, and what to set instead."""
LOGITS_SIZES = ("tensor", "pipeline", "context")
"""Parallel sizes that determine which rank has which logits of which sequences."""
BUFFER_SIZES = ("tensor", "context")
"""Parallel sizes on which Transformer Engine's communication buffers depend."""


def backend_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the settings that the Megatron learners of the run do not support."""
    learners = _megatron_learners(composed.experiment)
    if "actor" in learners:
        yield from _check_actor(composed)
    for name in ("actor", "critic"):
        if name in learners:
            yield from _check_optimizer(composed, f"{name}.optimizer.kind", name)
    yield from megatron_option_problems(composed)
    yield from _check_models(composed, learners)
    for name, learner in learners.items():
        yield from _check_other_options(composed, name, learner)
    yield from _check_initial_weights(composed, learners)
    yield from _check_buffers(composed, learners)
    yield from _check_divergence(composed, learners)


def _check_models(composed: ComposedConfig, learners: Iterable[str]) -> Iterator[ConfigProblem]:
    """Yield models of unsupported architecture, if their `config.json` is available."""
    config, models = composed.experiment, find_models(composed.experiment)
    policy = "sft.path" if config.sft and config.sft.path else "policy.path"
    for name in learners:
        key, shape = f"{name}.path", models.of(name)
        key = key if name != "actor" and composed.value(key) else policy
        if shape is None or composed.value(key) is None:
            continue
        problem = unsupported_architecture(shape.family, shape.experts.dense_layers if shape.experts else 0)
        if problem is not None:
            yield composed.problem(key, problem, f"{name}.backend=fsdp2; {SUPPORTED_MODELS}")


def _check_other_options(composed: ComposedConfig, name: str, learner: LearnerConfig) -> Iterator[ConfigProblem]:
    """Yield options of the other backends, which would have no effect."""
    ignored = NO_EFFECT_ANYWHERE if hardware.num_gpus() else (*NO_EFFECT_ANYWHERE, *OFFLOAD_OPTIONS)
    for section in ("sharding", "memory"):
        values = getattr(learner, section)
        for option, field in type(values).model_fields.items():
            if option not in ignored and getattr(values, option) != field.default:
                key = f"{name}.{section}.{option}"
                hint = f"{key}={format_value(field.default)}, or {name}.backend=fsdp2"
                yield composed.problem(key, "Megatron does not support this option", hint)
    dtype = getattr(learner, "dtype", None)
    if dtype not in (None, composed.experiment.policy.dtype):
        hint = f"{name}.dtype=null, or policy.dtype={dtype}, or {name}.backend=fsdp2"
        yield composed.problem(f"{name}.dtype", "all Megatron learners use the type of the policy", hint)


def megatron_option_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the options in `megatron` sections that this machine does not support or that contradict others."""
    has_gpu, dtype = hardware.num_gpus() > 0, composed.experiment.policy.dtype
    for name, learner in _megatron_learners(composed.experiment).items():
        options = learner.megatron or MegatronConfig()
        for each in (
            *unsupported_megatron_options(options, has_gpu=has_gpu),
            *conflicting_megatron_options(options, learner.parallel, dtype),
        ):
            problem = composed.problem(f"{name}.megatron.{each.option}", each.reason, each.hint(name))
            yield replace(problem, elsewhere=each.elsewhere)


def _megatron_learners(config: Experiment) -> dict[str, LearnerConfig]:
    """Return the sections of the learners of the run that use Megatron."""
    if config.generation is not None:
        return {}
    rl = config.sft_only is None
    needed = {"actor": True, "critic": rl and config.needs_critic, "reference": rl and config.needs_reference}
    sections: dict[str, LearnerConfig] = {name: getattr(config, name) for name in needed if needed[name]}
    return {name: learner for name, learner in sections.items() if learner.backend == "megatron"}


def _check_actor(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield settings of policy, engine and supervised fine-tuning that the actor's backend does not support."""
    for key, (problem, hint) in UNSUPPORTED_WITH_ACTOR.items():
        if composed.value(key) not in (None, False):
            yield composed.problem(key, problem, f"{hint}, or actor.backend=fsdp2")
    sft = composed.experiment.sft
    if sft is None:
        return
    yield from _check_optimizer(composed, "sft.optimizer.kind", "actor")
    for key in ("actor.megatron.checkpoint", "actor.megatron.conversion.source"):
        if sft.path is not None and composed.value(key) is not None:
            why = f"fine-tuning already starts from sft.path = {sft.path}"
            yield composed.problem(key, why, f"{key}=null, or sft.path=null")


def _check_optimizer(composed: ComposedConfig, key: str, learner: str) -> Iterator[ConfigProblem]:
    if composed.value(key) == "muon":
        hint = f"{key}=adamw, or {key}=sgd, or {learner}.backend=fsdp2"
        yield composed.problem(key, "Megatron supports adamw and sgd", hint)


def _check_initial_weights(composed: ComposedConfig, learners: Mapping[str, LearnerConfig]) -> Iterator[ConfigProblem]:
    """Check that critic and reference have no Megatron weights other than those of the actor, which they copy."""
    for name in (name for name in learners if name != "actor"):
        key, path = f"{name}.megatron.checkpoint", f"{name}.path"
        own, actors = composed.value(key), composed.value("actor.megatron.checkpoint")
        if own is not None and (own != actors or composed.value(path) is not None):
            why = f"only the actor reads Megatron weights; {name} starts from its weights, or from {path}"
            yield composed.problem(key, why, f"{key}=null")


def _check_buffers(composed: ComposedConfig, learners: Mapping[str, LearnerConfig]) -> Iterator[ConfigProblem]:
    """Check that learners share Transformer Engine's buffers for communication, which a process has once."""
    overlapping = {name: each for name, each in learners.items() if each.megatron and each.megatron.tp_comm_overlap_cfg}
    for name, learner in overlapping.items():
        first = next(iter(overlapping))
        if any(getattr(learner.parallel, size) != getattr(overlapping[first].parallel, size) for size in BUFFER_SIZES):
            why = f"its buffers have one size, and {first} has other parallel sizes"
            key = f"{name}.megatron.tp_comm_overlap_cfg"
            yield composed.problem(key, why, f"{key}=null, or {name}.backend=fsdp2")


def _check_divergence(composed: ComposedConfig, learners: Mapping[str, LearnerConfig]) -> Iterator[ConfigProblem]:
    """Check that a KL divergence over the full vocabulary has actor and reference on the same backend, and the same
    part of the logits of the same sequences on each rank."""
    kl = composed.experiment.algorithm.kl if composed.experiment.sft_only is None else None
    if kl is None or kl.estimator != "full":
        return
    key = "algorithm.kl.estimator"
    if ("actor" in learners) != ("reference" in learners):
        hint = f"reference.backend={composed.experiment.actor.backend}, or {key}=k3"
        yield composed.problem(key, "actor and reference have different backends", hint)
    elif "actor" in learners:
        for size in LOGITS_SIZES:
            expected, own = getattr(learners["actor"].parallel, size), f"reference.parallel.{size}"
            if getattr(learners["reference"].parallel, size) != expected:
                why = f"a full KL divergence compares logits of the same sequences, and actor has {expected}"
                yield composed.problem(own, why, f"{own}={expected}, or {key}=k3")
