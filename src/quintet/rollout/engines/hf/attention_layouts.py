"""Attention over the KV cache: prefill of packed prompts, and decode with segments that several sequences share.

A running sequence attends to three segments: a prefix that several prompts share, the rest of its prompt, which the
samples of one prompt share, and its own response. Each segment is stored once and read once for all its sequences.

The compiled kernels sum over the positions of a sequence in their order, wherever a segment ends and whatever other
sequences a pass has. So log-probs do not depend on the other requests of an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from quintet.policies.attention import AttentionLayout, PaddedRows, attend_padded_rows, within_window
from quintet.rollout.engines.hf.kv_cache import BLOCK, KVCache

MAX_KERNEL_TOKENS = 4096
"""Tokens of a prompt up to which the compiled kernels prefill it; matrix products are faster beyond."""


class PrefillLayout:
    """`AttentionLayout` of new tokens of several sequences, packed, each attending to its slot's earlier tokens and a
    shared prefix."""

    def __init__(
        self,
        cache: KVCache,
        slots: Sequence[int],
        past: Sequence[int],
        lengths: Sequence[int],
        prefix: tuple[KVCache, int, int] | None = None,
    ) -> None:
        """Row i adds `lengths[i]` tokens behind the first `past[i]` of slot `slots[i]`. `prefix` is the cache, slot and
        length of the prefix of all rows."""
        device = cache.keys[0].device
        self._cache = cache
        self._slots = torch.tensor(slots, device=device)
        self._rows = PaddedRows(torch.tensor(lengths, device=device))
        self._prefix = prefix
        self._max_past = max(past)
        longest = max(before + new for before, new in zip(past, lengths, strict=True))
        self.max_length = longest + (prefix[2] if prefix else 0)
        rows = torch.arange(len(slots), device=device).repeat_interleave(torch.tensor(lengths, device=device))
        counts, self._past = torch.tensor(lengths, device=device), torch.tensor(past, device=device)
        positions = torch.arange(len(rows), device=device) - (counts.cumsum(0) - counts - self._past)[rows]
        self._targets = (self._slots[rows], positions)
        self._kernels = cache.kernels() if self.max_length <= MAX_KERNEL_TOKENS else None
        self._masks: dict[int | None, Tensor | None] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        self._cache.check_shape(key)
        slots, positions = self._targets
        if self._kernels and window is None:
            in_slot = self._cache.kernel_descriptor(layer, slots, self._num_visible)
            segments = [*self._prefix_descriptor(layer), *in_slot]
            return self._kernels.attention(query, key, value, scale, segments)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[slots, :, positions], values[slots, :, positions] = key, value
        before = []
        if self._prefix is not None:
            cache, slot, length = self._prefix
            before.append(tuple(x[layer][slot, None, :, :length] for x in (cache.keys, cache.values)))
        if self._max_past:
            before.append((keys[self._slots, :, : self._max_past], values[self._slots, :, : self._max_past]))
        return attend_padded_rows(self._rows, (query, key, value), before, self._mask(window), scale)  # type: ignore[arg-type]

    @cached_property
    def _num_visible(self) -> Tensor:
        """int64 [N], tokens of its slot that each new token attends to."""
        return self._targets[1] + 1

    @cached_property
    def _prefix_slots_and_lengths(self) -> tuple[Tensor, Tensor]:
        """int64 [N] each: slot and length of the prefix for each new token."""
        _, slot, length = self._prefix or (None, 0, 0)
        return torch.full_like(self._num_visible, slot), torch.full_like(self._num_visible, length)

    def _prefix_descriptor(self, layer: int) -> tuple[int, ...]:
        return self._prefix[0].kernel_descriptor(layer, *self._prefix_slots_and_lengths) if self._prefix else ()

    def _mask(self, window: int | None) -> Tensor | None:
        """bool [1 or b, 1, width, keys], True for keys to attend to; None if plainly causal."""
        if window not in self._masks:
            self._masks[window] = self._build_mask(window)
        return self._masks[window]

    def _build_mask(self, window: int | None) -> Tensor | None:
        past = self._past
        width, prefix = self._rows.width, 0 if self._prefix is None else self._prefix[2]
        if not prefix and not self._max_past and window is None:
            return None
        device = past.device
        causal = torch.ones(width, width, dtype=torch.bool, device=device).tril()
        is_past = torch.arange(self._max_past, device=device) < past[:, None]
        parts = [
            torch.ones(len(past), width, prefix, dtype=torch.bool, device=device),
            is_past[:, None].expand(-1, width, -1),
            causal.expand(len(past), -1, -1),
        ]
        mask = torch.cat(parts, -1)
        if window is not None:
            before, own = torch.arange(prefix + self._max_past, device=device), torch.arange(width, device=device)
            own = prefix + past[:, None] + own
            mask = mask & within_window(own, torch.cat([before.expand(len(past), -1), own], 1), window)
        return mask[:, None]


class SharedSegment:
    """A part of the context that several rows share: a cache, and the slot of it that each row attends to."""

    def __init__(self, cache: KVCache, slots: Sequence[int], lengths: Sequence[int]) -> None:
        """`slots` is each row's slot, `lengths` the number of tokens in each of the slots 0 … ."""
        device = cache.keys[0].device
        self.cache = cache
        self.width = max(lengths)
        self.num_slots = len(lengths)
        self.slots = torch.tensor(slots, device=device)
        """int64 [n], each row's slot."""
        self._lengths = torch.tensor(lengths, device=device)
        self.num_visible = self._lengths[self.slots]
        """int64 [n], tokens that each row attends to."""

    @cached_property
    def order(self) -> Tensor:
        """int64 [n], the rows sorted by slot."""
        return self.slots.argsort(stable=True)

    @cached_property
    def padding_mask(self) -> Tensor | None:
        """bool [n, width], True where a row has no token; None if all slots are full."""
        is_padding = torch.arange(self.width, device=self.slots.device) >= self._lengths[:, None]
        return is_padding[self.slots] if bool(is_padding.any()) else None

    @cached_property
    def group_size(self) -> int:
        """Maximum number of rows of one slot."""
        return int(torch.bincount(self.slots, minlength=self.num_slots).max())

    @cached_property
    def group_index(self) -> Tensor:
        """int64 [n], position of each row among `num_slots` · `group_size`."""
        slots, counts = self.slots, torch.bincount(self.slots, minlength=self.num_slots)
        order = self.order
        rank = torch.empty_like(slots)
        rank[order] = torch.arange(len(slots), device=slots.device) - (counts.cumsum(0) - counts)[slots[order]]
        return slots * self.group_size + rank

    @cached_property
    def grouped_rows(self) -> Tensor:
        """int64 [num_slots · group_size], inverse of `group_index`; 0 for positions without a row."""
        rows = torch.zeros(self.num_slots * self.group_size, dtype=torch.long, device=self.slots.device)
        rows[self.group_index] = torch.arange(len(self.slots), device=self.slots.device)
        return rows

    @cached_property
    def is_grouped(self) -> bool:
        """Whether the rows are already in groups of equal size."""
        n = len(self.slots)
        return len(self.grouped_rows) == n and bool(
            (self.group_index == torch.arange(n, device=self.slots.device)).all()
        )

    def contents(self, tensor: Tensor) -> Tensor:
        """View keys or values of a layer as [num_slots · kv_heads, width, dim]."""
        return tensor[: self.num_slots, :, : self.width].flatten(0, 1)

    def group(self, rows: Tensor, kv_heads: int) -> Tensor:
        """Rearrange [n, heads, d] to [num_slots · kv_heads, group_size · heads / kv_heads, d]."""
        if not self.is_grouped:
            rows = rows.index_select(0, self.grouped_rows)
        heads, dim = rows.shape[1:]
        split = rows.view(self.num_slots, self.group_size, kv_heads, heads // kv_heads, dim)
        return split.transpose(1, 2).reshape(self.num_slots * kv_heads, -1, dim)

    def ungroup(self, grouped: Tensor, kv_heads: int) -> Tensor:
        """Undo `group`: return [n, heads, d]."""
        split = grouped.view(self.num_slots, kv_heads, self.group_size, -1, grouped.shape[-1])
        rows = split.transpose(1, 2).reshape(self.num_slots * self.group_size, -1, grouped.shape[-1])
        return rows if self.is_grouped else rows.index_select(0, self.group_index)


def _round_up(tokens: int, dtype: torch.dtype) -> int:
    """Limit the number of shapes: oneDNN compiles products of other types than float32 for each new shape."""
    return tokens if dtype is torch.float32 else -(-tokens // BLOCK) * BLOCK


class DecodeLayout:
    """`AttentionLayout` of a decode step: n new tokens attend to shared segments and their sequence's response."""

    def __init__(self, responses: KVCache, shared: Sequence[SharedSegment], slots: Tensor, positions: Tensor) -> None:
        """`shared` are the segments before the responses, in the order of positions. `slots` and `positions`, int64 [n]
        each, say where each row's new token is stored. Unless `responses.supports_any_slot`, row i is in slot i."""
        self._responses = responses
        self._shared = shared
        self._slots = slots
        self._positions = positions
        self._num_visible = positions + 1
        self._width = min(_round_up(int(self._num_visible.max()), responses.keys[0].dtype), responses.length)
        self._widths = [*(segment.width for segment in shared), self._width]
        self.max_length = sum(self._widths)
        self._kernels = responses.kernels()
        self._window_masks: dict[int, Tensor] = {}

    @cached_property
    def _padding_mask(self) -> Tensor | None:
        """bool [n, 1, keys], True where a row has no token; None if there is no padding."""
        positions = self._positions
        is_even = int(self._num_visible.min()) == self._width
        if is_even and all(segment.padding_mask is None for segment in self._shared):
            return None
        parts = [
            positions.new_zeros(len(positions), segment.width, dtype=torch.bool)
            if segment.padding_mask is None
            else segment.padding_mask
            for segment in self._shared
        ]
        unused = torch.arange(self._width, device=positions.device) > positions[:, None]
        return torch.cat([*parts, unused], -1)[:, None]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        self._responses.check_shape(key)
        if self._kernels is None or window is not None:
            return self._attend(layer, query, key, value, scale, window)
        segments = [
            segment.cache.kernel_descriptor(layer, segment.slots, segment.num_visible) for segment in self._shared
        ]
        segments.append(self._responses.kernel_descriptor(layer, self._slots, self._num_visible))
        flat = [number for segment in segments for number in segment]
        return self._kernels.attention(query, key, value, scale, flat, self._shared[-1].order)

    def _window_mask(self, window: int) -> Tensor:
        """bool [n, 1, keys], True where a row's token is outside of its window."""
        if window not in self._window_masks:
            start, keys = torch.zeros_like(self._positions)[:, None], []
            for segment in self._shared:
                keys.append(start + torch.arange(segment.width, device=start.device))
                start = start + segment.num_visible[:, None]
            keys.append(start + torch.arange(self._width, device=start.device))
            queries = start + self._positions[:, None]
            self._window_masks[window] = ~within_window(queries, torch.cat(keys, 1), window)
        return self._window_masks[window]

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Attention by matrix products over all rows of a segment."""
        n, heads, dim = query.shape
        kv_heads = key.shape[1]
        keys, values = self._responses.keys[layer], self._responses.values[layer]
        slots, positions = self._slots, self._positions
        keys[slots, :, positions], values[slots, :, positions] = key, value
        # with kernels, rows are in any slots
        rows = slice(n) if self._kernels is None else slots
        keys, values = keys[rows, :, : self._width], values[rows, :, : self._width]
        query = query * scale
        grouped_query = query.reshape(n * kv_heads, heads // kv_heads, dim)
        scores = [
            s.ungroup(s.group(query, kv_heads) @ s.contents(s.cache.keys[layer]).transpose(1, 2), kv_heads)
            for s in self._shared
        ]
        scores.append((grouped_query @ keys.flatten(0, 1).transpose(1, 2)).view(n, heads, -1))
        logits = torch.cat(scores, -1).float()
        if self._padding_mask is not None:
            logits.masked_fill_(self._padding_mask, -torch.inf)
        if window is not None:
            logits.masked_fill_(self._window_mask(window), -torch.inf)
        *shared_weights, response_weights = torch.split(logits.softmax(-1).to(query.dtype), self._widths, -1)
        grouped_weights = response_weights.reshape(n * kv_heads, heads // kv_heads, -1)
        out: Tensor = (grouped_weights @ values.flatten(0, 1)).view(n, heads, dim)
        for s, weights in zip(self._shared, shared_weights, strict=True):
            out = out + s.ungroup(s.group(weights, kv_heads) @ s.contents(s.cache.values[layer]), kv_heads)
        return out


class ConcatenatedLayout:
    """`AttentionLayout` of several layouts one after the other: linear layers process their tokens together, attention
    one by one."""

    def __init__(self, layouts: Sequence[AttentionLayout], sizes: Sequence[int]) -> None:
        """`sizes` is the number of tokens of each layout."""
        self._layouts = layouts
        self._sizes = list(sizes)
        self.max_length = max(layout.max_length for layout in layouts)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        parts = zip(*(torch.split(x, self._sizes) for x in (query, key, value)), strict=True)
        pairs = zip(self._layouts, parts, strict=True)
        return torch.cat([layout.attend(layer, q, k, v, scale, window) for layout, (q, k, v) in pairs])
