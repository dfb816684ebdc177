"""Context parallelism: each rank gathers the keys and values of all ranks and attends with its own queries.

As in Llama 3 (arXiv:2407.21783, section 3.3.2): keys and values have few heads, so gathering them is cheap compared
with attention, and every attention pattern is possible, while a ring would need a mask for each of its steps. Queries
are distributed in zig-zag: each sequence is split into two chunks per rank, and a rank takes one chunk from the
beginning and the one equally far from the end, so that all ranks attend to about as many keys.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.bias import causal_lower_right

from quintet.errors import MachineError
from quintet.policies.attention import PackedStructure
from quintet.policies.attention_backends import active_attention_options
from quintet.policies.parallel.collectives import all_gather


class _SequenceParts(NamedTuple):
    """The prefix, the stems or the branches."""

    starts: Tensor
    """int64 [n], index of the first token of each."""
    lengths: Tensor
    """int64 [n]."""
    context: Tensor
    """int64 [n, k], the earlier tokens to which each attends, padded with -1."""


class _Queries(NamedTuple):
    """A rank's queries in one kind of sequence part, as padded rows, with their keys."""

    rows: Tensor
    """int64 [n, width], index of the query in each place, padded with 0."""
    unpad_index: Tensor
    """int64 [m], index of each query in the flattened `rows`."""
    keys: Tensor
    """int64 [n, keys], index of each key's token, padded with 0."""
    mask: Tensor
    """Bool [n, 1, width, keys]; [0] if each query attends to all keys but those of later queries in its row."""

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have equally many queries and keys, so that a kernel without a mask can be used."""
        return not len(self.mask)


def _iter_parts(structure: PackedStructure) -> Iterator[_SequenceParts]:
    prefix, stems, parents = structure.prefix, structure.stems, structure.parents
    prefix_tokens = torch.arange(prefix)
    branch_start = prefix
    if prefix:
        yield _SequenceParts(torch.tensor([0]), torch.tensor([prefix]), prefix_tokens[:0].expand(1, 0))
    branch_context = prefix_tokens.expand(len(structure.branches), prefix)
    if stems is not None:
        starts = prefix + stems.cumsum(0) - stems
        yield _SequenceParts(starts, stems, prefix_tokens.expand(len(stems), prefix))
        branch_start += int(stems.sum())
        if parents is not None:
            branch_context = torch.cat([branch_context, _index_ranges(starts, stems)[parents]], 1)
    if len(structure.branches):
        yield _SequenceParts(
            branch_start + structure.branches.cumsum(0) - structure.branches, structure.branches, branch_context
        )


def _index_ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return int64 [n, max length] with start, start + 1, … per row, padded with -1."""
    columns = torch.arange(int(lengths.max()) if len(lengths) else 0)
    return torch.where(columns < lengths[:, None], starts[:, None] + columns, -1)


class _Segment(NamedTuple):
    """The non-empty ranges from `begins` to `ends`, int64 [n], of sequence parts."""

    rows: _SequenceParts
    begins: Tensor
    ends: Tensor

    @property
    def indices(self) -> Tensor:
        """Token indices int64 [n, width], padded with -1."""
        return _index_ranges(self.rows.starts + self.begins, self.ends - self.begins)


def _iter_segments(structure: PackedStructure, rank: int, num_ranks: int) -> Iterator[_Segment]:
    """Yield one rank's segments. Chunks rotate over ranks from row to row, so that rounding favours no rank."""
    for rows in _iter_parts(structure):
        offset = (rank + torch.arange(len(rows.lengths))) % num_ranks
        for chunk in (offset, 2 * num_ranks - 1 - offset):
            begins = rows.lengths * chunk // (2 * num_ranks)
            ends = rows.lengths * (chunk + 1) // (2 * num_ranks)
            non_empty = ends > begins
            if bool(non_empty.any()):
                yield _Segment(_SequenceParts(*(x[non_empty] for x in rows)), begins[non_empty], ends[non_empty])


def context_parallel_indices(structure: PackedStructure, rank: int, num_ranks: int) -> Tensor:
    """Return the indices of a rank's tokens, int64 [n], in the rank's order."""
    segments = [segment.indices.flatten() for segment in _iter_segments(structure, rank, num_ranks)]
    indices = torch.cat([torch.zeros(0, dtype=torch.long), *segments])
    return indices[indices >= 0]


def _build_queries(segment: _Segment) -> _Queries:
    queries, context = segment.indices, segment.rows.context
    row_keys = _index_ranges(segment.rows.starts, segment.ends)
    valid = queries >= 0
    query_index = valid.flatten().cumsum(0).view_as(queries) - 1
    is_uniform = bool(valid.all() and (context >= 0).all() and (segment.begins == segment.begins[0]).all())
    return _Queries(
        rows=torch.where(valid, query_index, 0),
        unpad_index=valid.flatten().nonzero().squeeze(-1),
        keys=torch.cat([context, row_keys], 1).clamp(min=0),
        mask=valid[:0] if is_uniform else _mask(segment, context, queries.shape[1], row_keys.shape[1]),
    )


def _mask(segment: _Segment, context: Tensor, width: int, keys: int) -> Tensor:
    """Return bool [n, 1, width, context + keys]: the context, and causal among the row's own tokens."""
    columns = segment.begins[:, None] + torch.arange(width)
    causal = torch.arange(keys) <= columns[:, :, None]
    has_context = (context >= 0)[:, None].expand(-1, width, -1)
    return torch.cat([has_context, causal], 2)[:, None]


@dataclass(frozen=True, slots=True)
class _QuerySlice:
    """A slice of the rank's queries; its keys are indices into the gathered keys."""

    start: int
    size: int
    queries: _Queries

    def to(self, device: torch.device) -> _QuerySlice:
        return replace(self, queries=_Queries(*(x.to(device) for x in self.queries)))


class ContextParallelLayout:
    """`MovableAttentionLayout` of the `context_parallel_indices`, padded at the end to `size` on all ranks."""

    def __init__(self, structure: PackedStructure, group: ProcessGroup) -> None:
        rank, num_ranks = group.rank(), group.size()
        indices = [context_parallel_indices(structure, other, num_ranks) for other in range(num_ranks)]
        self.indices = indices[rank]
        """int64 [n], indices of the rank's tokens."""
        self.size = max(len(rank_indices) for rank_indices in indices)
        """Largest number of tokens on a rank."""
        self.max_length = structure.max_length
        self._group = group
        self._query_slices = list(
            _query_slices(
                map(_build_queries, _iter_segments(structure, rank, num_ranks)), _gathered_index(indices, self.size)
            )
        )

    def to(self, device: torch.device) -> ContextParallelLayout:
        moved = copy.copy(self)
        moved._query_slices = [part.to(device) for part in self._query_slices]
        return moved

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """See `AttentionLayout.attend`; the output of padding tokens is 0.

        Raises:
            MachineError: a sequence is longer than the model's sliding window, or the model changes its scores.
        """
        if window is not None:
            raise MachineError(
                f"the model has a sliding window of {window} tokens, but a sequence has up to {self.max_length}:"
                " context parallelism does not support that",
                f"set actor.parallel.context=1, or limit the length of sequences to {window}",
            )
        if active_attention_options().changes_scores:
            raise MachineError(
                "the model has soft-capped attention scores or attention sinks: context parallelism does not support"
                " that",
                "set actor.parallel.context=1",
            )
        gathered = all_gather(torch.cat([key, value], 1), self._group)
        keys, values = torch.split(gathered, key.shape[1], 1)
        parts = [_attend(part, query, keys, values, scale) for part in self._query_slices]
        num_padding = query.shape[0] - len(self.indices)
        return F.pad(torch.cat(parts), (0, 0, 0, 0, 0, num_padding)) if parts else _empty_output(query, keys, values)


def _gathered_index(indices: list[Tensor], size: int) -> Tensor:
    """Return each token's index among the gathered tokens, int64 [P]."""
    gathered_index = torch.zeros(sum(len(rank_indices) for rank_indices in indices), dtype=torch.long)
    for rank, rank_indices in enumerate(indices):
        gathered_index[rank_indices] = rank * size + torch.arange(len(rank_indices))
    return gathered_index


def _query_slices(segments: Iterator[_Queries], gathered_index: Tensor) -> Iterator[_QuerySlice]:
    start = 0
    for queries in segments:
        yield _QuerySlice(start, len(queries.unpad_index), queries._replace(keys=gathered_index[queries.keys]))
        start += len(queries.unpad_index)


def _attend(part: _QuerySlice, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    queries = part.queries
    q = query[part.start : part.start + part.size][queries.rows].transpose(1, 2)
    k, v = (x[queries.keys].transpose(1, 2) for x in (keys, values))
    mask: Any = causal_lower_right(q.shape[2], k.shape[2]) if queries.is_uniform else queries.mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, queries.unpad_index)


def _empty_output(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return zeros for a rank without tokens, connected to the keys and values for the collective in backward."""
    return query * 0 + (keys.sum() + values.sum()) * 0
