"""Strategies that shard weights with torch's FSDP2 (`fully_shard`) or FSDP1 and gather them layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy
from torch.distributed.tensor import DTensor, distribute_tensor

from quintet.config.native.learners import MemoryConfig, ShardingConfig
from quintet.policies.causal_lm import PolicyModule
from quintet.policies.parallel.dtensor_shards import gather_full_tensor
from quintet.policies.vision.image_encoder import vision_encoder
from quintet.training.optim.grad_norm import GradNormGroup, clip_grad_norm
from quintet.training.parallel.device_mesh import LearnerMesh
from quintet.training.parallel.parallelize import ModuleParallelism
from quintet.training.parallel.pipeline import PipelineStrategy
from quintet.training.parallel.strategy import (
    DTYPES_BY_NAME,
    VALUE_HEAD,
    ParallelStrategy,
    ReplicatedStrategy,
    UnpipelinedStrategy,
    cast_buffers,
    load_full_weights,
    parameter_name,
)

SHARDING_STRATEGIES = {
    ("full_shard", False): ShardingStrategy.FULL_SHARD,
    ("full_shard", True): ShardingStrategy.HYBRID_SHARD,
    ("hybrid_shard", False): ShardingStrategy.FULL_SHARD,
    ("hybrid_shard", True): ShardingStrategy.HYBRID_SHARD,
    ("shard_grad_op", False): ShardingStrategy.SHARD_GRAD_OP,
    ("shard_grad_op", True): ShardingStrategy._HYBRID_SHARD_ZERO2,
}
"""FSDP's strategy by `sharding.policy` and whether there are several sharding groups."""


@dataclass(frozen=True, slots=True)
class MixedPrecisionDtypes:
    """Dtypes of parameters in computation, of gradients in reduction, and of buffers."""

    parameters: torch.dtype
    gradients: torch.dtype
    buffers: torch.dtype

    @classmethod
    def from_config(cls, config: ShardingConfig, dtype: torch.dtype) -> MixedPrecisionDtypes:
        """Return the configured dtypes; `dtype`, the policy's, is the default."""
        parameters = DTYPES_BY_NAME[config.parameter_dtype] if config.parameter_dtype else dtype
        gradients = DTYPES_BY_NAME[config.reduce_dtype] if config.reduce_dtype else parameters
        return cls(parameters, gradients, DTYPES_BY_NAME[config.buffer_dtype])


def build_strategy(
    module: nn.Module,
    backend: str,
    mesh: LearnerMesh,
    config: ShardingConfig,
    memory: MemoryConfig,
    dtype: torch.dtype = torch.float32,
    parallelism: ModuleParallelism | None = None,
) -> ParallelStrategy:
    """Shard the module's weights over the mesh as configured. All ranks start from the same weights, except for what
    `parallelism` has already split. `config/checks/sharding.py` rejects options that the backend does not support.
    """
    parallelism = parallelism or ModuleParallelism()
    if mesh.device_mesh is None or config.policy == "no_shard":
        return ReplicatedStrategy.from_config(module, config, mesh.replicas)
    if isinstance(module, PolicyModule):
        module.head_persists = False
    dtypes = MixedPrecisionDtypes.from_config(config, dtype)
    cast_buffers(module, dtypes.buffers)
    if backend == "fsdp":
        return FsdpStrategy(module, mesh, config, memory, dtypes)
    strategy = Fsdp2Strategy(module, mesh, config, memory, dtypes, parallelism)
    if parallelism.pipeline:
        return PipelineStrategy(strategy, parallelism.pipeline, strategy.grad_norm_groups)
    return strategy


def fsdp_units(module: nn.Module, min_parameters: int = 0) -> list[nn.Module]:
    """Return the modules whose weights are gathered together: the decoder layers, or, from the inside out, every module
    with at least `min_parameters` parameters that are in no unit yet. Tied weights belong to no unit."""
    if min_parameters == 0:
        return _decoder_layers(module)
    units: list[nn.Module] = []
    _collect_units(module, min_parameters, _tied_parameters(module), units)
    return [unit for unit in units if unit is not module]


def _decoder_layers(module: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]


def _tied_parameters(module: nn.Module) -> set[nn.Parameter]:
    owners: dict[nn.Parameter, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners[parameter] = owners.get(parameter, 0) + 1
    return {parameter for parameter, count in owners.items() if count > 1}


def _collect_units(
    module: nn.Module, min_parameters: int, tied: set[nn.Parameter], units: list[nn.Module]
) -> set[nn.Parameter]:
    """Append units inside the module and return its parameters that are in no unit."""
    free = set(module.parameters(recurse=False))
    for child in module.children():
        free |= _collect_units(child, min_parameters, tied, units)
    if (
        sum(p.numel() for p in free) < min_parameters
        or free & tied
        or isinstance(module, nn.ModuleList | nn.ModuleDict)
    ):
        return free
    units.append(module)
    return set()


class _ShardedStrategy(UnpipelinedStrategy):
    """Base of the strategies with either release of FSDP."""

    needs_equal_passes = True

    def __init__(self, module: nn.Module, mesh: LearnerMesh, config: ShardingConfig) -> None:
        self.loss_factor = float(mesh.replicas.size)
        self._sync_every_micro_batch = config.sync_every_micro_batch
        self._device = next(module.parameters()).device
        self._names = [parameter_name(name) for name, _ in module.named_parameters()]

    @property
    def device(self) -> torch.device:
        """See `ParallelStrategy.device`; offloaded shards are on another one."""
        return self._device

    def reduce_gradients(self) -> None:
        """See `ParallelStrategy.reduce_gradients`; FSDP reduces them in the last backward pass."""


class Fsdp2Strategy(_ShardedStrategy):
    """FSDP2 (`fully_shard`): each parameter is a `DTensor` sharded by rows."""

    def __init__(
        self,
        module: nn.Module,
        mesh: LearnerMesh,
        config: ShardingConfig,
        memory: MemoryConfig,
        dtypes: MixedPrecisionDtypes,
        parallelism: ModuleParallelism,
    ) -> None:
        super().__init__(module, mesh, config)
        self.module: Any = module
        self._experts = parallelism.experts
        _fully_shard(module, mesh, config, memory, dtypes, parallelism)

    def accumulate_gradients(self, *, last: bool) -> AbstractContextManager[object]:
        self.module.set_is_last_backward(last)
        self.module.set_requires_gradient_sync(last or self._sync_every_micro_batch)
        return nullcontext()

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        if self._experts:
            return clip_grad_norm(self.grad_norm_groups(), max_norm)
        return clip_dtensor_grad_norm(self.parameters(), max_norm)

    def grad_norm_groups(self) -> list[GradNormGroup]:
        """Return parameters by the ranks over which their norm is summed: experts are on other ranks than the rest."""
        if self._experts is None:
            return [GradNormGroup(self.parameters())]
        rest = [parameter for parameter in self.parameters() if not self._experts.is_expert(parameter)]
        return [GradNormGroup(rest), GradNormGroup(self._experts.parameters, [self._experts.group])]

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in zip(self._names, self.module.parameters(), strict=True):
            if self._experts and self._experts.is_expert(parameter):
                yield name, self._experts.gather(parameter)
            else:
                yield name, gather_full_tensor(parameter.detach())

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(zip(self._names, self.module.parameters(), strict=True))
        for name, tensor in weights:
            if name in parameters:
                parameter = parameters[name]
                is_expert = self._experts is not None and self._experts.is_expert(parameter)
                load_local_shard(
                    parameter, self._experts.local_slice(tensor) if self._experts and is_expert else tensor
                )


def _fully_shard(
    module: nn.Module,
    mesh: LearnerMesh,
    config: ShardingConfig,
    memory: MemoryConfig,
    dtypes: MixedPrecisionDtypes,
    parallelism: ModuleParallelism,
) -> None:
    reshard = False if config.policy == "shard_grad_op" else config.reshard_after_forward
    # kernels for CPUs keep states between layers in float32 (`policies/training_decoder.py`); stages of a pipeline send
    # them to modules, which need the type of the weights
    casts_inputs = next(module.parameters()).device.type != "cpu" or parallelism.pipeline is not None
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(dtypes.parameters, dtypes.gradients, cast_forward_inputs=casts_inputs),
        "offload_policy": _offload_policy(memory),
    }
    layer_options = options | {"reshard_after_forward": True if reshard is None else reshard}
    if parallelism.experts and parallelism.expert_replicas:
        parallelism.experts.shard(parallelism.expert_replicas, mesh.replicas.size, **layer_options)
    if mesh.size("tensor") > 1 and (encoder := vision_encoder(module)) is not None:
        # the same gradients on all tensor-parallel ranks: their average is one of them
        for part in (*fsdp_units(encoder, config.min_parameters), encoder):
            fully_shard(part, mesh=mesh.vision_encoder_mesh, **layer_options)
    units = [unit for unit in fsdp_units(module, config.min_parameters) if not isinstance(unit, FSDPModule)]
    for unit in units:
        fully_shard(unit, mesh=mesh.fsdp_mesh, **layer_options)
    fully_shard(module, mesh=mesh.fsdp_mesh, reshard_after_forward=reshard, **options)
    _set_prefetching(units, config)


def _offload_policy(memory: MemoryConfig) -> OffloadPolicy:
    if not memory.sharded_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=memory.pin and torch.cuda.is_available())


def _set_prefetching(units: list[Any], config: ShardingConfig) -> None:
    """Configure each unit to prefetch the next one in the forward or backward pass."""
    for unit, next_unit in pairwise(units):
        if config.forward_prefetch:
            unit.set_modules_to_forward_prefetch([next_unit])
        if config.backward_prefetch == "pre":
            next_unit.set_modules_to_backward_prefetch([unit])


def load_local_shard(parameter: Tensor, tensor: Tensor) -> None:
    """Copy this rank's shard of a full tensor into the parameter."""
    if isinstance(parameter, DTensor):
        source = tensor.to(parameter.to_local().device, parameter.dtype)
        tensor = distribute_tensor(source, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(tensor)


@torch.no_grad()
def clip_dtensor_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Clip gradients, which may be DTensors on different meshes, to a common norm and return the norm before."""
    with_grad = [p for p in parameters if p.grad is not None]
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in with_grad:
        grad: Any = parameter.grad
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = [gather_full_tensor(torch.nn.utils.get_total_norm(grads)) for grads in by_mesh.values()]
    if not norms:
        return torch.zeros([])
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    for grads in by_mesh.values():
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(grads[0].device))
    return norm


class FsdpStrategy(_ShardedStrategy):
    """FSDP1: each unit's parameters are one flat tensor, of which a rank holds a shard."""

    def __init__(
        self,
        module: nn.Module,
        mesh: LearnerMesh,
        config: ShardingConfig,
        memory: MemoryConfig,
        dtypes: MixedPrecisionDtypes,
    ) -> None:
        super().__init__(module, mesh, config)
        self.module: Any = FullyShardedDataParallel(module, **_fsdp_options(module, mesh, config, memory, dtypes))

    def accumulate_gradients(self, *, last: bool) -> AbstractContextManager[object]:
        if last or self._sync_every_micro_batch:
            return nullcontext()
        no_sync: AbstractContextManager[object] = self.module.no_sync()
        return no_sync

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        norm: Tensor = self.module.clip_grad_norm_(max_norm)
        return norm

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `ParallelStrategy.full_weights`; units are gathered one after the other."""
        remaining = set(self._names)
        for prefix, unit in self._units():
            with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
                for name, parameter in unit.named_parameters(remove_duplicate=False):
                    full_name = parameter_name(prefix + name)
                    if full_name in remaining and not _belongs_to_inner_unit(unit, name):
                        remaining.discard(full_name)
                        yield full_name, parameter.detach().clone()

    def _units(self) -> list[tuple[str, nn.Module]]:
        return [
            (f"{name}." if name else "", part)
            for name, part in self.module.named_modules()
            if isinstance(part, FullyShardedDataParallel)
        ]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with FullyShardedDataParallel.summon_full_params(self.module, writeback=True):
            names = set(self._names)
            load_full_weights(self.module, ((name, tensor) for name, tensor in weights if name in names))


def _belongs_to_inner_unit(unit: nn.Module, name: str) -> bool:
    """Return whether a parameter belongs to a unit inside this one, or is a flat parameter."""
    if "_flat_param" in name:
        return True
    part: Any = unit
    for attribute in name.split(".")[:-1]:
        part = getattr(part, attribute)
        if isinstance(part, FullyShardedDataParallel):
            return True
    return False


def _process_groups(mesh: LearnerMesh, *, hybrid: bool) -> Any:
    """Return the sharding group, and for hybrid sharding the replication group. FSDP gets groups because with a
    submesh of a larger mesh its sharded state dict would contain the full state on every rank."""
    if not hybrid:
        return mesh.fsdp_mesh.get_group()
    return mesh.fsdp_mesh.get_group("fsdp"), mesh.fsdp_mesh.get_group("replicate")


def _fsdp_options(
    module: nn.Module, mesh: LearnerMesh, config: ShardingConfig, memory: MemoryConfig, dtypes: MixedPrecisionDtypes
) -> dict[str, Any]:
    hybrid = mesh.size("replicate") > 1
    unit_ids = set(map(id, fsdp_units(module, config.min_parameters)))
    policy: Callable[..., bool] = partial(lambda_auto_wrap_policy, lambda_fn=lambda part: id(part) in unit_ids)
    backward = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, None: None}
    requires_grad = {parameter.requires_grad for parameter in module.parameters()}
    device = next(module.parameters()).device
    has_value_head = any(VALUE_HEAD in name for name, _ in module.named_parameters())
    return {
        "process_group": _process_groups(mesh, hybrid=hybrid),
        "sharding_strategy": SHARDING_STRATEGIES[config.policy, hybrid],
        "auto_wrap_policy": policy,
        "mixed_precision": MixedPrecision(dtypes.parameters, dtypes.gradients, dtypes.buffers),
        # without a GPU there is nothing to offload, and FSDP would pin memory for a missing device
        "cpu_offload": CPUOffload(offload_params=memory.sharded_offload and device.type != "cpu"),
        "backward_prefetch": backward[config.backward_prefetch],
        "forward_prefetch": config.forward_prefetch,
        "limit_all_gathers": config.limit_all_gathers,
        # a flat parameter is trained as a whole, and adapters or a value head are trained otherwise than other weights
        "use_orig_params": config.keep_original_parameters or len(requires_grad) > 1 or has_value_head,
        "device_id": device,
    }
