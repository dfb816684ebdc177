"""One attention function for every `transformers` decoder: the model's code stays theirs.

A model loaded with `attn_implementation=ATTENTION` hands its queries, keys and values to the
`layout` given to its forward pass. A layout knows how tokens lie in memory: packed end to end for
training, in the slots of a cache for generation. No attention mask is built by the model.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ATTENTION", "Layout", "PackedLayout", "register_attention"]

ATTENTION = "quintet"


class Layout(Protocol):
    """Attention over tokens that lie as this layout says."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [N, heads, dim], key and value [N, kv_heads, dim] to [N, heads, dim]."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    layout: Layout,
    **_: object,
) -> tuple[Tensor, None]:
    layer: int = module.layer_idx  # type: ignore[assignment]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return layout.attend(layer, q, k, v, scaling)[None], None


def register_attention() -> str:
    """Make `ATTENTION` known to transformers; returns the name to give as `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)
    return ATTENTION


class PackedLayout:
    """Sequences end to end, all starting with the same `prefix` tokens, which are computed once.

    The tokens are `[prefix][rest of sequence 1][rest of sequence 2]…`; every rest sees the prefix
    and itself, causally. Linear layers so meet no padding and no prompt twice; only the attention
    product itself is padded, to the longest rest.
    """

    def __init__(self, lengths: Tensor, prefix: int = 0) -> None:
        """`lengths` int64 [B], tokens of each rest; `prefix` in tokens."""
        self._prefix = prefix
        width = int(lengths.max())
        starts = lengths.cumsum(0) - lengths
        columns = torch.arange(width)
        valid = columns < lengths[:, None]
        self._shape = (len(lengths), width)
        self._ragged = not bool(valid.all())
        self._into_rows = (starts[:, None] + columns).masked_fill(~valid, 0).flatten()
        self._from_rows = valid.flatten().nonzero().squeeze(-1)
        ones = torch.ones(width, prefix + width, dtype=torch.bool)
        self._mask = ones.tril(prefix) if prefix else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout.attend`."""
        p = self._prefix
        rows = self._attend_rests(query, key, value, scale)
        if not p:
            return rows
        q, k, v = (x[:p].transpose(0, 1)[None] for x in (query, key, value))
        head = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return torch.cat([head[0].transpose(0, 1), rows])

    def _attend_rests(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        p = self._prefix
        q, k, v = (self._rows(x[p:]) for x in (query, key, value))
        if p:
            k, v = (self._behind_prefix(x[:p], rest) for x, rest in ((key, k), (value, v)))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self._mask, is_causal=not p, scale=scale, enable_gqa=True
        )
        packed = out.transpose(1, 2).reshape(-1, *out.shape[1::2])
        return packed.index_select(0, self._from_rows) if self._ragged else packed

    def _rows(self, packed: Tensor) -> Tensor:
        """[N, heads, dim] to [B, heads, width, dim]."""
        rows = packed.index_select(0, self._into_rows) if self._ragged else packed
        return rows.view(*self._shape, *packed.shape[1:]).transpose(1, 2)

    def _behind_prefix(self, prefix: Tensor, rest: Tensor) -> Tensor:
        """Put the prefix before every row, [B, heads, prefix + width, dim]."""
        shared = prefix.transpose(0, 1)[None].expand(len(rest), -1, -1, -1)
        return torch.cat([shared, rest], dim=2)
