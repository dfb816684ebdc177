"""Collectives through which gradients flow, for passes whose tokens, heads or vocabulary lie on several ranks.

Every rank of a group calls the same of them in the same order with tensors of equal shape. What each says of the way
back follows from how its result is used: a result that each rank uses in its own way gives a gradient to sum, one from
which all compute the same loss gives the same gradient everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

__all__ = ["collect", "exchange", "gather", "largest", "spread", "total"]


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""By the names that torch 2.13 gave them, or by those before."""


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, parts.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return exchange(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        out = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
        _all_gather(out, local.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0]
        out = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        _reduce_scatter(out, grad.contiguous(), group=ctx.group)
        return out, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, size: int, groups: tuple[ProcessGroup, ...]) -> Tensor:
        ctx.save_for_backward(places)
        out = values.new_zeros(size, *values.shape[1:])
        out[places] = values
        for group in groups:
            dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grads[0].index_select(0, places), None, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        out = part.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def exchange(parts: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all: part r of [ranks, …] goes to rank r, whose parts come back in the order of their senders."""
    out: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return out


def gather(local: Tensor, group: ProcessGroup) -> Tensor:
    """[n, …] of every rank end to end, [ranks · n, …]; each rank uses them in its own way."""
    out: Tensor = _Gather.apply(local, group)  # type: ignore[no-untyped-call]
    return out


def collect(values: Tensor, places: Tensor, size: int, groups: tuple[ProcessGroup, ...]) -> Tensor:
    """Rows [m, …] that belong at `places`, int64 [m], of a whole [size, …], whose other rows other ranks hold.

    All ranks go on to compute the same from the whole. A rank's gradient is that of its own rows alone, so what its
    parameters get of it is to be summed over the ranks.
    """
    out: Tensor = _Collect.apply(values, places, size, groups)  # type: ignore[no-untyped-call]
    return out


def total(part: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over ranks, from which all go on to compute the same."""
    out: Tensor = _Total.apply(part, group)  # type: ignore[no-untyped-call]
    return out


def spread(whole: Tensor, group: ProcessGroup) -> Tensor:
    """What all ranks hold alike and each uses in its own way."""
    out: Tensor = _Spread.apply(whole, group)  # type: ignore[no-untyped-call]
    return out


def largest(part: Tensor, group: ProcessGroup) -> Tensor:
    """The largest of each entry over ranks, without gradient."""
    out = part.detach().clone()
    dist.all_reduce(out, dist.ReduceOp.MAX, group=group)
    return out
