"""Access to the state of Megatron's optimizers: float32 weights and moments, in the shape of the parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn


def optimizer_parts(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers in a chained one: of dense weights, of experts."""
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def clip_grad_norm(optimizer: MegatronOptimizer, grad_norm: float) -> None:
    """Clip reduced gradients to the optimizer's `clip_grad` (0: no clipping); `grad_norm` is their norm."""
    for part in optimizer_parts(optimizer):
        parameters, max_norm = part.get_parameters(), part.config.clip_grad
        if parameters and max_norm > 0.0:
            clip_grad_by_total_norm_fp32(parameters, max_norm=max_norm, total_norm=grad_norm)


@dataclass(frozen=True, slots=True)
class _OptimizerEntry:
    """A parameter in one of this process's optimizers."""

    part: Any
    tensor: Tensor
    """The float32 weights that the optimizer updates: the parameter, a copy, or a shard of one of these."""
    start: int = 0
    """Offset of a shard in the flattened parameter."""

    def copy_shard(self, target: Tensor, full: Tensor) -> None:
        """Copy this shard of a full tensor into `target`."""
        flat = full.flatten()[self.start : self.start + self.tensor.numel()]
        target.copy_(flat.view_as(self.tensor))


class MegatronOptimizerState:
    """Reads and writes the state of parameters, which may be sharded over data-parallel ranks."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._distributed = [part for part in optimizer_parts(optimizer) if isinstance(part, DistributedOptimizer)]
        self._unsharded: dict[int, tuple[Any, Tensor]] = {}
        for part in optimizer_parts(optimizer):
            if part not in self._distributed:
                self._unsharded |= {id(parameter): (part, tensor) for parameter, tensor in _updated_tensors(part)}

    def full_tensor(self, parameter: nn.Parameter, name: str | None = None) -> Tensor:
        """Return the moment of this name, or without a name the float32 weights, in the parameter's shape; a collective
        over the ranks that shard it."""
        group, entry = self._shard_group(parameter), self._entry(parameter)
        if entry is None:
            local = None
        else:
            local = entry.tensor if name is None else entry.part.optimizer.state[entry.tensor][name]
        if group is None:
            return (parameter if local is None else local).detach().float()
        full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if local is not None and entry is not None:
            full[entry.start : entry.start + local.numel()] = local.detach().flatten()
        dist.all_reduce(full, group=group)
        return full.view_as(parameter)

    @torch.no_grad()
    def load_weights(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Copy a full tensor into the parameter and the optimizer's float32 copy of it."""
        parameter.copy_(full)
        entry = self._entry(parameter)
        if entry is not None:
            entry.copy_shard(entry.tensor.detach(), full)

    @torch.no_grad()
    def load_moments(self, parameter: nn.Parameter, moments: dict[str, Tensor], step: float) -> None:
        """Load this process's shards of the full moments after `step` optimizer steps."""
        entry = self._entry(parameter)
        if entry is None:
            return
        state: dict[str, Tensor] = {"step": torch.tensor(step)}
        for name, full in moments.items():
            state[name] = torch.zeros_like(entry.tensor, dtype=torch.float32, requires_grad=False)
            entry.copy_shard(state[name], full)
        entry.part.optimizer.state[entry.tensor] = state

    def _shard_group(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        """Return the ranks that shard the parameter's state; None if it is not sharded."""
        if not self._distributed or not parameter.requires_grad:
            return None
        is_expert = not getattr(parameter, "allreduce", True)
        part = self._distributed[-1] if is_expert else self._distributed[0]
        group: dist.ProcessGroup = part.data_parallel_group
        return group

    def _entry(self, parameter: nn.Parameter) -> _OptimizerEntry | None:
        for part in self._distributed:
            if parameter in part.model_param_group_index_map:
                group, index = part.model_param_group_index_map[parameter]
                span = part._get_model_param_range_map(parameter)["param"]
                return _OptimizerEntry(part, part.optimizer.param_groups[group]["params"][index], span.start)
        plain = self._unsharded.get(id(parameter))
        return None if plain is None else _OptimizerEntry(*plain)


def _updated_tensors(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parameters and the tensors that the optimizer updates: themselves, or a float32 copy."""
    for parameters, copies in zip(
        getattr(part, "float16_groups", []), getattr(part, "fp32_from_float16_groups", []), strict=True
    ):
        yield from zip(parameters, copies, strict=True)
    copied = {id(copy) for group in getattr(part, "fp32_from_float16_groups", []) for copy in group}
    for group in part.optimizer.param_groups:
        yield from ((tensor, tensor) for tensor in group["params"] if id(tensor) not in copied)
