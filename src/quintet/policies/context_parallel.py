"""Context parallelism: each rank attends with its own queries to the keys and values of all ranks, which it gathers.

As in Llama 3 (arXiv:2407.21783, section 3.3.2): keys and values have few heads, so gathering them costs little beside
attention, and any structure of who sees whom fits, while a ring would want a mask for each of its turns. Queries are
shared out in zig-zag: each sequence is cut into two parts a rank, and a rank takes one from its beginning and the one
that lies as far from its end, so that all see about as many keys.
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

from quintet.policies.attention import Structure
from quintet.policies.collectives import gather

__all__ = ["ContextLayout", "context_places"]


class _Rows(NamedTuple):
    """Rows of one kind: prefix, stems or branches."""

    starts: Tensor
    """int64 [n], where each begins among all tokens."""
    lengths: Tensor
    """int64 [n]."""
    seen: Tensor
    """int64 [n, k], the tokens before it that each sees; -1 where there is none."""


class _Piece(NamedTuple):
    """Queries of a rank in rows of one kind, and what they see."""

    rows: Tensor
    """int64 [n, width], which of the piece's queries stands there; 0 where none does."""
    back: Tensor
    """int64 [m], where each stands in `rows`."""
    keys: Tensor
    """int64 [n, keys], tokens; 0 where there is none."""
    mask: Tensor
    """Bool [n, 1, width, keys]; [0] where each query sees all keys but those of the queries after it in its row."""

    @property
    def even(self) -> bool:
        """No row is shorter than another, or sees less: there are kernels for that which take no mask."""
        return not len(self.mask)


def _kinds(structure: Structure) -> Iterator[_Rows]:
    """Prefix, stems, branches, as far as there are any."""
    prefix, stems, parents = structure.prefix, structure.stems, structure.parents
    common = torch.arange(prefix)
    behind = prefix
    if prefix:
        yield _Rows(torch.tensor([0]), torch.tensor([prefix]), common[:0].expand(1, 0))
    trunk = common.expand(len(structure.branches), prefix)
    if stems is not None:
        starts = prefix + stems.cumsum(0) - stems
        yield _Rows(starts, stems, common.expand(len(stems), prefix))
        behind += int(stems.sum())
        if parents is not None:
            trunk = torch.cat([trunk, _ranges(starts, stems)[parents]], 1)
    if len(structure.branches):
        yield _Rows(behind + structure.branches.cumsum(0) - structure.branches, structure.branches, trunk)


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """int64 [n, longest]: start, start + 1 … of each row, -1 behind its end."""
    columns = torch.arange(int(lengths.max()) if len(lengths) else 0)
    return torch.where(columns < lengths[:, None], starts[:, None] + columns, -1)


class _Cut(NamedTuple):
    """The tokens from `begins` to `ends`, int64 [n], of each of some rows; none is empty."""

    rows: _Rows
    begins: Tensor
    ends: Tensor

    @property
    def places(self) -> Tensor:
        """int64 [n, width] among all tokens, -1 behind the end of a row."""
        return _ranges(self.rows.starts + self.begins, self.ends - self.begins)


def _cuts(structure: Structure, rank: int, ranks: int) -> Iterator[_Cut]:
    """What one rank computes. In each further row the ranks change places, so that no rank has all the roundings."""
    for rows in _kinds(structure):
        turn = (rank + torch.arange(len(rows.lengths))) % ranks
        for part in (turn, 2 * ranks - 1 - turn):
            begins = rows.lengths * part // (2 * ranks)
            ends = rows.lengths * (part + 1) // (2 * ranks)
            held = ends > begins
            if bool(held.any()):
                yield _Cut(_Rows(*(x[held] for x in rows)), begins[held], ends[held])


def context_places(structure: Structure, rank: int, ranks: int) -> Tensor:
    """The places among all tokens, int64 [n], that a rank holds, in its order."""
    found = [cut.places.flatten() for cut in _cuts(structure, rank, ranks)]
    places = torch.cat([torch.zeros(0, dtype=torch.long), *found])
    return places[places >= 0]


def _piece(cut: _Cut) -> _Piece:
    """The cut's queries, and what they see."""
    queries, before = cut.places, cut.rows.seen
    own = _ranges(cut.rows.starts, cut.ends)
    valid = queries >= 0
    number = valid.flatten().cumsum(0).view_as(queries) - 1
    even = bool(valid.all() and (before >= 0).all() and (cut.begins == cut.begins[0]).all())
    return _Piece(
        rows=torch.where(valid, number, 0),
        back=valid.flatten().nonzero().squeeze(-1),
        keys=torch.cat([before, own], 1).clamp(min=0),
        mask=valid[:0] if even else _mask(cut, before, queries.shape[1], own.shape[1]),
    )


def _mask(cut: _Cut, before: Tensor, width: int, keys: int) -> Tensor:
    """Bool [n, 1, width, before + keys]: all that stands before, and the row's own tokens up to oneself."""
    columns = cut.begins[:, None] + torch.arange(width)
    causal = torch.arange(keys) <= columns[:, :, None]
    there = (before >= 0)[:, None].expand(-1, width, -1)
    return torch.cat([there, causal], 2)[:, None]


@dataclass(frozen=True, slots=True)
class _Share:
    """A piece as the rank computes it: keys by their number among what was gathered."""

    first: int
    size: int
    piece: _Piece

    def to(self, device: torch.device) -> _Share:
        return replace(self, piece=_Piece(*(x.to(device) for x in self.piece)))


class ContextLayout:
    """Attention of the tokens that `context_places` gives a rank, filled up at the end to `size` on all ranks."""

    def __init__(self, structure: Structure, group: ProcessGroup) -> None:
        """Known to all ranks alike."""
        rank, ranks = group.rank(), group.size()
        places = [context_places(structure, each, ranks) for each in range(ranks)]
        self.places = places[rank]
        """int64 [n], of the own tokens among all."""
        self.size = max(len(each) for each in places)
        """Tokens of the rank that has most."""
        self.longest = structure.longest
        self._group = group
        self._shares = list(_shares(map(_piece, _cuts(structure, rank, ranks)), _numbers(places, self.size)))

    def to(self, device: torch.device) -> ContextLayout:
        """See `MovableLayout.to`."""
        moved = copy.copy(self)
        moved._shares = [share.to(device) for share in self._shares]
        return moved

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout.attend`; [size, …] of this rank, 0 behind its own tokens."""
        everyone = gather(torch.cat([key, value], 1), self._group)
        keys, values = torch.split(everyone, key.shape[1], 1)
        parts = [_attend(share, query, keys, values, scale) for share in self._shares]
        missing = query.shape[0] - len(self.places)
        return F.pad(torch.cat(parts), (0, 0, 0, 0, 0, missing)) if parts else _nothing(query, keys, values)


def _numbers(places: list[Tensor], size: int) -> Tensor:
    """Where each token stands among what was gathered, int64 [P]."""
    numbers = torch.zeros(sum(len(each) for each in places), dtype=torch.long)
    for rank, each in enumerate(places):
        numbers[each] = rank * size + torch.arange(len(each))
    return numbers


def _shares(pieces: Iterator[_Piece], numbers: Tensor) -> Iterator[_Share]:
    first = 0
    for piece in pieces:
        yield _Share(first, len(piece.back), piece._replace(keys=numbers[piece.keys]))
        first += len(piece.back)


def _attend(share: _Share, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """The piece's own queries, [m, heads, dim]."""
    piece = share.piece
    q = query[share.first : share.first + share.size][piece.rows].transpose(1, 2)
    k, v = (x[piece.keys].transpose(1, 2) for x in (keys, values))
    mask: Any = causal_lower_right(q.shape[2], k.shape[2]) if piece.even else piece.mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, piece.back)


def _nothing(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """0 for a rank without tokens, on whose way back the others' keys and values are still summed."""
    return query * 0 + (keys.sum() + values.sum()) * 0
