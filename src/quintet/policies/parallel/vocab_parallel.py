"""Token statistics of logits that are sharded over the vocabulary.

Ranks exchange a few numbers per token, as in Megatron-LM (arXiv:1909.08053, section 3), not the logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from quintet.policies.parallel.collectives import all_reduce_max, all_reduce_sum, copy_to_group


class _LogProbShard(NamedTuple):
    """A rank's shard of the log-probs, [m, local vocabulary]."""

    logprobs: Tensor
    group: ProcessGroup
    vocab_start: int
    """Token id of the first column."""


def vocab_parallel_linear(hidden_states: Tensor, weight: DTensor) -> Tensor:
    """Return [m, hidden], equal on all ranks, times a matrix sharded by rows, as a DTensor."""
    replicated = DTensor.from_local(hidden_states, weight.device_mesh, [Replicate()], run_check=False)
    return F.linear(replicated, weight)


def vocab_parallel_statistics(
    logits: DTensor,
    targets: Tensor,
    temperature: float,
    other: Tensor | None = None,
    *,
    swapped: bool = False,
    with_sum_squared_probs: bool = False,
) -> tuple[Tensor, ...]:
    """Return the fields of `TokenStatistics`, float32 [m] each, from logits [m, vocabulary].

    `other` holds another model's logits, sharded or full.
    """
    shard = _sharded_log_softmax(logits, temperature)
    probs = shard.logprobs.exp()
    entropy = all_reduce_sum(-(probs * shard.logprobs).sum(-1), shard.group)
    divergence = sum_squared_probs_per_token = torch.zeros_like(entropy)
    if other is not None:
        other_logprobs = _matching_columns(other, shard, temperature)
        weights, log_ratio = (
            (other_logprobs.exp(), other_logprobs - shard.logprobs)
            if swapped
            else (probs, shard.logprobs - other_logprobs)
        )
        divergence = all_reduce_sum((weights * log_ratio).sum(-1), shard.group)
    if with_sum_squared_probs:
        sum_squared_probs_per_token = all_reduce_sum(probs.detach().square().sum(-1), shard.group)
    return _target_logprobs(shard, targets), entropy, divergence, sum_squared_probs_per_token


def _sharded_log_softmax(logits: DTensor, temperature: float) -> _LogProbShard:
    """Return the log-softmax, normalized over the vocabulary of all ranks."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    group = logits.device_mesh.get_group()
    _, offsets = compute_local_shape_and_global_offset(logits.shape, logits.device_mesh, logits.placements)
    local = logits.to_local().float() / temperature
    floor = local.new_full((len(local), 1), float("-inf"))
    max_logit = all_reduce_max(torch.cat([local.detach(), floor], 1).amax(-1), group)
    normalizer = all_reduce_sum((local - max_logit[:, None]).exp().sum(-1), group)
    return _LogProbShard(local - copy_to_group(max_logit + normalizer.log(), group)[:, None], group, offsets[-1])


def _matching_columns(other: Tensor, shard: _LogProbShard, temperature: float) -> Tensor:
    """Return the other model's log-probs of the shard's tokens, [m, local vocabulary]."""
    if isinstance(other, DTensor):
        return _sharded_log_softmax(other, temperature).logprobs
    full = (other.float() / temperature).log_softmax(-1)
    return full[:, shard.vocab_start : shard.vocab_start + shard.logprobs.shape[1]]


def _target_logprobs(shard: _LogProbShard, targets: Tensor) -> Tensor:
    """Return the log-probs of the targets, [m], each of which is in one rank's shard."""
    columns = targets - shard.vocab_start
    is_local = (columns >= 0) & (columns < shard.logprobs.shape[1])
    if not shard.logprobs.shape[1]:
        return all_reduce_sum(shard.logprobs.sum(-1), shard.group)
    local = shard.logprobs.gather(-1, torch.where(is_local, columns, 0)[:, None]).squeeze(-1)
    return all_reduce_sum(torch.where(is_local, local, 0.0), shard.group)
