"""Log-probs and entropies of tokens straight from hidden states on a CPU, without the matrix tokens × vocabulary.

Logits are made for some tokens at a time and used up where they lie: by the forward pass for what is measured, by the
backward pass, which makes them again, for the gradient (as Liger's fused linear cross-entropy, arXiv:2410.10989, which
knows the gradient in the forward pass already; that of a policy's loss is known only behind it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quintet.kernels.training import TrainingKernels, training_kernels

__all__ = ["LOGITS_AT_ONCE", "token_scores"]

LOGITS_AT_ONCE = 2**25
"""Logits that are held at a time, places × vocabulary: 128 MiB in float32. Where they are no more than that altogether,
they are kept for the backward pass."""


def token_scores(head: object, hidden: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, ...] | None:
    """Of hidden states [M, hidden]: log-probs of `targets` [M], entropies, and sums of squared probabilities without
    gradient, float32 [M] each, nats; None where the head itself must be asked, or there are no kernels."""
    if (
        not isinstance(head, nn.Linear)
        or not _is_plain(head)
        or type(hidden) is not Tensor
        or hidden.device.type != "cpu"
    ):
        return None
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    kernels = training_kernels(dtype)
    if kernels is None:
        return None
    weight = head.weight
    with torch.autocast("cpu", enabled=False):
        found: tuple[Tensor, ...] = _Scores.apply(  # type: ignore[no-untyped-call]
            kernels, hidden.to(dtype), weight, targets, temperature, torch.is_grad_enabled()
        )
    return found


def _is_plain(head: nn.Linear) -> bool:
    """A linear layer without a bias, in float32, and nobody hooked into it."""
    if type(head) is not nn.Linear or head.bias is not None:
        return False
    hooked = head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks
    weight = head.weight
    plain = type(weight) in (nn.Parameter, Tensor) and weight.dtype is torch.float32 and weight.is_contiguous()
    return plain and not hooked and "forward" not in vars(head) and weight.device.type == "cpu"


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: TrainingKernels,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        learns: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        cast, places = weight.to(kernels.dtype), max(1, LOGITS_AT_ONCE // len(weight))
        measures = tuple(torch.empty(len(hidden)) for _ in range(4))
        logits = hidden.new_empty(min(places, len(hidden)), len(weight))
        for start in range(0, len(hidden), places):
            part = slice(start, start + places)
            some = torch.mm(hidden[part], cast.t(), out=logits[: len(hidden[part])])
            kernels.measure(some, temperature, targets[part], [measure[part] for measure in measures])
        logprobs, entropy, sums, squares = measures
        ctx.kernels, ctx.temperature = kernels, temperature
        ctx.kept = logits if learns and len(logits) == len(hidden) else None
        ctx.save_for_backward(hidden, cast, targets, sums, entropy)
        ctx.mark_non_differentiable(squares)
        return logprobs, entropy, squares

    @staticmethod
    def backward(ctx: Any, by_logprobs: Tensor, by_entropy: Tensor, _: Tensor) -> tuple[Any, ...]:
        hidden, cast, targets, sums, entropy = ctx.saved_tensors
        # used up here; a second time they are made again
        kept, ctx.kept = ctx.kept, None
        places = max(1, LOGITS_AT_ONCE // len(cast))
        by_hidden, by_weight = torch.empty_like(hidden), torch.zeros(cast.shape)
        logits = hidden.new_empty(min(places, len(hidden)), len(cast)) if kept is None else kept
        for start in range(0, len(hidden), places):
            part = slice(start, start + places)
            some = logits[: len(hidden[part])]
            if kept is None:
                torch.mm(hidden[part], cast.t(), out=some)
            grads = (by_logprobs[part].contiguous(), by_entropy[part].contiguous())
            ctx.kernels.measure_back(some, ctx.temperature, targets[part], sums[part], entropy[part], *grads)
            torch.mm(some, cast, out=by_hidden[part])
            _add_product(ctx.kernels, by_weight, some, hidden[part])
        return None, by_hidden, by_weight, None, None, None


def _add_product(kernels: TrainingKernels, total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ · right, of [m, out] and [m, in], to float32 [out, in]."""
    if left.dtype is torch.float32:
        total.addmm_(left.t(), right)
    else:
        total.add_(kernels.product(left, right))
