"""The key-value cache of running requests: one slot each, kept gapless from slot 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quintet.policies.attention import Rows, attend_rows, causal_mask

__all__ = ["DecodeLayout", "PrefillLayout", "Prefix", "SlotCache"]


class SlotCache:
    """Keys and values, `[layers][slots, kv_heads, length, dim]` each, allocated once."""

    def __init__(self, layers: int, slots: int, kv_heads: int, length: int, dim: int, dtype: torch.dtype) -> None:
        self.length = length
        self.keys = [torch.zeros(slots, kv_heads, length, dim, dtype=dtype) for _ in range(layers)]
        self.values = [torch.zeros(slots, kv_heads, length, dim, dtype=dtype) for _ in range(layers)]

    def copy(self, sources: Sequence[int], targets: Sequence[int], used: int) -> None:
        """Copy whole slots, as far as `used` tokens."""
        source, target = torch.tensor(sources), torch.tensor(targets)
        for store in (*self.keys, *self.values):
            store[target, :, :used] = store[source, :, :used]


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens that prompts begin with, their keys and values `[layers][1, kv_heads, length, dim]`."""

    tokens: tuple[int, ...] = ()
    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()


class PrefillLayout:
    """Distinct prompts behind a prefix, packed end to end, written into the given slots."""

    def __init__(self, cache: SlotCache, slots: Sequence[int], lengths: Tensor, prefix: Prefix, past: int) -> None:
        """`lengths` int64 [b], new tokens of each prompt behind the first `past` of the prefix."""
        self._cache = cache
        self._slots = torch.tensor(slots)
        self._rows = Rows(lengths)
        self._prefix = prefix
        self._past = past
        self._mask = causal_mask(self._rows.width, past) if past else None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout.attend`. Padding written behind a short prompt is overwritten by its answer."""
        past = self._past
        span = slice(past, past + self._rows.width)
        before = []
        for store, new in ((self._cache.keys[layer], key), (self._cache.values[layer], value)):
            store[self._slots, :, span] = self._rows.pad(new)
        if past:
            before = [(self._prefix.keys[layer][:, :, :past], self._prefix.values[layer][:, :, :past])]
            for store, known in zip((self._cache.keys[layer], self._cache.values[layer]), before[0], strict=True):
                store[self._slots, :, :past] = known
        return attend_rows(self._rows, (query, key, value), before, self._mask, scale)


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
