"""Layers, experts and tokens of a learner shared out among the ranks of its mesh, before its weights are laid out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from quintet.config.native.learners import LearnerConfig
from quintet.policies.causal_lm import PolicyModule, ValueModel
from quintet.policies.expert_parallel import Dispatcher, ExpertParallel, split_experts
from quintet.policies.sequence_parallel import refuse_ulysses
from quintet.policies.tensor_parallel import split_critic, split_layers
from quintet.policies.token_split import TokenSplit
from quintet.training.mesh import Mesh
from quintet.training.pipeline import Pipeline

__all__ = ["Shared", "share_out"]


@dataclass(frozen=True, slots=True)
class Shared:
    """What lies on different ranks besides parts of the same weights."""

    pipeline: Pipeline | None = None
    """Through the stages that hold the layers."""
    experts: ExpertParallel | None = None
    same_experts: DeviceMesh | None = None
    """Ranks that hold the same ones."""


def share_out(
    module: PolicyModule | ValueModel,
    mesh: Mesh,
    config: LearnerConfig,
    component: str = "actor",
    autocast: torch.dtype = torch.float32,
) -> Shared:
    """Split the module's layers as far as `parallel.tensor` says, and have its passes share tokens as far as `context`
    and `ulysses` do. Every rank brings the same weights; ranks that differ along these dimensions alone are given the
    same passes, and all of them get what is measured at all tokens. `component` is whose configuration it is.

    Layers are shared out over stages as `pipeline` and `virtual_pipeline` say, which compute in `autocast`, and experts
    over data ranks as `expert` does.

    Raises:
        ConfigError: the model can't be split so.
        MachineError: the model does something besides its layers, and they are to be shared out.
    """
    tensor, ulysses, sequence = mesh.size("tensor"), mesh.size("ulysses"), config.parallel.sequence
    body = module.policy if isinstance(module, PolicyModule) else module.body
    own = body.config.get_text_config()
    if ulysses > 1:
        refuse_ulysses(own.num_attention_heads // tensor, max(1, own.num_key_value_heads // tensor), ulysses, component)
    if tensor > 1:
        along = mesh.along("tensor")
        if isinstance(module, PolicyModule):
            split_layers(module.policy, along, sequence=sequence, component=component)
        else:
            split_critic(module, along, sequence=sequence)
    if mesh.size("context", "ulysses") > 1 or (tensor > 1 and sequence):
        context, heads = (mesh.along(name).get_group() for name in ("context", "ulysses"))
        module.split = TokenSplit(context, heads, tensor if sequence else 1)
    pipeline = _stages(module, mesh, config, component, autocast)
    if config.parallel.expert == 1:
        return Shared(pipeline)
    over, same = mesh.experts(config.parallel.expert)
    return Shared(pipeline, split_experts(module, over, _dispatcher(config), component), same)


def _stages(
    module: PolicyModule | ValueModel, mesh: Mesh, config: LearnerConfig, component: str, autocast: torch.dtype
) -> Pipeline | None:
    parallel = config.parallel
    if parallel.pipeline == 1 and parallel.virtual_pipeline == 1:
        return None
    virtual = parallel.virtual_pipeline
    return Pipeline(module, mesh.along("pipeline"), virtual, component=component, autocast=autocast)


def _dispatcher(config: LearnerConfig) -> Dispatcher:
    """How tokens reach experts on other ranks."""
    named = config.megatron.moe_token_dispatcher_type if config.megatron else "alltoall"
    return "allgather" if named == "allgather" else "alltoall"
