"""Megatron's optimizers from outside: each parameter's float32 copy and its moments, as large as the parameter."""

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

__all__ = ["Moments", "chained", "clip"]


def chained(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that one is made of: of dense weights, of experts."""
    parts: list[Any] = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def clip(optimizer: MegatronOptimizer, norm: float) -> None:
    """Scale ready gradients down as the optimizer's `clip_grad` says; 0 leaves them."""
    for part in chained(optimizer):
        parameters, limit = part.get_parameters(), part.config.clip_grad
        if parameters and limit > 0.0:
            clip_grad_by_total_norm_fp32(parameters, max_norm=limit, total_norm=norm)


@dataclass(frozen=True, slots=True)
class _Held:
    """What one of the optimizers here knows of a parameter."""

    part: Any
    tensor: Tensor
    """The float32 weights that it updates: the parameter itself, a copy, or a share of one of these."""
    start: int = 0
    """Where a share begins, in the parameter laid flat."""
    shared: bool = False

    def put(self, target: Tensor, whole: Tensor) -> None:
        """Into `target`, as large as the share, what of the whole belongs there."""
        flat = whole.flatten()[self.start : self.start + self.tensor.numel()]
        target.copy_(flat.view_as(self.tensor))


class Moments:
    """Which of Megatron's optimizers holds a parameter's state, and which part of it lies in this process."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._distributed = [part for part in chained(optimizer) if isinstance(part, DistributedOptimizer)]
        self._plain: dict[int, tuple[Any, Tensor]] = {}
        for part in chained(optimizer):
            if part not in self._distributed:
                self._plain |= {id(parameter): (part, tensor) for parameter, tensor in _pairs(part)}

    def whole(self, parameter: nn.Parameter, name: str | None = None) -> Tensor:
        """The moment of that name, or without one the float32 weights, as large as the parameter; a collective over
        the ranks that share it out."""
        group, held = self._group(parameter), self._held(parameter)
        own = None if held is None else held.tensor if name is None else held.part.optimizer.state[held.tensor][name]
        if group is None:
            return (parameter if own is None else own).detach().float()
        full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if own is not None and held is not None:
            full[held.start : held.start + own.numel()] = own.detach().flatten()
        dist.all_reduce(full, group=group)
        return full.view_as(parameter)

    @torch.no_grad()
    def put_weights(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Into the parameter and into the optimizer's float32 copy of it."""
        parameter.copy_(whole)
        held = self._held(parameter)
        if held is not None:
            held.put(held.tensor.detach(), whole)

    @torch.no_grad()
    def put_moments(self, parameter: nn.Parameter, moments: dict[str, Tensor], step: float) -> None:
        """What of them belongs in this process; `step` optimizer steps were made."""
        held = self._held(parameter)
        if held is None:
            return
        state: dict[str, Tensor] = {"step": torch.tensor(step)}
        for name, whole in moments.items():
            state[name] = torch.zeros_like(held.tensor, dtype=torch.float32, requires_grad=False)
            held.put(state[name], whole)
        held.part.optimizer.state[held.tensor] = state

    def _group(self, parameter: nn.Parameter) -> dist.ProcessGroup | None:
        """Those among whom the parameter's state is shared out; None where it isn't."""
        if not self._distributed or not parameter.requires_grad:
            return None
        expert = not getattr(parameter, "allreduce", True)
        part = self._distributed[-1] if expert else self._distributed[0]
        group: dist.ProcessGroup = part.data_parallel_group
        return group

    def _held(self, parameter: nn.Parameter) -> _Held | None:
        for part in self._distributed:
            if parameter in part.model_param_group_index_map:
                group, place = part.model_param_group_index_map[parameter]
                span = part._get_model_param_range_map(parameter)["param"]
                return _Held(part, part.optimizer.param_groups[group]["params"][place], span.start, shared=True)
        found = self._plain.get(id(parameter))
        return None if found is None else _Held(*found)


def _pairs(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters and what the optimizer updates in their place: themselves, or a float32 copy."""
    for ours, copies in zip(
        getattr(part, "float16_groups", []), getattr(part, "fp32_from_float16_groups", []), strict=True
    ):
        yield from zip(ours, copies, strict=True)
    copied = {id(copy) for group in getattr(part, "fp32_from_float16_groups", []) for copy in group}
    for group in part.optimizer.param_groups:
        yield from ((tensor, tensor) for tensor in group["params"] if id(tensor) not in copied)
