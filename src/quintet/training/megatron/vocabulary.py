"""Log-probabilities from logits of which each tensor-parallel rank holds a slice of the vocabulary.

Sums over the vocabulary are made slice by slice and added up over ranks: no rank ever holds a whole row. The
cross-entropy is that of Megatron-LM (Shoeybi et al. 2019, section 3); entropy and divergence are summed the same way.
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

from quintet.policies.causal_lm import TokenMeasures
from quintet.policies.token_scores import LOGITS_AT_ONCE

__all__ = ["Head", "log_distribution", "measure_tokens"]

Head = Callable[[Tensor], Tensor]
"""Hidden states [m, hidden] to this rank's logits [m, slice], without the padding of the vocabulary."""


def log_distribution(logits: Tensor) -> Tensor:
    """log softmax over the whole vocabulary, of this rank's slice: float32 [m, slice] to the same."""
    largest = logits.detach().max(-1).values if logits.shape[-1] else logits.new_full(logits.shape[:-1], -torch.inf)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    shifted = logits - largest[:, None]
    total = reduce_from_tensor_model_parallel_region(shifted.exp().sum(-1))
    own: Tensor = shifted - copy_to_tensor_model_parallel_region(total.log())[:, None]
    return own


def measure_tokens(
    hidden: Tensor,
    targets: Tensor,
    head: Head,
    tokens: range,
    *,
    temperature: float = 1.0,
    other: tuple[Tensor, Head] | None = None,
    swapped: bool = False,
    squared_mass: bool = False,
) -> TokenMeasures:
    """As `quintet.policies.causal_lm.token_measures`, from the hidden states at the predicted places, [M, hidden];
    `tokens` are those of this rank's slice, `other` hidden states and head of another model with the same slices.
    Equal on all tensor-parallel ranks."""
    width = max(1, LOGITS_AT_ONCE // max(1, len(tokens)))

    def measure(start: int) -> tuple[Tensor, ...]:
        part = slice(start, start + width)
        own = log_distribution(head(hidden[part]).float() / temperature)
        reference = None
        if other is not None:
            with torch.no_grad():
                reference = log_distribution(other[1](other[0][part]).float() / temperature)
        return _measures(own, targets[part] - tokens.start, reference, swapped=swapped, squared_mass=squared_mass)

    starts = range(0, len(hidden), width)
    if len(starts) <= 1:
        return TokenMeasures(*measure(0))
    if torch.is_grad_enabled():
        parts = [checkpoint(measure, start, use_reentrant=False, preserve_rng_state=False) for start in starts]
    else:
        parts = [measure(start) for start in starts]
    return TokenMeasures(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _measures(
    own: Tensor, targets: Tensor, other: Tensor | None, *, swapped: bool, squared_mass: bool
) -> tuple[Tensor, ...]:
    """`TokenMeasures` from log-probs of this rank's slice, [m, slice]; `targets` count from the slice's first token."""
    size = own.shape[-1]
    here = (targets >= 0) & (targets < size)
    chosen = own.gather(-1, targets.clamp(0, max(size - 1, 0))[:, None]).squeeze(-1) if size else own.sum(-1)
    chances = own.exp()
    logprobs = reduce_from_tensor_model_parallel_region(chosen.where(here, 0.0))
    entropy = reduce_from_tensor_model_parallel_region(-(chances * own).sum(-1))
    divergence = squared = torch.zeros_like(entropy)
    if other is not None:
        terms = other.exp() * (other - own) if swapped else chances * (own - other)
        divergence = reduce_from_tensor_model_parallel_region(terms.sum(-1))
    if squared_mass:
        squared = reduce_from_tensor_model_parallel_region(chances.detach().square().sum(-1))
    return logprobs, entropy, divergence, squared
