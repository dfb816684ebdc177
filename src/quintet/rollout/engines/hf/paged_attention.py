"""Attention of new tokens over the blocks of their sequences, for prefill and decode in one pass.

The compiled kernels walk the block tables. They sum over the positions of a sequence in their order, wherever its
blocks are and whatever other sequences a pass has. So log-probs do not depend on the other requests of an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quintet.config.plan.kv_blocks import BLOCK, num_blocks
from quintet.kernels.decode import DecodeKernels
from quintet.policies.attention import PaddedRows, attend_padded_rows, within_window
from quintet.policies.attention_backends import scaled_dot_product_attention
from quintet.policies.recurrent_layers import Run

MAX_KERNEL_TOKENS = 4096
"""Tokens of a prompt up to which the compiled kernels prefill it; matrix products are faster beyond."""
MAX_GATHERED = 1 << 26
"""Numbers that torch operations gather from the blocks at the same time: 256 MiB in float32."""

IntArray = npt.NDArray[np.int64]
QKV = tuple[Tensor, ...]
"""Query [N, heads, dim], key and value [N, kv_heads, dim] of the new tokens."""


class LayerState(Protocol):
    """State that a group of layers of one kind stores of the tokens before the new ones of a pass.

    Attention keeps keys and values of all tokens, in blocks (`AttentionState`). A sliding window needs only the last
    tokens. What recurrent layers keep is outside of the blocks, see `RecurrentStates`.
    """

    layers: Sequence[int]
    """Layers of the group, by their number in the model."""
    block_bytes: int
    """Memory of a block."""

    def reserve(self, num_blocks: int) -> None:
        """Have memory for blocks 0 … `num_blocks` - 1, whose contents stay as they are."""

    def copy(self, source: int, target: int) -> None:
        """Copy the contents of a block to another one, into which a sequence writes further tokens."""

    def release_memory(self) -> None:
        """Free the memory of all blocks and sequences."""

    def attend(
        self, layer: int, layout: PagedLayout, qkv: tuple[Tensor, Tensor, Tensor], scale: float, window: int | None
    ) -> Tensor:
        """Store the keys and values of new tokens and return their attention; arguments as in `AttentionLayout`."""


class RecurrentLayers(Protocol):
    """States of recurrent layers of the sequences in use."""

    def mix(self, layer: int, layout: PagedLayout, states: Tensor, run: Run) -> Tensor:
        """Return the layer's output [N, hidden] for [N, hidden] of the layout's new tokens, and update the states."""


class PagedLayout:
    """`AttentionLayout` of new tokens of several sequences, packed, each attending to the earlier ones of its
    sequence."""

    def __init__(
        self,
        states: Mapping[int, LayerState],
        tables: npt.NDArray[np.int32],
        rows: IntArray,
        starts: IntArray,
        counts: IntArray,
        order: Tensor | None = None,
        recurrent: RecurrentLayers | None = None,
    ) -> None:
        """`states` are those of the layers. Sequence i, whose blocks are in row `rows[i]` of the `tables`, adds
        `counts[i]` tokens at position `starts[i]`. Prefilled tokens behind the first `MAX_KERNEL_TOKENS` come last, in
        sequences of more than one token. `order`, int64 [n], sorts sequences that add one token each by their
        blocks."""
        self._states = states
        self._recurrent = recurrent
        self.tables = tables
        self.rows, self.starts, self.counts = rows, starts, counts
        self.order = order
        self.num_sequences = len(rows)
        self.max_length = int((starts + counts).max())
        self.num_compiled = _num_leading((starts < MAX_KERNEL_TOKENS) | (counts == 1))
        """Sequences, the first ones, that compiled kernels compute if there are any."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        return self._states[layer].attend(layer, self, (query, key, value), scale, window)

    def mix(self, layer: int, states: Tensor, run: Run) -> Tensor:
        """See `RecurrentLayout.mix`."""
        if self._recurrent is None:
            raise ValueError("the cache has no states of recurrent layers")
        return self._recurrent.mix(layer, self, states, run)

    @cached_property
    def num_compiled_tokens(self) -> int:
        """New tokens of the sequences that compiled kernels compute."""
        return int(self.counts[: self.num_compiled].sum())

    @cached_property
    def kernel_words(self) -> tuple[int, ...]:
        """The last four words of `DecodeKernels.attention`'s `blocks`."""
        tables, (rows, lengths) = self.tables, self._compiled_tokens
        return (tables.ctypes.data, tables.strides[0] // tables.itemsize, rows.ctypes.data, lengths.ctypes.data)

    @cached_property
    def _compiled_tokens(self) -> tuple[IntArray, IntArray]:
        """[n] each: row of the tables and number of visible positions of tokens that the kernels compute."""
        count = self.num_compiled
        rows, positions = _tokens(self.rows[:count], self.starts[:count], self.counts[:count])
        return np.ascontiguousarray(rows), positions + 1

    @cached_property
    def targets(self) -> tuple[Tensor, Tensor]:
        """int64 [N] each: block of each new token, and its place there."""
        rows, positions = _tokens(self.rows, self.starts, self.counts)
        blocks = self.tables[rows, positions // BLOCK].astype(np.int64)
        return torch.from_numpy(blocks), torch.from_numpy(positions % BLOCK)

    @cached_property
    def ends(self) -> IntArray:
        """Index behind the last new token of each sequence."""
        return self.counts.cumsum()


def attend_compiled(
    kernels: DecodeKernels, addresses: tuple[int, ...], layout: PagedLayout, qkv: QKV, scale: float
) -> Tensor:
    """Store keys and values of the tokens that the kernels compute, and return their attention. `addresses` are the
    first four words of `DecodeKernels.attention`'s `blocks`."""
    query, key, value = qkv
    return kernels.attention(query, key, value, scale, (*addresses, *layout.kernel_words), layout.order)


def write(layout: PagedLayout, keys: Tensor, values: Tensor, qkv: QKV, start: int) -> None:
    """Store the keys and values of the tokens from `start` on in those of a layer, [blocks, kv_heads, BLOCK, dim]."""
    blocks, offsets = (x[start:].to(keys.device) for x in layout.targets)
    keys[blocks, :, offsets] = qkv[1][start:]
    values[blocks, :, offsets] = qkv[2][start:]


def attend_gathered(
    layout: PagedLayout, keys: Tensor, values: Tensor, qkv: QKV, scale: float, window: int | None, first: int
) -> Tensor:
    """Return the attention, by torch operations, of the sequences from `first` on, whose keys and values are stored in
    those of a layer, [blocks, kv_heads, BLOCK, dim]."""
    out = list[Tensor]()
    for part in _parts(layout, first, keys[0, :, 0].numel()):
        tokens = slice(int(layout.ends[part.start] - layout.counts[part.start]), int(layout.ends[part.stop - 1]))
        new = tuple(x[tokens] for x in qkv)
        out.append(_attend_part(layout, part, (keys, values), new, scale, window))
    return torch.cat(out)


def _parts(layout: PagedLayout, first: int, numbers_per_token: int) -> Iterator[slice]:
    """Yield sequences that are padded to the longest of them together: those with one new token, and others."""
    lengths = layout.starts + layout.counts
    while first < layout.num_sequences:
        is_single = layout.counts[first:] == 1
        stop = first + _num_leading(is_single == is_single[0])
        longest = np.maximum.accumulate(lengths[first:stop])
        numbers = longest * np.arange(1, stop - first + 1) * numbers_per_token
        stop = first + max(1, int((numbers <= MAX_GATHERED).sum()))
        yield slice(first, stop)
        first = stop


def _attend_part(
    layout: PagedLayout, part: slice, stored: tuple[Tensor, Tensor], qkv: QKV, scale: float, window: int | None
) -> Tensor:
    device, starts, counts = qkv[0].device, layout.starts[part], layout.counts[part]
    padded = PaddedRows(torch.from_numpy(counts).to(device))
    if window is None and not starts.any() and padded.width > 1:
        return attend_padded_rows(padded, qkv, [], None, scale)
    ends = torch.from_numpy(starts + counts).to(device)
    blocks = layout.tables[layout.rows[part], : num_blocks(int(ends.max()))].astype(np.int64)
    places = torch.arange(blocks.shape[1] * BLOCK, device=device)
    queries = torch.from_numpy(starts).to(device)[:, None] + torch.arange(padded.width, device=device)
    mask = places <= queries[..., None]
    if window is not None:
        mask &= within_window(queries, places, window)
    unused = (places >= ends[:, None])[:, None, :, None]
    indices = torch.from_numpy(blocks).to(device)
    # what unused places contain may not be numbers
    keys, values = (_gather(x, indices).masked_fill_(unused, 0) for x in stored)
    return padded.unpad(scaled_dot_product_attention(padded.pad(qkv[0]), keys, values, mask[:, None], scale))


def _num_leading(flags: npt.NDArray[np.bool_]) -> int:
    """Return the number of first elements that are True."""
    return len(flags) if flags.all() else int(flags.argmin())


def _tokens(rows: IntArray, starts: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """Return the row and the position of each token, int64 [N] each."""
    if len(counts) == counts.sum():
        return rows, starts
    before = counts.cumsum() - counts
    positions = np.arange(counts.sum()) + np.repeat(starts - before, counts)
    return np.repeat(rows, counts), positions


def _gather(stored: Tensor, blocks: Tensor) -> Tensor:
    """Return keys or values [b, kv_heads, length, dim] of the `blocks`, int64 [b, m], of each sequence."""
    gathered = stored[blocks]
    return gathered.permute(0, 2, 1, 3, 4).flatten(2, 3)
