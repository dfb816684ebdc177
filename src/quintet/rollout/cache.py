"""The key-value cache of running requests: one slot each, kept gapless from slot 0."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["DecodeLayout", "PrefillLayout", "SlotCache"]


class SlotCache:
    """Keys and values, `[layers][2][slots, kv_heads, length, dim]`, allocated once."""

    def __init__(self, layers: int, slots: int, kv_heads: int, length: int, dim: int, dtype: torch.dtype) -> None:
        self.length = length
        self.keys = [torch.zeros(slots, kv_heads, length, dim, dtype=dtype) for _ in range(layers)]
        self.values = [torch.zeros(slots, kv_heads, length, dim, dtype=dtype) for _ in range(layers)]

    def move(self, sources: list[int], targets: list[int], used: int) -> None:
        """Copy whole slots, as far as `used` tokens."""
        for store in (*self.keys, *self.values):
            store[targets, :, :used] = store[sources, :, :used]


class PrefillLayout:
    """New prompts, packed end to end, written into the slots from `first` on.

    All of them have `past` tokens in their slots already: the shared prefix.
    """

    def __init__(self, cache: SlotCache, first: int, lengths: Tensor, past: int) -> None:
        """`lengths` int64 [b], new tokens of each prompt."""
        self._cache = cache
        rows, width = len(lengths), int(lengths.max())
        columns = torch.arange(width)
        valid = columns < lengths[:, None]
        starts = lengths.cumsum(0) - lengths
        self._shape = (rows, width)
        self._into_rows = (starts[:, None] + columns).masked_fill(~valid, 0).flatten()
        self._from_rows = valid.flatten().nonzero().squeeze(-1)
        self._slots = slice(first, first + rows)
        self._span = slice(past, past + width)
        self._end = past + width
        self._mask = torch.ones(width, past + width, dtype=torch.bool).tril(past)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout.attend`. Padding written behind a short prompt is overwritten by its answer."""
        q, k, v = (x[self._into_rows].view(*self._shape, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        keys, values = self._cache.keys[layer][self._slots], self._cache.values[layer][self._slots]
        keys[:, :, self._span] = k
        values[:, :, self._span] = v
        out = F.scaled_dot_product_attention(
            q, keys[:, :, : self._end], values[:, :, : self._end], attn_mask=self._mask, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(-1, *out.shape[1::2])[self._from_rows]


class DecodeLayout:
    """One new token for each of the slots 0 … n-1, at its own place."""

    def __init__(self, cache: SlotCache, places: Tensor) -> None:
        """`places` int64 [n]: where each slot's token goes."""
        self._cache = cache
        self._places = places
        self._rows = torch.arange(len(places))
        self._end = int(places.max()) + 1
        self._mask = (torch.arange(self._end) <= places[:, None])[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout.attend`."""
        n = len(self._places)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._rows, :, self._places] = key
        values[self._rows, :, self._places] = value
        out = F.scaled_dot_product_attention(
            query[:, :, None],
            keys[:n, :, : self._end],
            values[:n, :, : self._end],
            attn_mask=self._mask,
            scale=scale,
            enable_gqa=True,
        )
        return out[:, :, 0]
