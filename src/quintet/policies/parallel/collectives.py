"""Differentiable collectives, for passes whose tokens, heads or vocabulary are distributed over ranks.

Every rank of a group makes the same calls in the same order with tensors of equal shape. The backward pass depends on
the use of the result: if ranks use it differently, gradients are summed; if all ranks compute the same loss from it,
they get the same gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

TensorFn = Callable[[Tensor], Tensor]
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""`*_single` are the names since torch 2.13."""


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, run: TensorFn, gradient: TensorFn) -> Tensor:
        ctx.gradient = gradient
        return run(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(grads[0]), None, None


def differentiable(values: Tensor, run: TensorFn, gradient: TensorFn) -> Tensor:
    """Return `run(values)`, with `gradient(grad)` as the gradient of `values`."""
    out: Tensor = _Collective.apply(values, run, gradient)  # type: ignore[no-untyped-call]
    return out


def all_to_all(chunks: Tensor, group: ProcessGroup) -> Tensor:
    """Send chunk r of [ranks, …] to rank r and return the received chunks in the order of their senders."""

    def exchange(values: Tensor) -> Tensor:
        out = torch.empty_like(values, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, values.contiguous(), group=group)
        return out

    return differentiable(chunks, exchange, exchange)


def all_gather(local: Tensor, group: ProcessGroup) -> Tensor:
    """Concatenate the ranks' [n, …] to [ranks · n, …]; ranks may use the result differently."""

    def gather(values: Tensor) -> Tensor:
        out = values.new_empty(group.size() * values.shape[0], *values.shape[1:])
        _all_gather_into(out, values.contiguous(), group=group)
        return out

    def reduce_scatter(grad: Tensor) -> Tensor:
        out = grad.new_empty(grad.shape[0] // group.size(), *grad.shape[1:])
        _reduce_scatter_into(out, grad.contiguous(), group=group)
        return out

    return differentiable(local, gather, reduce_scatter)


def scatter_all_reduce(values: Tensor, indices: Tensor, size: int, groups: tuple[ProcessGroup, ...]) -> Tensor:
    """Combine the ranks' rows [m, …] at `indices` int64 [m] to one tensor [size, …].

    All ranks must compute the same from the result. A rank's gradient is that of its own rows only, so the gradients of
    parameters must be summed over the ranks.
    """

    def combine(rows: Tensor) -> Tensor:
        out = rows.new_zeros(size, *rows.shape[1:])
        out[indices] = rows
        for group in groups:
            dist.all_reduce(out, group=group)
        return out

    return differentiable(values, combine, lambda grad: grad.index_select(0, indices))


def all_reduce_sum(local: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum over ranks, from which all ranks must compute the same."""
    return differentiable(local, partial(_all_reduced, group=group), lambda grad: grad)


def copy_to_group(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return `values`, equal on all ranks, for different uses on each rank: the gradient is summed over ranks."""
    return differentiable(values, lambda same: same.view_as(same), partial(_all_reduced, group=group))


def all_reduce_max(local: Tensor, group: ProcessGroup) -> Tensor:
    """Return the elementwise maximum over ranks, without gradient."""
    return _all_reduced(local.detach(), group, dist.ReduceOp.MAX)


def _all_reduced(values: Tensor, group: ProcessGroup, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    out = values.clone()
    dist.all_reduce(out, operation, group=group)
    return out
