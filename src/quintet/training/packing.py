"""Split a batch into mini-batches and packed micro-batches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from quintet.config.native.learners import BudgetConfig
from quintet.config.native.training import TrainingConfig
from quintet.policies.attention import PackedLayout
from quintet.policies.packed_batch import PackedBatch
from quintet.policies.vision.image_encoder import PackedImages
from quintet.policies.vision.image_tokens import decode_image_tokens
from quintet.records import Batch

UNPACKED_FIELDS = frozenset(
    {
        "lengths",
        "trajectory",
        "group",
        "domain",
        "baseline",
        "response_tokens",
        "truncated",
        "image_keys",
        "image_grids",
        "image_patches",
    }
)
"""Fields of a batch that have no entry per token."""


@dataclass(frozen=True, slots=True)
class MicroBatchBudget:
    """Limits of one micro-batch: approximate number of tokens, and number of sequences; None is no limit."""

    max_tokens: int | None = None
    max_sequences: int | None = None
    num_ranks: int = 1
    """Balance micro-batches so that this many ranks have equally many, of similar numbers of tokens."""

    @classmethod
    def from_config(cls, config: BudgetConfig, training: TrainingConfig, num_ranks: int = 1) -> MicroBatchBudget:
        """Return the component's limits, or the run's `training.micro_batch_tokens` if it has none."""
        if config.tokens is None and config.sequences is None:
            return cls(training.micro_batch_tokens, num_ranks=num_ranks)
        return cls(config.tokens, config.sequences, num_ranks)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed sequences, and which response tokens of the batch they predict."""

    packed: PackedBatch
    index: Tensor
    """Indices of the targets in the batch's tokens, int64 [M]."""


def select_sequences(batch: Batch, sequences: Tensor) -> Batch:
    """Return the batch of these sequences, int64 [b], in their order; trajectory indices are unchanged."""
    lengths = batch.lengths[sequences]
    starts = batch.lengths.cumsum(0) - batch.lengths
    tokens = _ranges(starts[sequences], lengths)
    size = len(batch.tokens)
    packed: dict[str, Any] = {
        f.name: value[tokens]
        for f in fields(Batch)
        if isinstance(value := getattr(batch, f.name), Tensor) and f.name not in UNPACKED_FIELDS and len(value) == size
    }
    return replace(batch, lengths=lengths, trajectory=batch.trajectory[sequences], **packed)


def pack_images(batch: Batch, tokens: Tensor) -> PackedImages | None:
    """Return the images of a pass over `tokens` of the batch, int64 [P]; None if the batch has no images.

    A pass without image tokens gets an image that it does not show: with sharded weights, all ranks have to run the
    vision encoder together.
    """
    if batch.image_keys is None or batch.image_grids is None or batch.image_patches is None:
        return None
    indices = (tokens < 0).nonzero().squeeze(-1)
    if not len(indices):
        blank = torch.zeros_like(batch.image_patches[:1])
        return PackedImages(blank, torch.ones(1, 2, dtype=torch.long), indices, indices)
    decoded = decode_image_tokens(tokens[indices])
    keys, image = torch.unique(decoded.keys, return_inverse=True)
    present = torch.searchsorted(batch.image_keys, keys)
    sizes = batch.image_grids.prod(1)
    patches = batch.image_patches[_ranges((sizes.cumsum(0) - sizes)[present], sizes[present])]
    grids = batch.image_grids[present]
    first = sizes[present].cumsum(0) - sizes[present]
    return PackedImages(patches, grids, indices, first[image] + decoded.rows * grids[image, 1] + decoded.columns)


def select_trajectories(batch: Batch, keep: Tensor) -> Batch:
    """Return the batch of the trajectories with `keep`, bool [R]; trajectory indices are unchanged."""
    return select_sequences(batch, keep[batch.trajectory].nonzero().squeeze(-1))


def mini_batches(
    batch: Batch,
    size: int,
    generator: torch.Generator | None,
    unit: Literal["group", "trajectory", "sequence"] = "group",
) -> Iterator[Batch]:
    """Yield mini-batches of `size` groups, trajectories or sequences, in random order if there is a generator; the last
    may be smaller."""
    owner = batch.trajectory
    if unit == "group":
        owner = batch.group[batch.trajectory]
    elif unit == "sequence":
        owner = torch.arange(len(batch.lengths))
    present = torch.unique(owner)
    order = present if generator is None else present[torch.randperm(len(present), generator=generator)]
    for chosen in order.split(size):
        yield select_sequences(batch, torch.isin(owner, chosen).nonzero().squeeze(-1))


def iter_micro_batches(batch: Batch, budget: MicroBatchBudget) -> Iterator[MicroBatch]:
    """Yield packed micro-batches of all sequences with response tokens, each with as many as the budget allows and at
    least one.

    Sequences with the same prompt are adjacent, so that the prompt is computed once; beyond that they are sorted by
    length.
    """
    lengths = batch.lengths
    starts = lengths.cumsum(0) - lengths
    prompts = _prompt_lengths(batch, starts)
    prompt_ids = _prompt_ids(batch, starts, prompts)
    order = torch.from_numpy(np.lexsort((lengths.numpy(), prompt_ids.numpy(), prompts.numpy())))
    order = order[prompts[order] < lengths[order]]
    first = torch.ones(len(order), dtype=torch.bool)
    first[1:] = prompt_ids[order][1:] != prompt_ids[order][:-1]
    costs = lengths[order] - prompts[order] * ~first
    assignment = _assign_greedily(costs, budget)
    if budget.num_ranks > 1 and len(order):
        assignment = _assign_balanced(costs, budget, len(torch.unique(assignment)))
    for micro_batch in torch.unique(assignment):
        chosen = order[assignment == micro_batch]
        yield _pack(batch, starts[chosen], lengths[chosen], prompts[chosen], prompt_ids[chosen])


def _assign_greedily(costs: Tensor, budget: MicroBatchBudget) -> Tensor:
    """Return each sequence's micro-batch, int64 [S]; `costs` are the tokens that each sequence adds."""
    by_tokens = torch.zeros_like(costs) if budget.max_tokens is None else (costs.cumsum(0) - 1) // budget.max_tokens
    if budget.max_sequences is None:
        return by_tokens
    position = torch.arange(len(costs))
    first = torch.searchsorted(by_tokens, by_tokens)
    # index by tokens, then by sequences inside it
    return by_tokens * (len(costs) + 1) + (position - first) // budget.max_sequences


def _assign_balanced(costs: Tensor, budget: MicroBatchBudget, min_count: int) -> Tensor:
    """Return each sequence's micro-batch, int64 [S], in order. There are at least `min_count` micro-batches, a multiple
    of the ranks unless there are fewer sequences, and the largest one is as small as possible."""
    cumulative, max_sequences = costs.cumsum(0).tolist(), budget.max_sequences or len(costs)
    count = min(-(-min_count // budget.num_ranks) * budget.num_ranks, len(costs))
    low, high = int(costs.max()), int(cumulative[-1])
    while low < high:
        middle = (low + high) // 2
        if len(_ends(cumulative, middle, max_sequences)) <= count:
            high = middle
        else:
            low = middle + 1
    ends = _ends(cumulative, low, max_sequences)
    while len(ends) < count:
        _halve_largest(ends, cumulative)
    sizes = torch.tensor(ends).diff(prepend=torch.tensor([0]))
    return torch.arange(len(ends)).repeat_interleave(sizes)


def _ends(cumulative: list[int], capacity: int, max_sequences: int) -> list[int]:
    """Return the ends of micro-batches, each filled with as many sequences as fit into `capacity` tokens and
    `max_sequences`; `cumulative` are the tokens up to each sequence."""
    ends, begin = [], 0
    while begin < len(cumulative):
        before = cumulative[begin - 1] if begin else 0
        begin = min(bisect_right(cumulative, before + capacity), begin + max_sequences)
        ends.append(begin)
    return ends


def _halve_largest(ends: list[int], cumulative: list[int]) -> None:
    """Split the micro-batch with most tokens, of those with several sequences, in two."""
    begins = [0, *ends[:-1]]
    divisible = [index for index, (begin, end) in enumerate(zip(begins, ends, strict=True)) if end - begin > 1]

    def before(sequence: int) -> int:
        return cumulative[sequence - 1] if sequence else 0

    largest = max(divisible, key=lambda index: before(ends[index]) - before(begins[index]))
    begin, end = begins[largest], ends[largest]
    middle = bisect_right(cumulative, (before(begin) + before(end)) // 2, begin, end)
    ends.insert(largest, min(max(middle, begin + 1), end - 1))


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return start, …, start + length - 1 of each pair, concatenated."""
    begins = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return torch.arange(int(lengths.sum())) - begins + starts.repeat_interleave(lengths)


def _prompt_lengths(batch: Batch, starts: Tensor) -> Tensor:
    """Return the number of tokens before each sequence's first response token, int64 [S]."""
    response = batch.loss_mask.nonzero().squeeze(-1)
    position = torch.searchsorted(response, starts)
    first = response[position.clamp(max=max(len(response) - 1, 0))] if len(response) else starts
    prompts = torch.where(position < len(response), first - starts, batch.lengths)
    return torch.minimum(prompts, batch.lengths)


def _prompt_ids(batch: Batch, starts: Tensor, prompts: Tensor) -> Tensor:
    """Return one number per sequence, int64 [S], equal for sequences with the same prompt."""
    tokens = batch.tokens.numpy()
    ids: dict[bytes, int] = {}
    prompt_ids = [
        ids.setdefault(tokens[start : start + length].tobytes(), len(ids))
        for start, length in zip(starts.tolist(), prompts.tolist(), strict=True)
    ]
    return torch.tensor(prompt_ids)


def _pack(batch: Batch, starts: Tensor, lengths: Tensor, prompts: Tensor, prompt_ids: Tensor) -> MicroBatch:
    """Pack sequences, with those of equal `prompt_ids` adjacent, as a `PackedLayout`: common prefix, then prompts
    (stems), then responses (branches).

    The last token of a sequence predicts nothing and is omitted, so a branch may be empty; its only target is then
    predicted by the end of its prompt.
    """
    is_first = torch.ones(len(prompt_ids), dtype=torch.bool)
    is_first[1:] = prompt_ids[1:] != prompt_ids[:-1]
    prefix = _common_prefix(batch, starts[is_first], prompts[is_first])
    has_stems = 1 < int(is_first.sum()) < len(prompt_ids)
    base = prompts if has_stems else torch.full_like(prompts, prefix)
    parent = is_first.cumsum(0) - 1
    stem_lengths = (prompts - prefix)[is_first] if has_stems else None
    stem_tokens = _ranges(starts[is_first] + prefix, stem_lengths) if stem_lengths is not None else starts[:0]
    branch_lengths = (lengths - 1 - base).clamp(min=0)
    index = torch.cat([torch.arange(prefix) + starts[0], stem_tokens, _ranges(starts + base, branch_lengths)])

    before = prefix + stem_lengths.cumsum(0)[parent] - 1 if stem_lengths is not None else base - 1
    begin = prefix + len(stem_tokens) + branch_lengths.cumsum(0) - branch_lengths
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    tokens = _ranges(starts, lengths)
    is_response = batch.loss_mask[tokens]
    tokens, rows = tokens[is_response], rows[is_response]
    offset = tokens - starts[rows] - 1 - base[rows]
    packed = PackedBatch(
        tokens=batch.tokens[index],
        position_ids=batch.positions[index],
        layout=_layout(branch_lengths, prefix, stem_lengths, parent),
        prediction_indices=torch.where(offset < 0, before[rows], begin[rows] + offset),
        targets=batch.tokens[tokens],
        images=pack_images(batch, batch.tokens[index]),
    )
    return MicroBatch(packed, tokens)


def _layout(branches: Tensor, prefix: int, stems: Tensor | None, parents: Tensor) -> PackedLayout:
    non_empty = branches > 0
    return PackedLayout(branches[non_empty], prefix, stems, None if stems is None else parents[non_empty])


def _common_prefix(batch: Batch, starts: Tensor, prompts: Tensor) -> int:
    """Return the length of the common prefix of all distinct prompts; if there are several, each keeps a token of its
    own."""
    shortest = int(prompts.min())
    if len(starts) == 1:
        return shortest
    positions = starts[:, None] + torch.arange(max(shortest - 1, 0))
    same = (batch.tokens[positions] == batch.tokens[positions[:1]]).all(0)
    return int(same.long().cumprod(0).sum())


COMPUTED = ("loss_mask", "rewards", "advantages", "returns")
"""Fields that a computation of rewards or advantages changes, one number per token."""


def map_domains(batch: Batch, compute: Callable[[Batch], Batch]) -> Batch:
    """Return the batch with the results of `compute` for the trajectories of each domain; without domains, for all
    trajectories.

    Statistics over a batch, such as those of whitening, are then of a domain, as in ROLL.
    """
    if batch.domain is None:
        return compute(batch)
    token_domain = batch.domain[batch.token_trajectory]
    columns: dict[str, Any] = {}
    for domain in torch.unique(token_domain).tolist():
        part = compute(select_trajectories(batch, batch.domain == domain))
        for name in COMPUTED:
            values = getattr(part, name)
            if values is not None:
                columns.setdefault(name, values.new_zeros(len(batch.tokens)))[token_domain == domain] = values
    return replace(batch, **columns)
