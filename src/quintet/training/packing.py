"""Cutting a batch into micro-batches that a model takes packed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from quintet.policies.attention import PackedLayout
from quintet.policies.causal_lm import Packed
from quintet.records import Batch

__all__ = ["MicroBatch", "micro_batches", "mini_batches", "select_sequences", "select_trajectories"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`packed` for the model; `index` int64 [M], where its targets stand in the batch's tokens."""

    packed: Packed
    index: Tensor


def select_sequences(batch: Batch, sequences: Tensor) -> Batch:
    """The given sequences, int64 [b], in that order; the numbers of trajectories stay."""
    lengths = batch.lengths[sequences]
    starts = batch.lengths.cumsum(0) - batch.lengths
    tokens = _ranges(starts[sequences], lengths)
    size = len(batch.tokens)
    packed = {
        f.name: value[tokens]
        for f in fields(Batch)
        if isinstance(value := getattr(batch, f.name), Tensor)
        and f.name not in {"lengths", "trajectory", "group"}
        and len(value) == size
    }
    return replace(batch, lengths=lengths, trajectory=batch.trajectory[sequences], **packed)


def select_trajectories(batch: Batch, keep: Tensor) -> Batch:
    """The trajectories where `keep`, bool [R], is true; numbers of trajectories stay."""
    return select_sequences(batch, keep[batch.trajectory].nonzero().squeeze(-1))


def mini_batches(batch: Batch, groups: int, generator: torch.Generator) -> Iterator[Batch]:
    """Whole groups in random order, `groups` at a time; the last may be smaller."""
    owner = batch.group[batch.trajectory]
    present = torch.unique(owner)
    order = present[torch.randperm(len(present), generator=generator)]
    for chosen in order.split(groups):
        yield select_sequences(batch, torch.isin(owner, chosen).nonzero().squeeze(-1))


def micro_batches(batch: Batch, max_tokens: int) -> Iterator[MicroBatch]:
    """All sequences, sorted by length, about `max_tokens` at a time and at least one."""
    order = batch.lengths.argsort(stable=True)
    filled = batch.lengths[order].cumsum(0)
    part = (filled - 1) // max_tokens
    starts = batch.lengths.cumsum(0) - batch.lengths
    for number in torch.unique(part):
        chosen = order[part == number]
        yield _pack(batch, starts[chosen], batch.lengths[chosen])


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The numbers start … start + length - 1 of each pair, end to end."""
    begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return torch.arange(int(lengths.sum())) - begins + starts.repeat_interleave(lengths)


def _pack(batch: Batch, starts: Tensor, lengths: Tensor) -> MicroBatch:
    prefix = _shared_prefix(batch, starts, lengths)
    rests = _ranges(starts + prefix, lengths - prefix)
    index = torch.cat([torch.arange(prefix) + starts[0], rests])
    predicted = batch.loss_mask[rests].nonzero().squeeze(-1)
    begins = torch.zeros(len(rests), dtype=torch.bool)
    begins[(lengths - prefix).cumsum(0) - (lengths - prefix)] = True
    sources = torch.where(begins[predicted], prefix - 1, prefix + predicted - 1)
    packed = Packed(
        tokens=batch.tokens[index],
        positions=batch.positions[index],
        layout=PackedLayout(lengths - prefix, prefix),
        sources=sources,
        targets=batch.tokens[rests[predicted]],
    )
    return MicroBatch(packed, rests[predicted])


def _shared_prefix(batch: Batch, starts: Tensor, lengths: Tensor) -> int:
    """Tokens that all sequences begin with, none of them the policy's own."""
    if len(starts) < 2:
        return 0
    columns = torch.arange(int(lengths.min()) - 1)
    places = starts[:, None] + columns
    same = (batch.tokens[places] == batch.tokens[places[:1]]).all(0) & ~batch.loss_mask[places].any(0)
    return int(same.long().cumprod(0).sum())
