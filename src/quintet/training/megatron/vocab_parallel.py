"""Log-probs from logits that are sharded over the vocabulary by tensor parallelism.

Each rank sums over its slice of the vocabulary, and an all-reduce adds the slices: no rank has logits of the full
vocabulary. The cross-entropy is that of Megatron-LM (Shoeybi et al. 2019, section 3); entropy and divergence are
computed in the same way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from quintet.policies.fused_log_probs import MAX_LOGITS_IN_MEMORY
from quintet.policies.token_statistics import TokenStatistics

Head = Callable[[Tensor], Tensor]
"""Function from hidden states [m, hidden] to this rank's logits [m, slice], without vocabulary padding."""


def log_distribution(logits: Tensor) -> Tensor:
    """Return this rank's slice of the log-softmax over the full vocabulary, float32 [m, slice]."""
    largest = logits.detach().max(-1).values if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    shifted = logits - largest[:, None]
    total = reduce_from_tensor_model_parallel_region(shifted.exp().sum(-1))
    log_probs: Tensor = shifted - copy_to_tensor_model_parallel_region(total.log())[:, None]
    return log_probs


def compute_token_statistics(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    tokens: range,
    *,
    temperature: float = 1.0,
    other: tuple[Tensor, Head] | None = None,
    swapped: bool = False,
    with_sum_squared_probs: bool = False,
) -> TokenStatistics:
    """Return the statistics of `quintet.policies.token_statistics.compute_token_statistics` from hidden states
    [M, hidden], equal on all tensor-parallel ranks. `tokens` are the token ids of this rank's slice, `other` hidden
    states and head of another model with the same slices."""
    width = max(1, MAX_LOGITS_IN_MEMORY // max(1, len(tokens)))

    def compute(start: int) -> tuple[Tensor, ...]:
        part = slice(start, start + width)
        log_probs = log_distribution(head(hidden[part]).float() / temperature)
        reference = None
        if other is not None:
            with torch.no_grad():
                reference = log_distribution(other[1](other[0][part]).float() / temperature)
        return _statistics(
            log_probs,
            targets[part] - tokens.start,
            reference,
            swapped=swapped,
            with_sum_squared_probs=with_sum_squared_probs,
        )

    starts = range(0, len(hidden), width)
    if len(starts) <= 1:
        return TokenStatistics(*compute(0))
    if torch.is_grad_enabled():
        parts = [checkpoint(compute, start, use_reentrant=False, preserve_rng_state=False) for start in starts]
    else:
        parts = [compute(start) for start in starts]
    return TokenStatistics(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _statistics(
    log_probs: Tensor, targets: Tensor, other: Tensor | None, *, swapped: bool, with_sum_squared_probs: bool
) -> tuple[Tensor, ...]:
    """Return the fields of `TokenStatistics` from the log-probs of this rank's slice, [m, slice]; `targets` are
    relative to the slice's first token."""
    size = log_probs.shape[-1]
    is_local = (targets >= 0) & (targets < size)
    chosen = (
        log_probs.gather(-1, targets.clamp(0, max(size - 1, 0))[:, None]).squeeze(-1) if size else log_probs.sum(-1)
    )
    probs = log_probs.exp()
    logprobs = reduce_from_tensor_model_parallel_region(chosen.where(is_local, 0.0))
    entropy = reduce_from_tensor_model_parallel_region(-(probs * log_probs).sum(-1))
    divergence = squared = torch.zeros_like(entropy)
    if other is not None:
        terms = other.exp() * (other - log_probs) if swapped else probs * (log_probs - other)
        divergence = reduce_from_tensor_model_parallel_region(terms.sum(-1))
    if with_sum_squared_probs:
        squared = reduce_from_tensor_model_parallel_region(probs.detach().square().sum(-1))
    return logprobs, entropy, divergence, squared
