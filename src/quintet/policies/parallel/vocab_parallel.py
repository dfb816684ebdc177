"""Token statistics of logits that are sharded over the vocabulary.

Ranks exchange a few numbers per token, as in Megatron-LM (arXiv:1909.08053, section 3), not the logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from quintet.policies.parallel.collectives import all_reduce_max, all_reduce_sum, copy_to_group


class VocabShard(NamedTuple):
    """A rank's shard of logits or log-probs, without padding of the vocabulary."""

    columns: Tensor
    """[m, local vocabulary]."""
    group: ProcessGroup
    vocab_start: int
    """Token id of the first column."""


def vocab_parallel_linear(hidden_states: Tensor, weight: DTensor) -> DTensor:
    """Return [m, hidden], equal on all ranks, times a matrix sharded by rows, as a DTensor."""
    if not isinstance(hidden_states, DTensor):
        hidden_states = DTensor.from_local(hidden_states, weight.device_mesh, [Replicate()], run_check=False)
    logits: Any = F.linear(hidden_states, weight)
    return cast(DTensor, logits)


def fill_vocab_columns(logits: DTensor, tokens: Tensor, value: float) -> DTensor:
    """Return logits [m, vocabulary], sharded by columns, with `value` in the columns of `tokens`, int64 [k]."""
    shard = _local_shard(logits)
    columns = (tokens.to_local() if isinstance(tokens, DTensor) else tokens) - shard.vocab_start
    columns = columns[(columns >= 0) & (columns < shard.columns.shape[1])]
    return DTensor.from_local(
        shard.columns.index_fill(-1, columns, value),
        logits.device_mesh,
        logits.placements,
        run_check=False,
        shape=logits.shape,
        stride=logits.stride(),
    )


def vocab_parallel_statistics(
    logits: DTensor | VocabShard,
    targets: Tensor,
    temperature: float,
    other: Tensor | VocabShard | None = None,
    *,
    swapped: bool = False,
    with_sum_squared_probs: bool = False,
) -> tuple[Tensor, ...]:
    """Return the fields of `TokenStatistics`, float32 [m] each, from logits [m, vocabulary].

    `other` holds another model's logits, sharded or full.
    """
    shard = _sharded_log_softmax(logits, temperature)
    logprobs = shard.columns
    probs = logprobs.exp()
    entropy = all_reduce_sum(-(probs * logprobs).sum(-1), shard.group)
    divergence = sum_squared_probs_per_token = torch.zeros_like(entropy)
    if other is not None:
        other_logprobs = _matching_columns(other, shard, temperature)
        terms = other_logprobs.exp() * (other_logprobs - logprobs) if swapped else probs * (logprobs - other_logprobs)
        divergence = all_reduce_sum(terms.sum(-1), shard.group)
    if with_sum_squared_probs:
        sum_squared_probs_per_token = all_reduce_sum(probs.detach().square().sum(-1), shard.group)
    return _target_logprobs(shard, targets), entropy, divergence, sum_squared_probs_per_token


def _sharded_log_softmax(logits: DTensor | VocabShard, temperature: float) -> VocabShard:
    """Return the log-softmax, normalized over the vocabulary of all ranks."""
    shard = _local_shard(logits) if isinstance(logits, DTensor) else logits
    local, group = shard.columns.float() / temperature, shard.group
    floor = local.new_full((len(local), 1), float("-inf"))
    max_logit = all_reduce_max(torch.cat([local.detach(), floor], 1).amax(-1), group)
    normalizer = all_reduce_sum((local - max_logit[:, None]).exp().sum(-1), group)
    return shard._replace(columns=local - copy_to_group(max_logit + normalizer.log(), group)[:, None])


def _local_shard(logits: DTensor) -> VocabShard:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(logits.shape, logits.device_mesh, logits.placements)
    return VocabShard(logits.to_local(), logits.device_mesh.get_group(), offsets[-1])


def _matching_columns(other: Tensor | VocabShard, shard: VocabShard, temperature: float) -> Tensor:
    """Return the other model's log-probs of the shard's tokens, [m, local vocabulary]."""
    if isinstance(other, DTensor | VocabShard):
        return _sharded_log_softmax(other, temperature).columns
    full = (other.float() / temperature).log_softmax(-1)
    return full[:, shard.vocab_start : shard.vocab_start + shard.columns.shape[1]]


def _target_logprobs(shard: VocabShard, targets: Tensor) -> Tensor:
    """Return the log-probs of the targets, [m], each of which is in one rank's shard."""
    columns = targets - shard.vocab_start
    is_local = (columns >= 0) & (columns < shard.columns.shape[1])
    if not shard.columns.shape[1]:
        return all_reduce_sum(shard.columns.sum(-1), shard.group)
    local = shard.columns.gather(-1, torch.where(is_local, columns, 0)[:, None]).squeeze(-1)
    return all_reduce_sum(torch.where(is_local, local, 0.0), shard.group)
