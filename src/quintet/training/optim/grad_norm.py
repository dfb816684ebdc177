"""Gradient norm clipping when ranks hold different parameters (pipeline stages, experts)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quintet.policies.parallel.dtensor_shards import gather_full_tensor


@dataclass(frozen=True, slots=True)
class GradNormGroup:
    """Parameters, and the process groups over which their squared norms are summed. The norm of a `DTensor` already
    covers its own mesh."""

    parameters: Sequence[nn.Parameter]
    process_groups: Sequence[Any] = ()


@torch.no_grad()
def clip_grad_norm(groups: Sequence[GradNormGroup], max_norm: float, copies: Iterable[nn.Parameter] = ()) -> Tensor:
    """Clip all gradients to one global norm and return the norm before clipping, float32 [], equal on all ranks.
    All ranks must pass the same number of groups. `copies` are scaled without counting: another rank has them, too.
    """
    device = next((parameter.device for group in groups for parameter in group.parameters), torch.device("cpu"))
    norm = torch.stack([_squared_norm(group, device) for group in groups]).sum().sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in (*(p for group in groups for p in group.parameters), *copies):
        grad: Any = parameter.grad
        if grad is not None:
            (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(factor)
    return norm


def _squared_norm(group: GradNormGroup, device: torch.device) -> Tensor:
    """Return the squared norm of a group over all its ranks; a rank may have no gradients of it."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in group.parameters:
        grad: Any = parameter.grad
        if grad is not None:
            by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = [gather_full_tensor(nn.utils.get_total_norm(grads)).float() for grads in by_mesh.values()]
    square = torch.stack(norms).square().sum() if norms else torch.zeros([], device=device)
    for process_group in group.process_groups:
        dist.all_reduce(square, group=process_group)
    return square
