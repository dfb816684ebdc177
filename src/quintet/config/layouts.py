"""How learners' weights are to lie on their devices, and which of that FSDP and FSDP2 don't have: said before anything
is loaded, and once more where weights are laid out, in the same words."""

from __future__ import annotations

import os
from collections.abc import Iterator

from quintet.config.compose import Composed
from quintet.config.engines import accelerators
from quintet.config.faults import Fault, raise_faults
from quintet.config.keys import show
from quintet.config.native import Experiment
from quintet.config.native.learners import LearnerConfig
from quintet.config.plan.placement import place, split_faults
from quintet.config.plan.values import fault, told, value

__all__ = ["APART", "layout_faults", "refuse_layout"]

LEARNERS = ("actor", "critic", "reference")
SPLITS = ("tensor", "pipeline", "expert")
"""Ways to split a model that leave devices with different weights."""
APART = "adapters aren't shared out with the layers"
WAYS = ("tensor", "sequence", "context", "ulysses")
"""How places of a distribution over the vocabulary come to lie on different devices."""


def layout_faults(composed: Composed) -> Iterator[Fault]:
    """Of each key that asks of a learner's weights what its backend hasn't, why, and what to do."""
    placement = place(composed.experiment)
    for name in LEARNERS:
        component = placement.of(name)
        if component is not None:
            yield from _learner(composed, name, max(1, len(component.devices)), on_gpu=_has_gpu())


def refuse_layout(config: Experiment, name: str, ranks: int, *, on_gpu: bool) -> None:
    """Hold the learner called `name` against the ranks that it has, which nobody asked for by a key.

    Raises:
        ConfigError: its weights can't lie on them as the configuration says.
    """
    composed = Composed(config, {})
    split = split_faults(composed, name, ranks) if ranks > 1 else ()
    raise_faults([*split, *_learner(composed, name, ranks, on_gpu=on_gpu)])


def _has_gpu() -> bool:
    """Whether a run on this machine would compute on a GPU."""
    return accelerators() > 0 and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


def _learner(composed: Composed, name: str, ranks: int, *, on_gpu: bool) -> Iterator[Fault]:
    config = composed.experiment
    own: LearnerConfig = getattr(config, name)
    if own.backend == "megatron" or (name == "reference" and _is_the_policy(config)):
        return
    if on_gpu:
        yield from _offloaded(composed, name, ranks)
    if ranks == 1:
        return
    yield from _sharded(composed, name)
    yield from _split(composed, name)
    if name == "reference":
        yield from _compared(composed)


def _is_the_policy(config: Experiment) -> bool:
    """Whether the reference is the policy without its adapters, and lies where that does."""
    own = config.reference
    return own.path is None and own.dtype is None and config.policy.lora is not None


def _offloaded(composed: Composed, name: str, ranks: int) -> Iterator[Fault]:
    """Shards in main memory, beside a GPU. FSDP doesn't add a gradient that lies there to the next one, and goes on
    with the last alone (torch 2.13, `FlatParamHandle.prepare_gradient_for_backward`)."""
    own: LearnerConfig = getattr(composed.experiment, name)
    if not own.memory.sharded_offload:
        return
    whole = own.sharding.policy == "no_shard"
    if ranks == 1 or whole:
        why = "one process has" if ranks == 1 else f"with {name}.sharding.policy=no_shard there are"
        hint = f"set it to false, and {name}.memory.offload_parameters=true where weights are to leave the GPU"
        yield fault(composed, f"{name}.memory.sharded_offload", f"{why} no shards to keep on the CPU", hint)
    elif own.backend == "fsdp" and own.sharding.sync_every_micro_batch:
        key = f"{name}.sharding.sync_every_micro_batch"
        why = f"with {told(composed, f'{name}.memory.sharded_offload')} FSDP learns from the last micro-batch alone"
        yield fault(composed, key, why, f"set it to false, or take {name}.backend=fsdp2")


def _sharded(composed: Composed, name: str) -> Iterator[Fault]:
    own: LearnerConfig = getattr(composed.experiment, name)
    split = next((part for part in SPLITS if getattr(own.parallel, part) > 1), None)
    if own.sharding.policy == "no_shard":
        if split is not None:
            why = f"layers that are split ({told(composed, f'{name}.parallel.{split}')}) are sharded, too"
            yield fault(composed, f"{name}.sharding.policy", why, "take full_shard, or shard_grad_op")
    elif own.backend == "fsdp2" and own.sharding.backward_prefetch == "post":
        hint = f"set it to pre or null, or take {name}.backend=fsdp"
        why = "FSDP2 fetches weights before it computes gradients"
        yield fault(composed, f"{name}.sharding.backward_prefetch", why, hint)


def _split(composed: Composed, name: str) -> Iterator[Fault]:
    """Layers, experts and tokens on several devices."""
    config = composed.experiment
    own: LearnerConfig = getattr(config, name)
    parallel, dispatcher = own.parallel, own.megatron.moe_token_dispatcher_type if own.megatron else None
    if parallel.pipeline > 1 and parallel.sequence:
        why = "stages of a pipeline hand on whole states"
        yield fault(composed, f"{name}.parallel.sequence", why, "set it to false")
    if parallel.pipeline > 1 and name == "actor" and _adapted(config):
        hint = f"set {name}.parallel.pipeline=1; the base model's weights are sharded all the same"
        yield fault(composed, f"{name}.parallel.pipeline", APART, hint)
    if parallel.expert > 1 and dispatcher in ("alltoall_seq", "flex"):
        key = f"{name}.megatron.moe_token_dispatcher_type"
        yield fault(composed, key, "Megatron alone has it", f"set {key}=alltoall")
    if parallel.context > 1 and config.policy.attention == "eager":
        parted = told(composed, f"{name}.parallel.context")
        why = f"sequences that are split over devices ({parted}) take torch's kernels"
        yield fault(composed, "policy.attention", why, "take sdpa, or null for the fastest")


def _adapted(config: Experiment) -> bool:
    return config.policy.lora is not None or (config.sft is not None and config.sft.lora is not None)


def _compared(composed: Composed) -> Iterator[Fault]:
    """Whole distributions of policy and reference are compared where both lie."""
    config = composed.experiment
    kl = config.algorithm.kl
    if kl is None or kl.estimator != "full" or config.actor.backend == "megatron":
        return
    for way in WAYS:
        key, wanted = f"reference.parallel.{way}", value(config, f"actor.parallel.{way}")
        if value(config, key) != wanted:
            why = f"{told(composed, f'actor.parallel.{way}')}, and the full divergence compares what both say of the "
            hint = f"set {key}={show(wanted)}, or take another algorithm.kl.estimator"
            yield fault(composed, key, f"{why}same tokens", hint)
