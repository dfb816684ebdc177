"""The norm of gradients that lie in parts on different ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["NormPart", "clip_parts"]


@dataclass(frozen=True, slots=True)
class NormPart:
    """Parameters whose ranks hold different ones of a kind, and the groups of those ranks. A `DTensor` counts with
    all of it, so its own mesh isn't among them."""

    parameters: Sequence[nn.Parameter]
    groups: Sequence[Any] = ()


@torch.no_grad()
def clip_parts(parts: Sequence[NormPart], max_norm: float, copies: Iterable[nn.Parameter] = ()) -> Tensor:
    """Scale all gradients down to one global norm; gives the norm before, float32 [], the same on all ranks, all of
    which call this with as many parts. `copies` are scaled and don't count: another rank has them, too.
    """
    device = next((parameter.device for part in parts for parameter in part.parameters), torch.device("cpu"))
    norm = torch.stack([_square(part, device) for part in parts]).sum().sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in (*(p for part in parts for p in part.parameters), *copies):
        grad: Any = parameter.grad
        if grad is not None:
            (grad.to_local() if isinstance(grad, DTensor) else grad).mul_(factor)
    return norm


def _square(part: NormPart, device: torch.device) -> Tensor:
    """The squared norm of a part over all its ranks; not all of them need have some of it."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for parameter in part.parameters:
        grad: Any = parameter.grad
        if grad is not None:
            by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    norms = [_whole(nn.utils.get_total_norm(grads)).float() for grads in by_mesh.values()]
    square = torch.stack(norms).square().sum() if norms else torch.zeros([], device=device)
    for group in part.groups:
        dist.all_reduce(square, group=group)
    return square


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole
