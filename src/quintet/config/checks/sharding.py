"""Sharding and parallelism settings that FSDP and FSDP2 do not support.

They are checked before anything is loaded, and again when a learner is sharded, with the same messages.
"""

from collections.abc import Iterator

from quintet import hardware
from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import LearnerConfig
from quintet.config.plan.placement import LOGPROBS, place_components, split_problems
from quintet.config.problems import ConfigProblem, raise_problems
from quintet.config.schema import format_value

LEARNERS = ("actor", "critic", "reference")
WEIGHT_SPLITS = ("tensor", "pipeline", "expert")
"""Degrees that give devices different weights."""
ADAPTERS_NOT_SPLIT = "LoRA adapters are not split into pipeline stages"
VOCABULARY_SPLITS = ("tensor", "sequence", "context", "ulysses")
"""Degrees that put the log-probs of a sequence on different devices."""


def sharding_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the sharding settings that the backends of the run's learners do not support."""
    if composed.experiment.generation is not None:
        return
    placement = place_components(composed.experiment)
    for name in LEARNERS:
        if component := placement.of(name):
            yield from _check_learner(composed, name, component.num_processes, on_gpu=hardware.sees_gpu())
    actor, workers = placement.of("actor"), placement.of(LOGPROBS)
    if actor and workers and (actor.num_processes == 1) != (workers.num_processes == 1):
        yield from _check_learner(composed, "actor", workers.num_processes, on_gpu=hardware.sees_gpu())


def check_sharding(config: Experiment, name: str, ranks: int, *, on_gpu: bool) -> None:
    """Check the settings of a learner against the ranks that it actually has.

    Raises:
        ConfigError: one message names every setting that does not fit.
    """
    composed = ComposedConfig(config, {})
    degrees = split_problems(composed, name, ranks) if ranks > 1 else ()
    raise_problems([*degrees, *_check_learner(composed, name, ranks, on_gpu=on_gpu)])


def _check_learner(composed: ComposedConfig, name: str, ranks: int, *, on_gpu: bool) -> Iterator[ConfigProblem]:
    config = composed.experiment
    learner = getattr(config, name)
    shares_policy = learner is config.reference and config.reference_has_adapters
    if learner.backend == "megatron" or (shares_policy and not place_components(config).is_standalone(name)):
        return
    if on_gpu and learner.memory.sharded_offload:
        yield from _check_offload(composed, name, learner, ranks)
    if ranks == 1:
        return
    yield from _check_optimizer(composed, name)
    yield from _check_sharding_policy(composed, name, learner)
    yield from _check_parallel(composed, name, learner)
    if name == "reference":
        yield from _check_full_kl(composed)


def _check_offload(composed: ComposedConfig, name: str, learner: LearnerConfig, ranks: int) -> Iterator[ConfigProblem]:
    """Check shards in host memory next to a GPU. FSDP does not accumulate gradients there but keeps only the last one
    (torch 2.13, `FlatParamHandle.prepare_gradient_for_backward`)."""
    if ranks == 1 or learner.sharding.policy == "no_shard":
        why = "one process has" if ranks == 1 else f"with {name}.sharding.policy=no_shard there are"
        key = f"{name}.memory.sharded_offload"
        hint = f"{key}=false, or, to offload whole weights, {key}=false {name}.memory.offload_parameters=true"
        yield composed.problem(key, f"{why} no shards to keep on the CPU", hint)
    elif learner.backend == "fsdp" and learner.sharding.sync_every_micro_batch:
        key = f"{name}.sharding.sync_every_micro_batch"
        offload = composed.describe(f"{name}.memory.sharded_offload")
        why = f"with {offload} FSDP only uses the gradient of the last micro-batch"
        yield composed.problem(key, why, f"{key}=false, or {name}.backend=fsdp2")


def _check_optimizer(composed: ComposedConfig, name: str) -> Iterator[ConfigProblem]:
    learner, key = getattr(composed.experiment, name), f"{name}.optimizer.kind"
    if learner.backend == "fsdp" and name != "reference" and learner.optimizer.kind == "muon":
        why = "FSDP shards flat parameters, and Muon needs matrices"
        yield composed.problem(key, why, f"{key}=adamw, or {name}.backend=fsdp2")


def _check_sharding_policy(composed: ComposedConfig, name: str, learner: LearnerConfig) -> Iterator[ConfigProblem]:
    split = next((part for part in WEIGHT_SPLITS if getattr(learner.parallel, part) > 1), None)
    if learner.sharding.policy == "no_shard":
        if split is not None:
            why = f"layers that are split ({composed.describe(f'{name}.parallel.{split}')}) are always sharded"
            key = f"{name}.sharding.policy"
            yield composed.problem(key, why, f"{key}=full_shard, or {key}=shard_grad_op")
    elif learner.backend == "fsdp2" and learner.sharding.backward_prefetch == "post":
        key, why = f"{name}.sharding.backward_prefetch", "FSDP2 prefetches weights before it computes gradients"
        yield composed.problem(key, why, f"{key}=pre, or {key}=null, or {name}.backend=fsdp")


def _check_parallel(composed: ComposedConfig, name: str, learner: LearnerConfig) -> Iterator[ConfigProblem]:
    """Check tensor, pipeline, expert and context parallelism."""
    config, parallel = composed.experiment, learner.parallel
    dispatcher = learner.megatron.moe_token_dispatcher_type if learner.megatron else None
    if parallel.pipeline > 1 and parallel.sequence:
        key, why = f"{name}.parallel.sequence", "pipeline stages send unsplit hidden states"
        yield composed.problem(key, why, f"{key}=false")
    is_adapted = config.policy.lora is not None or (config.sft is not None and config.sft.lora is not None)
    if parallel.pipeline > 1 and name == "actor" and is_adapted:
        hint = f"{name}.parallel.pipeline=1; the base model is still sharded"
        yield composed.problem(f"{name}.parallel.pipeline", ADAPTERS_NOT_SPLIT, hint)
    if parallel.expert > 1 and dispatcher in ("alltoall_seq", "flex"):
        key = f"{name}.megatron.moe_token_dispatcher_type"
        yield composed.problem(key, "only Megatron supports it", f"{key}=alltoall")
    if parallel.context > 1 and config.policy.attention == "eager":
        context = composed.describe(f"{name}.parallel.context")
        why = f"context parallelism ({context}) needs fused attention"
        yield composed.problem("policy.attention", why, "policy.attention=null, or policy.attention=sdpa")


def _check_full_kl(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Check that policy and reference have their log-probs on the same devices for a full KL divergence."""
    config = composed.experiment
    kl = config.algorithm.kl
    if kl is None or kl.estimator != "full" or config.actor.backend == "megatron":
        return
    for degree in VOCABULARY_SPLITS:
        key, actor_key = f"reference.parallel.{degree}", f"actor.parallel.{degree}"
        expected = composed.value(actor_key)
        if composed.value(key) != expected:
            why = f"{composed.describe(actor_key)}, and a full KL divergence needs the same for both"
            hint = f"{key}={format_value(expected)}, or algorithm.kl.estimator=k3"
            yield composed.problem(key, why, hint)
