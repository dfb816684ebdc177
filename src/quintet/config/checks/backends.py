"""Settings that learners on Megatron do not support."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from quintet.config import hardware
from quintet.config.checks.megatron import (
    SUPPORTED_MODELS,
    conflicting_megatron_options,
    unsupported_architecture,
    unsupported_megatron_options,
)
from quintet.config.composed import ComposedConfig
from quintet.config.config_values import config_value, problem_with
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import LearnerConfig
from quintet.config.native.megatron import MegatronConfig
from quintet.config.plan.models import find_models
from quintet.config.plan.steps import sft_only
from quintet.config.problems import ConfigProblem

MEGATRON = "megatron"
NO_EFFECT_ANYWHERE = ("pin", "remove_padding", "padding_side")
"""Options that do not change results on any backend."""
OFFLOAD_OPTIONS = ("offload_parameters", "offload_optimizer", "offload_gradients", "offload_activations")
"""Options without effect on a machine without a GPU."""
DEGREES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert")
"""Parallel degrees that Megatron sets once per process."""


def backend_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the settings that the Megatron learners of the run do not support."""
    learners = _megatron_learners(composed.experiment)
    if "actor" in learners:
        yield from _check_actor(composed)
        yield from _check_sft(composed)
    for name in ("actor", "critic"):
        if name in learners:
            yield from _check_optimizer(composed, f"{name}.optimizer.kind", name)
    yield from megatron_option_problems(composed)
    yield from _check_models(composed, learners)
    for name in learners:
        yield from _check_other_options(composed, name)
    yield from _check_degrees(composed, learners)
    yield from _check_divergence(composed, learners)


def _check_models(composed: ComposedConfig, learners: Iterable[str]) -> Iterator[ConfigProblem]:
    """Yield models of unsupported architecture, if their `config.json` is available."""
    config, models = composed.experiment, find_models(composed.experiment)
    policy = "sft.path" if config.sft and config.sft.path else "policy.path"
    for name in learners:
        key, shape = f"{name}.path", models.of(name)
        key = key if name != "actor" and config_value(config, key) else policy
        if shape is None or config_value(config, key) is None:
            continue
        problem = unsupported_architecture(shape.family, shape.experts.dense_layers if shape.experts else 0)
        if problem is not None:
            yield problem_with(composed, key, problem, SUPPORTED_MODELS)


def _check_other_options(composed: ComposedConfig, name: str) -> Iterator[ConfigProblem]:
    """Yield options of the other backends, which would have no effect."""
    learner: LearnerConfig = getattr(composed.experiment, name)
    ignored = NO_EFFECT_ANYWHERE if hardware.num_gpus() else (*NO_EFFECT_ANYWHERE, *OFFLOAD_OPTIONS)
    for section in ("sharding", "memory"):
        values, defaults = getattr(learner, section), type(getattr(learner, section))()
        for option in type(values).model_fields:
            if option not in ignored and getattr(values, option) != getattr(defaults, option):
                key, hint = f"{name}.{section}.{option}", f"leave it out; or {name}.backend=fsdp2"
                yield problem_with(composed, key, "Megatron does not support this option", hint)
    if getattr(learner, "dtype", None) not in (None, composed.experiment.policy.dtype):
        why, hint = "all Megatron learners use the type of the policy", "leave it out, and set policy.dtype"
        yield problem_with(composed, f"{name}.dtype", why, hint)


def megatron_option_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the options in `megatron` sections that this machine does not support or that contradict others."""
    has_gpu, dtype = hardware.num_gpus() > 0, composed.experiment.policy.dtype
    for name, learner in _megatron_learners(composed.experiment).items():
        options = learner.megatron or MegatronConfig()
        for each in (
            *unsupported_megatron_options(options, has_gpu=has_gpu),
            *conflicting_megatron_options(options, learner.parallel, dtype),
        ):
            problem = problem_with(composed, f"{name}.megatron.{each.option}", each.reason, each.hint)
            yield replace(problem, elsewhere=each.elsewhere)


def _megatron_learners(config: Experiment) -> dict[str, LearnerConfig]:
    """Return the sections of the learners of the run that use Megatron."""
    rl = sft_only(config) is None
    present = {"actor": True, "critic": rl and config.needs_critic, "reference": rl and config.needs_reference}
    sections: Mapping[str, LearnerConfig] = {name: getattr(config, name) for name, needed in present.items() if needed}
    return {name: learner for name, learner in sections.items() if learner.backend == MEGATRON}


def _check_actor(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    config, leave_out = composed.experiment, "leave it out; or actor.backend=fsdp2 does it"
    if config.policy.lora is not None:
        yield _lora(composed, "policy.lora")
    if config.rollout.engine_options.validate_weights:
        yield problem_with(composed, "rollout.engine_options.validate_weights", "it needs a learner on FSDP", leave_out)
    if config.policy.attention is not None:
        yield problem_with(composed, "policy.attention", "Megatron has its own attention", leave_out)


def _check_sft(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield settings of supervised fine-tuning that the actor's backend does not support."""
    sft, options = composed.experiment.sft, composed.experiment.actor.megatron
    if sft is None:
        return
    if sft.lora is not None:
        yield _lora(composed, "sft.lora")
    if sft.liger:
        yield problem_with(composed, "sft.liger", "its kernels replace layers of transformers", "set it to false")
    yield from _check_optimizer(composed, "sft.optimizer.kind", "actor")
    if sft.path is None or options is None:
        return
    for key, path in {"checkpoint": options.checkpoint, "conversion.source": options.conversion.source}.items():
        if path is not None:
            why = f"fine-tuning already starts from sft.path = {sft.path}"
            yield problem_with(composed, f"actor.megatron.{key}", why, "set only one of the two")


def _lora(composed: ComposedConfig, section: str) -> ConfigProblem:
    hint = f"train all weights: {section}=null; or actor.backend=fsdp2 does it"
    return problem_with(composed, f"{section}.rank", "LoRA is not supported on Megatron", hint)


def _check_optimizer(composed: ComposedConfig, key: str, learner: str) -> Iterator[ConfigProblem]:
    if config_value(composed.experiment, key) == "muon":
        hint = f"use one of them, or {learner}.backend=fsdp2"
        yield problem_with(composed, key, "Megatron supports adamw and sgd", hint)


def _check_degrees(composed: ComposedConfig, learners: Mapping[str, LearnerConfig]) -> Iterator[ConfigProblem]:
    """Check that all Megatron learners have the same parallel degrees."""
    if not learners:
        return
    first, *others = learners
    for name in others:
        for degree in DEGREES:
            expected, key = getattr(learners[first].parallel, degree), f"{name}.parallel.{degree}"
            if getattr(learners[name].parallel, degree) != expected:
                why = f"all Megatron learners need the same parallel sizes, and {first} has {expected}"
                yield problem_with(composed, key, why, f"{key}={expected}; or {name}.backend=fsdp2")


def _check_divergence(composed: ComposedConfig, learners: Mapping[str, LearnerConfig]) -> Iterator[ConfigProblem]:
    """Check that a KL divergence over the full vocabulary has actor and reference on the same backend."""
    kl = composed.experiment.algorithm.kl if sft_only(composed.experiment) is None else None
    if kl is not None and kl.estimator == "full" and ("actor" in learners) != ("reference" in learners):
        key, why = "algorithm.kl.estimator", "actor and reference have different backends"
        yield problem_with(composed, key, why, "use the same backend for both, or k3")
