"""Log-probs and entropies of tokens from hidden states on a CPU, without the full matrix tokens × vocabulary.

Logits are computed in chunks that are overwritten in place: with probabilities in the forward pass, and in the backward
pass, which recomputes them, with gradients. Liger's fused linear cross-entropy (arXiv:2410.10989) computes the gradient
in the forward pass; a policy loss is only known after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quintet.kernels.training import TrainingKernels, training_kernels
from quintet.policies.output_head import OutputHead, mask_logits_

MAX_LOGITS_IN_MEMORY = 2**25
"""Size of a chunk of logits, tokens × vocabulary: 128 MiB in float32. If all logits fit into one chunk, they are saved
for the backward pass."""

_free_buffers: dict[torch.dtype, Tensor] = {}
"""The largest buffer of logits of each type that no pass uses. All passes share one: the allocator would put
activations where one was freed, so that the next pass would take further memory."""


def _take_logits(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return a buffer [rows, columns] with any content."""
    buffer, size = _free_buffers.pop(dtype, None), rows * columns
    if buffer is None or len(buffer) < size:
        with torch.inference_mode(mode=False):
            buffer = torch.empty(size, dtype=dtype)
    return buffer[:size].view(rows, columns)


def _release_logits(logits: Tensor) -> None:
    """Return the buffer of `logits` to the pool for the next pass."""
    whole = logits.as_strided((logits.untyped_storage().nbytes() // logits.element_size(),), (1,), 0)
    other = _free_buffers.get(logits.dtype)
    if other is None or len(other) < len(whole):
        _free_buffers[logits.dtype] = whole


def fused_token_statistics(
    head: object, hidden_states: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, ...] | None:
    """Return log-probs of `targets` [M], entropies and sums of squared probabilities (without gradient).

    From hidden states [M, hidden]; results are float32 [M], in nats. None if the head or device is not supported, or
    the kernels are not available.
    """
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    if (
        not isinstance(head, nn.Linear)
        or not _is_supported_head(head, dtype)
        or type(hidden_states) is not Tensor
        or hidden_states.device.type != "cpu"
    ):
        return None
    kernels = training_kernels(dtype)
    if kernels is None:
        return None
    weight = head.weight
    if isinstance(head, OutputHead):
        temperature /= head.transform.scale
    with torch.autocast("cpu", enabled=False):
        statistics: tuple[Tensor, ...] = _FusedStatistics.apply(  # type: ignore[no-untyped-call]
            kernels, hidden_states.to(dtype), weight, head, targets, temperature, torch.is_grad_enabled()
        )
    return statistics


def _is_supported_head(head: nn.Linear, dtype: torch.dtype) -> bool:
    """Return whether the head is a linear layer without bias, soft cap and hooks, whose weights are float32, or were
    gathered by FSDP in `dtype`, the type of matrix products."""
    if type(head) not in (nn.Linear, OutputHead) or head.bias is not None:
        return False
    if isinstance(head, OutputHead) and (head.transform.softcap is not None or head.transform.scale <= 0):
        return False
    has_hooks = head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks
    weight = head.weight
    is_plain_weight = (
        type(weight) in (nn.Parameter, Tensor) and weight.dtype in (torch.float32, dtype) and weight.is_contiguous()
    )
    return is_plain_weight and not has_hooks and "forward" not in vars(head) and weight.device.type == "cpu"


class _FusedStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: TrainingKernels,
        hidden_states: Tensor,
        weight: Tensor,
        head: nn.Linear,
        targets: Tensor,
        temperature: float,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        weight_cast, chunk_size = weight.to(kernels.dtype), max(1, MAX_LOGITS_IN_MEMORY // len(weight))
        outputs = tuple(torch.empty(len(hidden_states)) for _ in range(4))
        logits = _take_logits(min(chunk_size, len(hidden_states)), len(weight), kernels.dtype)
        for start in range(0, len(hidden_states), chunk_size):
            part = slice(start, start + chunk_size)
            chunk = torch.mm(hidden_states[part], weight_cast.t(), out=logits[: len(hidden_states[part])])
            mask_logits_(head, chunk)
            kernels.token_statistics(chunk, temperature, targets[part], [output[part] for output in outputs])
        logprobs, entropy, log_sums, squares = outputs
        ctx.kernels, ctx.temperature, ctx.head = kernels, temperature, head
        ctx.saved_logits = logits if needs_grad and len(logits) == len(hidden_states) else None
        if ctx.saved_logits is None:
            _release_logits(logits)
        ctx.save_for_backward(hidden_states, weight_cast, targets, log_sums, entropy)
        ctx.mark_non_differentiable(squares)
        return logprobs, entropy, squares

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor, _: Tensor) -> tuple[Any, ...]:
        hidden_states, weight_cast, targets, log_sums, entropy = ctx.saved_tensors
        # overwritten below; a second backward pass recomputes them
        saved_logits, ctx.saved_logits = ctx.saved_logits, None
        chunk_size = max(1, MAX_LOGITS_IN_MEMORY // len(weight_cast))
        grad_hidden, grad_weight = torch.empty_like(hidden_states), torch.zeros(weight_cast.shape)
        logits = (
            _take_logits(min(chunk_size, len(hidden_states)), len(weight_cast), hidden_states.dtype)
            if saved_logits is None
            else saved_logits
        )
        for start in range(0, len(hidden_states), chunk_size):
            part = slice(start, start + chunk_size)
            chunk = logits[: len(hidden_states[part])]
            if saved_logits is None:
                torch.mm(hidden_states[part], weight_cast.t(), out=chunk)
                mask_logits_(ctx.head, chunk)
            grads = (grad_logprobs[part].contiguous(), grad_entropy[part].contiguous())
            ctx.kernels.token_statistics_backward(
                chunk, ctx.temperature, targets[part], log_sums[part], entropy[part], *grads
            )
            torch.mm(chunk, weight_cast, out=grad_hidden[part])
            _add_product(ctx.kernels, grad_weight, chunk, hidden_states[part])
        _release_logits(logits)
        return None, grad_hidden, grad_weight, None, None, None, None


def _add_product(kernels: TrainingKernels, accumulator: Tensor, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ · right, for [m, out] and [m, in], to float32 [out, in]."""
    if left.dtype is torch.float32:
        accumulator.addmm_(left.t(), right)
    else:
        accumulator.add_(kernels.weight_gradient(left, right))
