"""Apply tensor, context, pipeline and expert parallelism to a module, before its weights are sharded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from quintet.config.native.learners import LearnerConfig
from quintet.policies.causal_lm import PolicyModule, ValueModel
from quintet.policies.parallel.expert_parallel import ExpertParallel, TokenDispatcher, apply_expert_parallel
from quintet.policies.parallel.tensor_parallel import apply_tensor_parallel, apply_tensor_parallel_to_critic
from quintet.policies.parallel.token_sharding import TokenSharding
from quintet.policies.parallel.ulysses_parallel import check_ulysses
from quintet.training.parallel.device_mesh import LearnerMesh
from quintet.training.parallel.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class ModuleParallelism:
    """Pipeline and expert parallelism of a module: parts of it that differ between ranks."""

    pipeline: Pipeline | None = None
    experts: ExpertParallel | None = None
    expert_replicas: DeviceMesh | None = None
    """Ranks with the same experts."""


def parallelize_module(
    module: PolicyModule | ValueModel,
    mesh: LearnerMesh,
    config: LearnerConfig,
    component: str = "actor",
    autocast: torch.dtype = torch.float32,
) -> ModuleParallelism:
    """Split the module in place by the degrees of `config.parallel`: weights by `tensor`, the tokens of a pass by
    `context` and `ulysses`, layers by `pipeline` and `virtual_pipeline` (stages compute in `autocast`), and experts
    by `expert`. All ranks start from the same weights; ranks that split weights or tokens get the same passes, and
    all of them get the results at all tokens. `component` is the config section, for messages.

    Raises:
        ConfigError: the model cannot be split this way.
        MachineError: the model computes something outside its layers, so it has no pipeline stages.
    """
    tensor = mesh.size("tensor")
    ulysses = mesh.size("ulysses")
    sequence = config.parallel.sequence
    body = module.policy if isinstance(module, PolicyModule) else module.body
    model_config = body.config.get_text_config()
    if ulysses > 1:
        check_ulysses(
            model_config.num_attention_heads // tensor,
            max(1, model_config.num_key_value_heads // tensor),
            ulysses,
            component,
        )
    if tensor > 1:
        tensor_mesh = mesh.dimension("tensor")
        if isinstance(module, PolicyModule):
            apply_tensor_parallel(module.policy, tensor_mesh, sequence=sequence, component=component)
        else:
            apply_tensor_parallel_to_critic(module, tensor_mesh, sequence=sequence)
    if mesh.size("context", "ulysses") > 1 or (tensor > 1 and sequence):
        context, heads = (mesh.dimension(name).get_group() for name in ("context", "ulysses"))
        module.token_sharding = TokenSharding(context, heads, tensor if sequence else 1)
    pipeline = _build_pipeline(module, mesh, config, component, autocast)
    if config.parallel.expert == 1:
        return ModuleParallelism(pipeline)
    expert_mesh, replicas = mesh.expert_meshes(config.parallel.expert)
    return ModuleParallelism(
        pipeline, apply_expert_parallel(module, expert_mesh, _dispatcher(config), component), replicas
    )


def _build_pipeline(
    module: PolicyModule | ValueModel, mesh: LearnerMesh, config: LearnerConfig, component: str, autocast: torch.dtype
) -> Pipeline | None:
    parallel = config.parallel
    if parallel.pipeline == 1 and parallel.virtual_pipeline == 1:
        return None
    return Pipeline(
        module, mesh.dimension("pipeline"), parallel.virtual_pipeline, component=component, autocast=autocast
    )


def _dispatcher(config: LearnerConfig) -> TokenDispatcher:
    """Return how tokens reach experts on other ranks."""
    configured = config.megatron.moe_token_dispatcher_type if config.megatron else "alltoall"
    return "allgather" if configured == "allgather" else "alltoall"
