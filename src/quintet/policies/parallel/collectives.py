"""Differentiable collectives, for passes whose tokens, heads or vocabulary are distributed over ranks.

Every rank of a group makes the same calls in the same order with tensors of equal shape. The backward pass depends on
the use of the result: if ranks use it differently, gradients are summed; if all ranks compute the same loss from it,
they get the same gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""`*_single` are the names since torch 2.13."""


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunks: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(chunks, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, chunks.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grads[0], ctx.group), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        out = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
        _all_gather_into(out, local.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0]
        out = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        _reduce_scatter_into(out, grad.contiguous(), group=ctx.group)
        return out, None


class _ScatterAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, size: int, groups: tuple[ProcessGroup, ...]) -> Tensor:
        ctx.save_for_backward(indices)
        out = values.new_zeros(size, *values.shape[1:])
        out[indices] = values
        for group in groups:
            dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (indices,) = ctx.saved_tensors
        return grads[0].index_select(0, indices), None, None, None


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: ProcessGroup) -> Tensor:
        out = local.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def all_to_all(chunks: Tensor, group: ProcessGroup) -> Tensor:
    """Send chunk r of [ranks, …] to rank r and return the received chunks in the order of their senders."""
    out: Tensor = _AllToAll.apply(chunks, group)  # type: ignore[no-untyped-call]
    return out


def all_gather(local: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate the ranks' [n, …] to [ranks · n, …]; ranks may use the result differently."""
    out: Tensor = _AllGather.apply(local, group)  # type: ignore[no-untyped-call]
    return out


def scatter_all_reduce(values: Tensor, indices: Tensor, size: int, groups: tuple[ProcessGroup, ...]) -> Tensor:
    """Combine the ranks' rows [m, …] at `indices` int64 [m] to one tensor [size, …].

    All ranks must compute the same from the result. A rank's gradient is that of its own rows only, so the gradients of
    parameters must be summed over the ranks.
    """
    out: Tensor = _ScatterAllReduce.apply(values, indices, size, groups)  # type: ignore[no-untyped-call]
    return out


def all_reduce_sum(local: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over ranks, from which all ranks must compute the same."""
    out: Tensor = _AllReduceSum.apply(local, group)  # type: ignore[no-untyped-call]
    return out


def copy_to_group(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return `values`, equal on all ranks, for different uses on each rank: the gradient is summed over ranks."""
    out: Tensor = _CopyToGroup.apply(values, group)  # type: ignore[no-untyped-call]
    return out


def all_reduce_max(local: Tensor, group: ProcessGroup) -> Tensor:
    """Return the elementwise maximum over ranks, without gradient."""
    out = local.detach().clone()
    dist.all_reduce(out, dist.ReduceOp.MAX, group=group)
    return out
