"""Cutting a batch into micro-batches that a model takes packed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quintet.config.native.learners import BudgetConfig
from quintet.config.native.training import TrainingConfig
from quintet.policies.attention import PackedLayout
from quintet.policies.causal_lm import Packed
from quintet.records import Batch

__all__ = ["Budget", "MicroBatch", "micro_batches", "mini_batches", "select_sequences", "select_trajectories"]


@dataclass(frozen=True, slots=True)
class Budget:
    """What one forward pass may hold: about so many tokens, at most so many sequences; None sets no limit."""

    tokens: int | None = None
    sequences: int | None = None
    ranks: int = 1
    """Passes are cut so that this many ranks have as many of them, all of about as many tokens."""

    @classmethod
    def of(cls, own: BudgetConfig, training: TrainingConfig, ranks: int = 1) -> Budget:
        """A component's own limits, or the run's where it has none."""
        if own.tokens is None and own.sequences is None:
            return cls(training.micro_batch_tokens, ranks=ranks)
        return cls(own.tokens, own.sequences, ranks)


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
    packed: dict[str, Any] = {
        f.name: value[tokens]
        for f in fields(Batch)
        if isinstance(value := getattr(batch, f.name), Tensor)
        and f.name not in {"lengths", "trajectory", "group", "baseline"}
        and len(value) == size
    }
    return replace(batch, lengths=lengths, trajectory=batch.trajectory[sequences], **packed)


def select_trajectories(batch: Batch, keep: Tensor) -> Batch:
    """The trajectories where `keep`, bool [R], is true; numbers of trajectories stay."""
    return select_sequences(batch, keep[batch.trajectory].nonzero().squeeze(-1))


def mini_batches(
    batch: Batch, size: int, generator: torch.Generator | None, *, whole_groups: bool = True
) -> Iterator[Batch]:
    """Whole groups in random order, or single trajectories, `size` at a time; the last may be smaller. Without a
    generator they come in their own order."""
    owner = batch.group[batch.trajectory] if whole_groups else batch.trajectory
    present = torch.unique(owner)
    order = present if generator is None else present[torch.randperm(len(present), generator=generator)]
    for chosen in order.split(size):
        yield select_sequences(batch, torch.isin(owner, chosen).nonzero().squeeze(-1))


def micro_batches(batch: Batch, budget: Budget) -> Iterator[MicroBatch]:
    """All sequences that have own tokens, as many at a time as the budget holds and at least one.

    Sequences of the same prompt stand together, so that it is computed once; beyond that they are
    sorted by length, so that little is padded.
    """
    lengths = batch.lengths
    starts = lengths.cumsum(0) - lengths
    prompts = _prompt_lengths(batch, starts)
    stems = _number_prompts(batch, starts, prompts)
    order = torch.from_numpy(np.lexsort((lengths.numpy(), stems.numpy(), prompts.numpy())))
    order = order[prompts[order] < lengths[order]]
    first = torch.ones(len(order), dtype=torch.bool)
    first[1:] = stems[order][1:] != stems[order][:-1]
    costs = lengths[order] - prompts[order] * ~first
    part = _parts(costs, budget)
    if budget.ranks > 1 and len(order):
        part = _balanced(costs, budget, len(torch.unique(part)))
    for number in torch.unique(part):
        chosen = order[part == number]
        yield _pack(batch, starts[chosen], lengths[chosen], prompts[chosen], stems[chosen])


def _parts(costs: Tensor, budget: Budget) -> Tensor:
    """To which pass each sequence belongs, int64 [S]; `costs` are the tokens that each adds."""
    by_tokens = torch.zeros_like(costs) if budget.tokens is None else (costs.cumsum(0) - 1) // budget.tokens
    if budget.sequences is None:
        return by_tokens
    place = torch.arange(len(costs))
    first = torch.searchsorted(by_tokens, by_tokens)
    # the number of a token pass, then of the sequences' pass inside it
    return by_tokens * (len(costs) + 1) + (place - first) // budget.sequences


def _balanced(costs: Tensor, budget: Budget, needed: int) -> Tensor:
    """To which pass each sequence belongs, int64 [S], in their order: of at least `needed` passes, a multiple of the
    ranks unless there are fewer sequences, of which the largest is as small as can be."""
    sums, most = costs.cumsum(0).tolist(), budget.sequences or len(costs)
    wanted = min(-(-needed // budget.ranks) * budget.ranks, len(costs))
    low, high = int(costs.max()), int(sums[-1])
    while low < high:
        middle = (low + high) // 2
        if len(_ends(sums, middle, most)) <= wanted:
            high = middle
        else:
            low = middle + 1
    ends = _ends(sums, low, most)
    while len(ends) < wanted:
        _halve_largest(ends, sums)
    sizes = torch.tensor(ends).diff(prepend=torch.tensor([0]))
    return torch.arange(len(ends)).repeat_interleave(sizes)


def _ends(sums: list[int], capacity: int, most: int) -> list[int]:
    """Where passes end that are each filled with as many tokens as fit, and at most so many sequences; `sums` are the
    tokens of all sequences up to each."""
    ends, begin = [], 0
    while begin < len(sums):
        before = sums[begin - 1] if begin else 0
        begin = min(bisect_right(sums, before + capacity), begin + most)
        ends.append(begin)
    return ends


def _halve_largest(ends: list[int], sums: list[int]) -> None:
    """Of the passes with several sequences, the one with most tokens becomes two."""
    begins = [0, *ends[:-1]]
    several = [number for number, (begin, end) in enumerate(zip(begins, ends, strict=True)) if end - begin > 1]

    def before(place: int) -> int:
        return sums[place - 1] if place else 0

    largest = max(several, key=lambda number: before(ends[number]) - before(begins[number]))
    begin, end = begins[largest], ends[largest]
    half = bisect_right(sums, (before(begin) + before(end)) // 2, begin, end)
    ends.insert(largest, min(max(half, begin + 1), end - 1))


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The numbers start … start + length - 1 of each pair, end to end."""
    begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return torch.arange(int(lengths.sum())) - begins + starts.repeat_interleave(lengths)


def _prompt_lengths(batch: Batch, starts: Tensor) -> Tensor:
    """Tokens of each sequence before the first that is the policy's own, int64 [S]."""
    own = batch.loss_mask.nonzero().squeeze(-1)
    place = torch.searchsorted(own, starts)
    found = own[place.clamp(max=max(len(own) - 1, 0))] if len(own) else starts
    prompts = torch.where(place < len(own), found - starts, batch.lengths)
    return torch.minimum(prompts, batch.lengths)


def _number_prompts(batch: Batch, starts: Tensor, prompts: Tensor) -> Tensor:
    """The same number for sequences of the same prompt, int64 [S]."""
    tokens = batch.tokens.numpy()
    seen: dict[bytes, int] = {}
    numbers = [
        seen.setdefault(tokens[start : start + length].tobytes(), len(seen))
        for start, length in zip(starts.tolist(), prompts.tolist(), strict=True)
    ]
    return torch.tensor(numbers)


def _pack(batch: Batch, starts: Tensor, lengths: Tensor, prompts: Tensor, stems: Tensor) -> MicroBatch:
    """Sequences with equal `stems` next to each other, packed as `PackedLayout` has it.

    The last token of a sequence predicts nothing and is left out, so a branch may be empty; it has
    then no row, and its first and only target is predicted by the end of its prompt.
    """
    fresh = torch.ones(len(stems), dtype=torch.bool)
    fresh[1:] = stems[1:] != stems[:-1]
    prefix = _common_prefix(batch, starts[fresh], prompts[fresh])
    grown = 1 < int(fresh.sum()) < len(stems)
    base = prompts if grown else torch.full_like(prompts, prefix)
    parent = fresh.cumsum(0) - 1
    stem_lengths = (prompts - prefix)[fresh] if grown else None
    stem_tokens = _ranges(starts[fresh] + prefix, stem_lengths) if stem_lengths is not None else starts[:0]
    fed = (lengths - 1 - base).clamp(min=0)
    index = torch.cat([torch.arange(prefix) + starts[0], stem_tokens, _ranges(starts + base, fed)])

    before = prefix + stem_lengths.cumsum(0)[parent] - 1 if stem_lengths is not None else base - 1
    begin = prefix + len(stem_tokens) + fed.cumsum(0) - fed
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    tokens = _ranges(starts, lengths)
    own = batch.loss_mask[tokens]
    tokens, rows = tokens[own], rows[own]
    offset = tokens - starts[rows] - 1 - base[rows]
    packed = Packed(
        tokens=batch.tokens[index],
        positions=batch.positions[index],
        layout=_layout(fed, prefix, stem_lengths, parent),
        sources=torch.where(offset < 0, before[rows], begin[rows] + offset),
        targets=batch.tokens[tokens],
    )
    return MicroBatch(packed, tokens)


def _layout(branches: Tensor, prefix: int, stems: Tensor | None, parents: Tensor) -> PackedLayout:
    filled = branches > 0
    return PackedLayout(branches[filled], prefix, stems, None if stems is None else parents[filled])


def _common_prefix(batch: Batch, starts: Tensor, prompts: Tensor) -> int:
    """Tokens that all distinct prompts begin with; of several, each keeps one to itself."""
    shortest = int(prompts.min())
    if len(starts) == 1:
        return shortest
    places = starts[:, None] + torch.arange(max(shortest - 1, 0))
    same = (batch.tokens[places] == batch.tokens[places[:1]]).all(0)
    return int(same.long().cumprod(0).sum())
