"""Weights cut up among ranks by torch's FSDP2 (`fully_shard`) or FSDP, and fetched layer by layer by each pass."""

from __future__ import annotations

import logging
import warnings
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
from quintet.training.lay import TYPES, Lay, OnePass, Whole, cast_buffers, own_name, take_weights
from quintet.training.mesh import Mesh
from quintet.training.norms import NormPart, clip_parts
from quintet.training.splitting import Shared
from quintet.training.staged import Staged

__all__ = ["FlatShards", "Shards", "clip_spread", "lay_out", "put_whole", "units", "whole_tensor"]

STRATEGIES = {
    ("full_shard", False): ShardingStrategy.FULL_SHARD,
    ("full_shard", True): ShardingStrategy.HYBRID_SHARD,
    ("hybrid_shard", False): ShardingStrategy.FULL_SHARD,
    ("hybrid_shard", True): ShardingStrategy.HYBRID_SHARD,
    ("shard_grad_op", False): ShardingStrategy.SHARD_GRAD_OP,
    ("shard_grad_op", True): ShardingStrategy._HYBRID_SHARD_ZERO2,
}
"""By the policy's name and whether there are several groups."""


@dataclass(frozen=True, slots=True)
class Types:
    """Of weights while they are computed with, of gradients while they are summed, and of buffers."""

    parameters: torch.dtype
    gradients: torch.dtype
    buffers: torch.dtype

    @classmethod
    def of(cls, config: ShardingConfig, dtype: torch.dtype) -> Types:
        """As the configuration has them for a policy of that type."""
        parameters = TYPES[config.parameter_dtype] if config.parameter_dtype else dtype
        gradients = TYPES[config.reduce_dtype] if config.reduce_dtype else parameters
        return cls(parameters, gradients, TYPES[config.buffer_dtype])


def lay_out(
    module: nn.Module,
    backend: str,
    mesh: Mesh,
    config: ShardingConfig,
    memory: MemoryConfig,
    dtype: torch.dtype = torch.float32,
    shared: Shared | None = None,
) -> Lay:
    """The module's weights as the configuration wants them over the mesh. Every rank brings the same weights; what
    was `shared` out before lies on different ranks already. What the backend doesn't have was refused before
    (`config/layouts.py`).
    """
    shared = shared or Shared()
    if mesh.devices is None or config.policy == "no_shard":
        return Whole.of(module, config, mesh.copies)
    if isinstance(module, PolicyModule):
        module.keeps_head = False
    types = Types.of(config, dtype)
    cast_buffers(module, types.buffers)
    if backend == "fsdp":
        return FlatShards(module, mesh, config, memory, types)
    shards = Shards(module, mesh, config, memory, types, shared)
    return Staged(shards, shared.pipeline, shards.norm_parts) if shared.pipeline else shards


def units(module: nn.Module, min_parameters: int = 0) -> list[nn.Module]:
    """Modules that are fetched as one: the decoder's layers, or, from the inside out, every module that has at least
    `min_parameters` of which none is a unit's already. Weights that several modules have in common belong to none."""
    if min_parameters == 0:
        return _layers(module)
    shared = _shared_parameters(module)
    found: list[nn.Module] = []
    _collect(module, min_parameters, shared, found)
    return [unit for unit in found if unit is not module]


def _layers(module: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in module.modules() if isinstance(part, GradientCheckpointingLayer)]


def _shared_parameters(module: nn.Module) -> set[nn.Parameter]:
    owners: dict[nn.Parameter, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners[parameter] = owners.get(parameter, 0) + 1
    return {parameter for parameter, count in owners.items() if count > 1}


def _collect(module: nn.Module, least: int, shared: set[nn.Parameter], found: list[nn.Module]) -> set[nn.Parameter]:
    """Parameters below the module that no unit has yet."""
    free = set(module.parameters(recurse=False))
    for child in module.children():
        free |= _collect(child, least, shared, found)
    if sum(p.numel() for p in free) < least or free & shared or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return free
    found.append(module)
    return set()


class Shards(OnePass):
    """FSDP2: each parameter is a `DTensor` of which a rank holds some rows."""

    even = True

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        config: ShardingConfig,
        memory: MemoryConfig,
        types: Types,
        shared: Shared,
    ) -> None:
        """See `lay_out`."""
        self.module: Any = module
        self.factor = float(mesh.copies.size)
        self._sync = config.sync_every_micro_batch
        self._device = next(module.parameters()).device
        self._names = [own_name(name) for name, _ in module.named_parameters()]
        self._experts = shared.experts
        _fully_shard(module, mesh, config, memory, types, shared)

    @property
    def device(self) -> torch.device:
        """See `Lay.device`; parts that are offloaded lie elsewhere."""
        return self._device

    def parameters(self) -> list[nn.Parameter]:
        """See `Lay.parameters`."""
        return list(self.module.parameters())

    def accumulate(self, *, last: bool) -> AbstractContextManager[object]:
        """See `Lay.accumulate`."""
        self.module.set_is_last_backward(last)
        self.module.set_requires_gradient_sync(last or self._sync)
        return nullcontext()

    def finish(self) -> None:
        """See `Lay.finish`; FSDP2 sums in the last backward pass."""

    def clip(self, max_norm: float) -> Tensor:
        """See `Lay.clip`."""
        return clip_parts(self.norm_parts(), max_norm) if self._experts else clip_spread(self.parameters(), max_norm)

    def norm_parts(self) -> list[NormPart]:
        """What the gradients' norm is of: experts lie on other ranks than the rest."""
        if self._experts is None:
            return [NormPart(self.parameters())]
        rest = [parameter for parameter in self.parameters() if not self._experts.holds(parameter)]
        return [NormPart(rest), NormPart(self._experts.parameters, [self._experts.group])]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Lay.weights`."""
        for name, parameter in zip(self._names, self.module.parameters(), strict=True):
            if self._experts and self._experts.holds(parameter):
                yield name, self._experts.whole(parameter)
            else:
                yield name, whole_tensor(parameter.detach())

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Lay.load`."""
        own = dict(zip(self._names, self.module.parameters(), strict=True))
        for name, tensor in weights:
            if name in own:
                shared = self._experts is not None and self._experts.holds(own[name])
                put_whole(own[name], self._experts.own(tensor) if self._experts and shared else tensor)


def _fully_shard(
    module: nn.Module, mesh: Mesh, config: ShardingConfig, memory: MemoryConfig, types: Types, shared: Shared
) -> None:
    # nothing is done in place with what a pass gives, of which torch warns in every run
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # with layers split over devices, too, norms and weights come together in two rounds: the same on all ranks, each
    # of which would tell people that it might not be
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    reshard = False if config.policy == "shard_grad_op" else config.reshard_after_forward
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(types.parameters, types.gradients),
        "offload_policy": _offload_policy(memory),
    }
    within = options | {"reshard_after_forward": True if reshard is None else reshard}
    if shared.experts and shared.same_experts:
        shared.experts.shard(shared.same_experts, mesh.copies.size, **within)
    parts = [part for part in units(module, config.min_parameters) if not isinstance(part, FSDPModule)]
    for part in parts:
        fully_shard(part, mesh=mesh.weights, **within)
    fully_shard(module, mesh=mesh.weights, reshard_after_forward=reshard, **options)
    _prefetch(parts, config)


def _offload_policy(memory: MemoryConfig) -> OffloadPolicy:
    if not memory.sharded_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=memory.pin and torch.cuda.is_available())


def _prefetch(parts: list[Any], config: ShardingConfig) -> None:
    """Have each unit fetch the one that follows it, going forward or back."""
    for this, following in pairwise(parts):
        if config.forward_prefetch:
            this.set_modules_to_forward_prefetch([following])
        if config.backward_prefetch == "pre":
            following.set_modules_to_backward_prefetch([this])


def whole_tensor(tensor: Tensor) -> Tensor:
    """All of it, on every rank; all call this."""
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


def put_whole(parameter: Tensor, tensor: Tensor) -> None:
    """Take this rank's part of the whole tensor."""
    if isinstance(parameter, DTensor):
        given = tensor.to(parameter.to_local().device, parameter.dtype)
        tensor = distribute_tensor(given, parameter.device_mesh, parameter.placements, src_data_rank=None)
    parameter.copy_(tensor)


@torch.no_grad()
def clip_spread(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients, some of them spread over different meshes, down to a common norm; gives the norm before."""
    held = [p for p in parameters if p.grad is not None]
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in held:
        grad: Any = parameter.grad
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = [whole_tensor(torch.nn.utils.get_total_norm(grads)) for grads in by_mesh.values()]
    if not norms:
        return torch.zeros([])
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    for grads in by_mesh.values():
        torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(grads[0].device))
    return norm


class FlatShards(OnePass):
    """FSDP: each unit's parameters are one flat tensor of which a rank holds a piece."""

    even = True

    def __init__(
        self, module: nn.Module, mesh: Mesh, config: ShardingConfig, memory: MemoryConfig, types: Types
    ) -> None:
        """See `lay_out`."""
        self.factor = float(mesh.copies.size)
        self._sync = config.sync_every_micro_batch
        self._device = next(module.parameters()).device
        self._names = {own_name(name) for name, _ in module.named_parameters()}
        self.module: Any = FullyShardedDataParallel(module, **_flat_options(module, mesh, config, memory, types))

    @property
    def device(self) -> torch.device:
        """See `Lay.device`; parts that are offloaded lie elsewhere."""
        return self._device

    def parameters(self) -> list[nn.Parameter]:
        """See `Lay.parameters`."""
        return list(self.module.parameters())

    def accumulate(self, *, last: bool) -> AbstractContextManager[object]:
        """See `Lay.accumulate`."""
        held: AbstractContextManager[object] = nullcontext() if last or self._sync else self.module.no_sync()
        return held

    def finish(self) -> None:
        """See `Lay.finish`; FSDP sums in the last backward pass."""

    def clip(self, max_norm: float) -> Tensor:
        """See `Lay.clip`."""
        norm: Tensor = self.module.clip_grad_norm_(max_norm)
        return norm

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Lay.weights`: one unit after the other."""
        left = set(self._names)
        for prefix, unit in self._units():
            with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
                for name, parameter in unit.named_parameters(remove_duplicate=False):
                    own = own_name(prefix + name)
                    if own in left and not _is_inside(unit, name):
                        left.discard(own)
                        yield own, parameter.detach().clone()

    def _units(self) -> list[tuple[str, nn.Module]]:
        found = [
            (name, part) for name, part in self.module.named_modules() if isinstance(part, FullyShardedDataParallel)
        ]
        return [(f"{name}." if name else "", part) for name, part in found]

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Lay.load`."""
        with FullyShardedDataParallel.summon_full_params(self.module, writeback=True):
            take_weights(self.module, ((name, tensor) for name, tensor in weights if name in self._names))


def _is_inside(unit: nn.Module, name: str) -> bool:
    """Whether a parameter of that name belongs to a unit within this one, or is flat itself."""
    if "_flat_param" in name:
        return True
    way = name.split(".")[:-1]
    part: Any = unit
    for step in way:
        part = getattr(part, step)
        if isinstance(part, FullyShardedDataParallel):
            return True
    return False


def _groups(mesh: Mesh, *, several: bool) -> Any:
    """Who shares one copy of the weights, and where there are several copies who has the same part of each. Given a
    mesh that is part of a larger one, FSDP's sharded state would be whole in every rank."""
    shared = mesh.weights.get_group("weights") if several else mesh.weights.get_group()
    return (shared, mesh.weights.get_group("replicate")) if several else shared


def _flat_options(
    module: nn.Module, mesh: Mesh, config: ShardingConfig, memory: MemoryConfig, types: Types
) -> dict[str, Any]:
    several = mesh.size("replicate") > 1
    inside = set(map(id, units(module, config.min_parameters)))
    policy: Callable[..., bool] = partial(lambda_auto_wrap_policy, lambda_fn=lambda part: id(part) in inside)
    backward = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, None: None}
    learnt = {parameter.requires_grad for parameter in module.parameters()}
    device = next(module.parameters()).device
    return {
        "process_group": _groups(mesh, several=several),
        "sharding_strategy": STRATEGIES[config.policy, several],
        "auto_wrap_policy": policy,
        "mixed_precision": MixedPrecision(types.parameters, types.gradients, types.buffers),
        # on a CPU they are there as it is, and FSDP would pin them for a device that isn't
        "cpu_offload": CPUOffload(offload_params=memory.sharded_offload and device.type != "cpu"),
        "backward_prefetch": backward[config.backward_prefetch],
        "forward_prefetch": config.forward_prefetch,
        "limit_all_gathers": config.limit_all_gathers,
        # flat tensors can't be learnt in part: adapters beside weights that stay keep their own
        "use_orig_params": config.keep_original_parameters or len(learnt) > 1,
        "device_id": device,
    }
