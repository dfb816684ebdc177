"""Measures of a distribution whose logits lie on several ranks, each with some of the vocabulary.

What passes between ranks is a few numbers a place, as in Megatron-LM (arXiv:1909.08053, section 3), not the logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from quintet.policies.collectives import largest, spread, total

__all__ = ["measures_of_shards", "shared_linear"]


class _Shard(NamedTuple):
    """A rank's part of log-probs [m, own vocabulary], which no other rank uses."""

    logprobs: Tensor
    group: ProcessGroup
    first: int
    """Which token the first column is."""


def shared_linear(hidden: Tensor, weight: DTensor) -> Tensor:
    """[m, hidden], the same on all ranks, by a matrix of which each has some rows; gives a DTensor."""
    shared = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    return F.linear(shared, weight)


def measures_of_shards(
    logits: DTensor,
    targets: Tensor,
    temperature: float,
    other: Tensor | None = None,
    *,
    swapped: bool = False,
    squared_mass: bool = False,
) -> tuple[Tensor, ...]:
    """What `token_measures` says of some places, float32 [m] each, from logits [m, vocabulary]; `other` are another
    model's logits, in shards or whole."""
    shard = _log_shard(logits, temperature)
    chances = shard.logprobs.exp()
    entropy = total(-(chances * shard.logprobs).sum(-1), shard.group)
    divergence = squared = torch.zeros_like(entropy)
    if other is not None:
        theirs = _same_columns(other, shard, temperature)
        weights, gap = (theirs.exp(), theirs - shard.logprobs) if swapped else (chances, shard.logprobs - theirs)
        divergence = total((weights * gap).sum(-1), shard.group)
    if squared_mass:
        squared = total(chances.detach().square().sum(-1), shard.group)
    return _of_targets(shard, targets), entropy, divergence, squared


def _log_shard(logits: DTensor, temperature: float) -> _Shard:
    """log softmax, with the sum over the vocabulary taken over ranks."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    group = logits.device_mesh.get_group()
    _, offsets = compute_local_shape_and_global_offset(logits.shape, logits.device_mesh, logits.placements)
    own = logits.to_local().float() / temperature
    low = own.new_full((len(own), 1), float("-inf"))
    highest = largest(torch.cat([own.detach(), low], 1).amax(-1), group)
    mass = total((own - highest[:, None]).exp().sum(-1), group)
    return _Shard(own - spread(highest + mass.log(), group)[:, None], group, offsets[-1])


def _same_columns(other: Tensor, shard: _Shard, temperature: float) -> Tensor:
    """The other model's log-probs of the shard's tokens, [m, own vocabulary]."""
    if isinstance(other, DTensor):
        return _log_shard(other, temperature).logprobs
    whole = (other.float() / temperature).log_softmax(-1)
    return whole[:, shard.first : shard.first + shard.logprobs.shape[1]]


def _of_targets(shard: _Shard, targets: Tensor) -> Tensor:
    """Log-probs of the targets, [m], each of which one rank knows."""
    columns = targets - shard.first
    held = (columns >= 0) & (columns < shard.logprobs.shape[1])
    if not shard.logprobs.shape[1]:
        return total(shard.logprobs.sum(-1), shard.group)
    found = shard.logprobs.gather(-1, torch.where(held, columns, 0)[:, None]).squeeze(-1)
    return total(torch.where(held, found, 0.0), shard.group)
