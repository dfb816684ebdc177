"""Log-probs, entropies and divergences of predicted tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from quintet.policies.fused_log_probs import MAX_LOGITS_IN_MEMORY, fused_token_statistics
from quintet.policies.hidden_states import compute_hidden_states
from quintet.policies.packed_batch import PackedBatch
from quintet.policies.parallel.vocab_parallel import VocabShard, vocab_parallel_statistics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

StatisticsFn = Callable[..., tuple[Tensor, ...]]
"""Function with the signature of `_statistics_from_logits`."""
DivergenceFn = Callable[[Tensor, Tensor], Tensor]
"""Divergence [m] between the distributions of two models, from their logits [m, vocabulary]."""


class LazyLogits(NamedTuple):
    """Hidden states at the predicted tokens, and the head that turns chunks of them into logits."""

    hidden_states: Tensor
    """[M, hidden]."""
    head: Callable[[Tensor], Tensor | VocabShard]
    """[m, hidden] to [m, vocabulary], or to this rank's columns of it."""


def compute_lazy_logits(model: PreTrainedModel, packed: PackedBatch) -> LazyLogits:
    """Run the model's body on `packed` and return the hidden states with the model's own head."""
    hidden_states = compute_hidden_states(model.model, packed.tokens, packed.position_ids, packed.layout, packed.images)
    return LazyLogits(hidden_states.index_select(0, packed.prediction_indices), model.lm_head)


class TokenStatistics(NamedTuple):
    """Statistics of the predicted distributions, float32 [M] each."""

    logprobs: Tensor
    """Log-probs of the targets, in nats."""
    entropy: Tensor
    """Entropies, in nats."""
    divergence: Tensor
    """KL divergence between the model and another, over the whole vocabulary, in nats; 0 without another model."""
    sum_squared_probs: Tensor
    """Sum of the squared probabilities of all tokens, without gradient; 0 unless requested."""


class StatisticsOptions(TypedDict, total=False):
    """Options of `compute_token_statistics`."""

    swapped: bool
    """Compute KL(other ‖ model) instead of KL(model ‖ other)."""
    with_sum_squared_probs: bool
    divergence_fn: DivergenceFn | None
    """Divergence in place of KL, of the logits of both models, which must be whole ones."""
    statistics_fn: StatisticsFn | None
    """Replaces `_statistics_from_logits`, for example by its compiled version."""


def log_probs_and_entropy(
    model: PreTrainedModel, packed: PackedBatch, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log-probs of the targets and entropies, in nats, float32 [M] each; see `compute_token_statistics`."""
    statistics = compute_token_statistics(model, packed, temperature)
    return statistics.logprobs, statistics.entropy


def compute_token_statistics(
    model: PreTrainedModel,
    packed: PackedBatch,
    temperature: float = 1.0,
    other: LazyLogits | None = None,
    **options: Unpack[StatisticsOptions],
) -> TokenStatistics:
    """Return the statistics of the model's predictions. `divergence` is the one from `other`, into which no gradient
    flows.

    Logits are computed only for the M predicted tokens, see `statistics_from_hidden_states`.
    """
    logits = compute_lazy_logits(model, packed)
    fused = None
    if other is None:
        fused = fused_token_statistics(logits.head, logits.hidden_states, packed.targets, temperature)
    if fused is not None:
        zeros = torch.zeros_like(fused[0])
        squares = fused[2] if options.get("with_sum_squared_probs", False) else zeros
        return TokenStatistics(fused[0], fused[1], zeros, squares)
    vocabulary = model.lm_head.weight.shape[0]
    return statistics_from_hidden_states(logits, packed.targets, temperature, other, vocabulary=vocabulary, **options)


def statistics_from_hidden_states(
    logits: LazyLogits,
    targets: Tensor,
    temperature: float,
    other: LazyLogits | None = None,
    *,
    vocabulary: int,
    **options: Unpack[StatisticsOptions],
) -> TokenStatistics:
    """Return the statistics of [M, hidden]; see `compute_token_statistics`.

    Logits are divided by `temperature`, as in sampling. If M × `vocabulary`, the number of columns of the head, exceeds
    `MAX_LOGITS_IN_MEMORY`, they are computed in chunks, and again in the backward pass.
    """
    divergence_fn, statistics_fn = options.get("divergence_fn"), options.get("statistics_fn")
    flags = {name: options.get(name, False) for name in ("swapped", "with_sum_squared_probs")}
    num_positions = max(1, MAX_LOGITS_IN_MEMORY // max(1, vocabulary))

    def compute_chunk(start: int) -> tuple[Tensor, ...]:
        part = slice(start, start + num_positions)
        chunk, other_chunk = logits.head(logits.hidden_states[part]), None
        if other is not None:
            with torch.no_grad():
                other_chunk = other.head(other.hidden_states[part])
        is_sharded = isinstance(chunk, DTensor | VocabShard)
        if divergence_fn is not None and isinstance(chunk, Tensor) and isinstance(other_chunk, Tensor):
            return _with_divergence(chunk, targets[part], temperature, divergence_fn(chunk, other_chunk))
        compute: StatisticsFn = vocab_parallel_statistics if is_sharded else statistics_fn or _statistics_from_logits
        return compute(chunk, targets[part], temperature, other_chunk, **flags)

    starts = range(0, len(logits.hidden_states), num_positions)
    if len(starts) <= 1:
        return TokenStatistics(*compute_chunk(0))
    if torch.is_grad_enabled():
        parts = [checkpoint(compute_chunk, start, use_reentrant=False, preserve_rng_state=False) for start in starts]
    else:
        parts = [compute_chunk(start) for start in starts]
    return TokenStatistics(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _with_divergence(logits: Tensor, targets: Tensor, temperature: float, divergence: Tensor) -> tuple[Tensor, ...]:
    """Return the fields of `TokenStatistics` with another divergence."""
    logprobs, entropy, _, squares = _statistics_from_logits(logits, targets, temperature)
    return logprobs, entropy, divergence, squares


def _statistics_from_logits(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    other_logits: Tensor | None = None,
    *,
    swapped: bool = False,
    with_sum_squared_probs: bool = False,
) -> tuple[Tensor, ...]:
    """Return the fields of `TokenStatistics`, [m] each, from logits [m, vocabulary] of one or two models."""
    logprobs = (logits.float() / temperature).log_softmax(-1)
    other = None if other_logits is None else (other_logits.float() / temperature).log_softmax(-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs).sum(-1)
    divergence = sum_squared_probs_per_token = torch.zeros_like(entropy)
    if other is not None and swapped:
        divergence = (other.exp() * (other - logprobs)).sum(-1)
    elif other is not None:
        divergence = (probs * (logprobs - other)).sum(-1)
    if with_sum_squared_probs:
        sum_squared_probs_per_token = probs.detach().square().sum(-1)
    # clone: FSDP's hooks warn about views
    return logprobs.gather(-1, targets[:, None]).squeeze(-1).clone(), entropy, divergence, sum_squared_probs_per_token


@cache
def compiled_token_statistics() -> StatisticsFn:
    """Return `_statistics_from_logits` compiled for any number of tokens."""
    compiled: StatisticsFn = torch.compile(_statistics_from_logits, dynamic=True)
    return compiled
