"""One attention function for every `transformers` decoder: the model's code stays theirs.

A model loaded with `attn_implementation=ATTENTION` hands its queries, keys and values to the
`layout` given to its forward pass. A layout knows how tokens lie in memory: packed end to end for
training, in the slots of a cache for generation. No attention mask is built by the model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintet.errors import MachineError
from quintet.policies.attention_kernels import allows_flash, attention_kernel, computed_by, product
from quintet.policies.varlen import Varlen, takes_flash

__all__ = [
    "ATTENTION",
    "Layout",
    "MovableLayout",
    "PackedLayout",
    "Rows",
    "Structure",
    "attend_rows",
    "causal_mask",
    "register_attention",
]

ATTENTION = "quintet"


class Layout(Protocol):
    """Attention over tokens that lie as this layout says."""

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [N, heads, dim], key and value [N, kv_heads, dim] to [N, heads, dim]."""
        ...


class MovableLayout(Layout, Protocol):
    """A layout whose tensors lie on some device."""

    def to(self, device: torch.device) -> Self:
        """The same there."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    layout: Layout,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    if sliding_window is not None and layout.longest > sliding_window:
        raise MachineError(
            f"the model attends to {sliding_window} tokens back, and a sequence has {layout.longest}",
            f"keep prompt and answer together within {sliding_window} tokens",
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    with computed_by(attention_kernel(module)):
        return layout.attend(layer, q, k, v, scaling)[None], None


def register_attention() -> str:
    """Make `ATTENTION` known to transformers; returns the name to give as `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)
    return ATTENTION


class Rows:
    """Ragged sequences end to end, and the same as rows padded to the longest."""

    def __init__(self, lengths: Tensor) -> None:
        """`lengths` int64 [B], each at least 1."""
        self.width = int(lengths.max())
        columns = torch.arange(self.width)
        self.valid = columns < lengths[:, None]
        self.ragged = not bool(self.valid.all())
        self._shape = (len(lengths), self.width)
        starts = lengths.cumsum(0) - lengths
        self._into = (starts[:, None] + columns).masked_fill(~self.valid, 0).flatten()
        self._back = self.valid.flatten().nonzero().squeeze(-1)

    def to(self, device: torch.device) -> Self:
        """The same there."""
        moved = copy.copy(self)
        moved.valid, moved._into, moved._back = (x.to(device) for x in (self.valid, self._into, self._back))
        return moved

    def pad(self, packed: Tensor) -> Tensor:
        """[N, heads, dim] to [B, heads, width, dim]."""
        rows = packed.index_select(0, self._into) if self.ragged else packed
        return rows.view(*self._shape, *packed.shape[1:]).transpose(1, 2)

    def unpad(self, rows: Tensor) -> Tensor:
        """[B, heads, width, dim] to [N, heads, dim]."""
        packed = rows.transpose(1, 2).reshape(-1, rows.shape[1], rows.shape[3])
        return packed.index_select(0, self._back) if self.ragged else packed


@dataclass(frozen=True, slots=True)
class Structure:
    """How packed sequences begin alike, see `PackedLayout`: `prefix` in tokens, `stems` int64 [S] and `branches`
    int64 [B] the tokens of each, `parents` int64 [B] the stem of each branch."""

    branches: Tensor
    prefix: int = 0
    stems: Tensor | None = None
    parents: Tensor | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, or a little more."""
        return self.prefix + sum(
            int(each.max()) for each in (self.stems, self.branches) if each is not None and len(each)
        )


class PackedLayout:
    """Sequences end to end; what several of them begin with is computed once.

    The tokens are `[prefix][stem 1]…[stem S][branch 1]…[branch B]`: all sequences start with the
    prefix, each goes on with one of the stems (samples of one prompt share theirs) and ends with a
    branch of its own. Every token sees what comes before it in its sequence. Linear layers so meet
    no padding and no prompt twice; only the attention product is padded, to the longest row.
    """

    def __init__(
        self, branches: Tensor, prefix: int = 0, stems: Tensor | None = None, parents: Tensor | None = None
    ) -> None:
        """`branches` int64 [B], tokens of each; `prefix` in tokens; `stems` int64 [S], tokens of each;
        `parents` int64 [B], the stem of each branch. Without stems, branches follow the prefix.
        """
        self.structure = Structure(branches, prefix, stems, parents)
        self._sizes = [prefix, 0 if stems is None else int(stems.sum()), int(branches.sum())]
        self._trunk = Rows(torch.tensor([prefix])) if prefix else None
        self._stems = None if stems is None else Rows(stems)
        self._branches = Rows(branches) if len(branches) else None
        self._parents = parents
        self._varlen: Varlen | None = None
        self._stem_mask = causal_mask(self._stems.width, prefix) if self._stems else None
        self._branch_mask = self._mask_of_branches(self._branches.width, prefix) if self._branches else None
        self.longest = self.structure.longest

    def to(self, device: torch.device) -> Self:
        """The same there."""
        moved = copy.copy(self)
        moved._trunk, moved._stems, moved._branches = (
            rows and rows.to(device) for rows in (self._trunk, self._stems, self._branches)
        )
        moved._parents, moved._stem_mask, moved._branch_mask = (
            None if x is None else x.to(device) for x in (self._parents, self._stem_mask, self._branch_mask)
        )
        return moved

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout.attend`. By flash-attn on a GPU where it is installed, else by torch's own attention of rows."""
        if takes_flash(query) and allows_flash():
            return self._on(query.device).attend(query, key, value, scale)
        trunk, stems, branches = zip(*(torch.split(x, self._sizes) for x in (query, key, value)), strict=True)
        out: list[Tensor] = []
        before: list[tuple[Tensor, Tensor]] = []
        if self._trunk:
            out.append(attend_rows(self._trunk, trunk, before, None, scale))
            before.append((self._trunk.pad(trunk[1]), self._trunk.pad(trunk[2])))
        if self._stems:
            out.append(attend_rows(self._stems, stems, before, self._stem_mask, scale))
            if self._parents is not None:
                key, value = (self._stems.pad(x).index_select(0, self._parents) for x in stems[1:])
                before.append((key, value))
        if self._branches:
            out.append(attend_rows(self._branches, branches, before, self._branch_mask, scale))
        return torch.cat(out) if len(out) > 1 else out[0]

    def _on(self, device: torch.device) -> Varlen:
        """For flash-attn, made at the first layer and kept for the others."""
        if self._varlen is None or self._varlen.queries.device != device:
            whole = self.structure
            self._varlen = Varlen.of(whole.prefix, whole.stems, whole.parents, whole.branches).to(device)
        return self._varlen

    def words(self, heads: int, kv_heads: int, dim: int) -> Tensor:
        """The same for the kernels of training, int64: heads, kv_heads, dim, prefix, number of clusters, 0; of each
        cluster start and length of its stem and its branches' first and last but one number; of each branch start and
        length. The prefix is a cluster of its own, the first."""
        prefix, stems, branches = self.structure.prefix, self.structure.stems, self.structure.branches
        starts = prefix + (0 if stems is None else int(stems.sum())) + branches.cumsum(0) - branches
        spans = torch.stack([starts, branches], 1)
        ends = torch.arange(1, len(branches) + 1)
        clusters = torch.stack([torch.zeros_like(ends), torch.zeros_like(ends), ends - 1, ends], 1)
        if stems is not None and (parents := self.structure.parents) is not None:
            spans = spans[torch.argsort(parents, stable=True)]
            counts = torch.bincount(parents, minlength=len(stems))
            ends = counts.cumsum(0)
            clusters = torch.stack([prefix + stems.cumsum(0) - stems, stems, ends - counts, ends], 1)
        if prefix:
            clusters = torch.cat([torch.tensor([[0, prefix, 0, 0]]), clusters])
        head = torch.tensor([heads, kv_heads, dim, prefix, len(clusters), 0])
        return torch.cat([head, clusters.flatten(), spans.flatten()])

    def _mask_of_branches(self, width: int, prefix: int) -> Tensor | None:
        """What branches see, bool [width, keys] or [B, 1, width, keys]; None for themselves alone."""
        if self._stems is None or self._parents is None:
            return causal_mask(width, prefix) if prefix else None
        plain = causal_mask(width, prefix + self._stems.width)
        if not self._stems.ragged:
            return plain
        seen = F.pad(self._stems.valid[self._parents], (prefix, width), value=True)
        return plain & seen[:, None, None]


def causal_mask(width: int, before: int) -> Tensor:
    """Bool [width, before + width]: everything before, and oneself causally."""
    return torch.ones(width, before + width, dtype=torch.bool).tril(before)


def attend_rows(
    rows: Rows,
    packed: tuple[Tensor, ...],
    before: list[tuple[Tensor, Tensor]],
    mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Attention of rows over what stands before them and themselves, [N, heads, dim].

    `packed` are query, key and value, [N, heads, dim] each; `before` the keys and values of earlier
    parts, [B or 1, heads, length, dim]; `mask` bool [width, keys] or [B, 1, width, keys], None for
    plain causal attention among the rows' own tokens.
    """
    q, k, v = (rows.pad(x) for x in packed)
    if before:
        count = len(q)
        k = torch.cat([*(x.expand(count, -1, -1, -1) for x, _ in before), k], dim=2)
        v = torch.cat([*(x.expand(count, -1, -1, -1) for _, x in before), v], dim=2)
    return rows.unpad(product(q, k, v, mask, scale))
