"""Keys and values of the layers with full attention, in blocks."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quintet.config.plan.kv_blocks import BLOCK, attention_layers
from quintet.kernels.decode import decode_kernels
from quintet.policies.attention_backends import active_attention_options
from quintet.rollout.engines.hf.paged_attention import PagedLayout, attend_compiled, attend_gathered, write

HUGE_PAGE = 2 << 20
"""Size of a huge page in bytes (x86-64 and arm64 Linux)."""
MIN_GROWTH = 64
"""Blocks by which memory that cannot be reserved ahead grows, at least."""


def key_dim(config: Any) -> int:
    """Return the width of a head's keys, and values up to it, from the configuration of a text model."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Dimensions, type and device of a model's keys and values."""

    layers: Sequence[int]
    """Layers with attention, by their number in the model."""
    kv_heads: int
    """The largest number of key heads of a layer."""
    dim: int
    """The largest width of a key head."""
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_model(cls, model: torch.nn.Module, dtype: torch.dtype | None = None) -> CacheShape:
        """Read the shape from a transformers decoder; the default `dtype` is the model's."""
        config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        weight = next(model.parameters())
        layers = getattr(config, "per_layer_config", None) or [config]
        kv_heads = max(getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads for layer in layers)
        dim = max(map(key_dim, layers))
        with_keys = attention_layers(getattr(config, "layer_types", None), config.num_hidden_layers)
        return cls(with_keys, kv_heads, dim, dtype or weight.dtype, weight.device)

    @property
    def block_bytes(self) -> int:
        """Size of a block of all layers."""
        return 2 * len(self.layers) * self.kv_heads * BLOCK * self.dim * self.dtype.itemsize


class AttentionState:
    """`LayerState` of full attention: keys and values of all tokens.

    On a CPU under Linux the address space of all blocks is reserved at once, and a block takes memory from its first
    use on. Elsewhere the memory grows on demand and existing blocks are copied.
    """

    def __init__(self, shape: CacheShape, max_blocks: int) -> None:
        self.shape = shape
        self.layers = shape.layers
        self._index = {layer: index for index, layer in enumerate(shape.layers)}
        self.block_bytes = shape.block_bytes
        self._max_blocks = max_blocks
        self._kernels = decode_kernels(shape.dtype, shape.device.type)
        self._mapping: mmap.mmap | None = None
        self._storage = self._empty(0)
        self._addresses: dict[int, tuple[int, ...]] = {}

    def reserve(self, num_blocks: int) -> None:
        if num_blocks > len(self._storage):
            self._grow()

    def copy(self, source: int, target: int) -> None:
        self._storage[target] = self._storage[source]

    def release_memory(self) -> None:
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
        else:
            self._set_storage(self._empty(0))

    def keys(self, layer: int) -> Tensor:
        """View the keys of a layer, [blocks, kv_heads, BLOCK, dim]."""
        return self._storage[:, self._index[layer], 0]

    def values(self, layer: int) -> Tensor:
        """View the values of a layer, [blocks, kv_heads, BLOCK, dim]."""
        return self._storage[:, self._index[layer], 1]

    def attend(
        self, layer: int, layout: PagedLayout, qkv: tuple[Tensor, Tensor, Tensor], scale: float, window: int | None
    ) -> Tensor:
        """See `LayerState.attend`: by the compiled kernels as far as they compute the layout's tokens."""
        heads, dim = self._checked_shape(qkv[1])
        is_plain = window is None and not active_attention_options().changes_scores
        is_plain = is_plain and (heads, dim) == (self.shape.kv_heads, self.shape.dim)
        kernels, count = self._kernels, layout.num_compiled if is_plain else 0
        if kernels is not None and count == layout.num_sequences:
            return attend_compiled(kernels, self._addresses[layer], layout, qkv, scale)
        keys, values = (x[:, :heads, :, :dim] for x in (self.keys(layer), self.values(layer)))
        if kernels is None or not count:
            write(layout, keys, values, qkv, 0)
            return attend_gathered(layout, keys, values, qkv, scale, window, 0)
        size = layout.num_compiled_tokens
        write(layout, keys, values, qkv, size)
        first = attend_compiled(kernels, self._addresses[layer], layout, tuple(x[:size] for x in qkv), scale)
        return torch.cat([first, attend_gathered(layout, keys, values, qkv, scale, window, count)])

    def _checked_shape(self, key: Tensor) -> tuple[int, int]:
        """Return heads and width of keys [n, kv_heads, dim], of which a layer may have fewer than others; raise
        ValueError unless they fit into the cache: kernels write without checks."""
        heads, dim = key.shape[1:]
        if heads > self.shape.kv_heads or dim > self.shape.dim:
            raise ValueError(
                f"the model has {heads} key heads of {dim} numbers, but its configuration {self.shape.kv_heads} of"
                f" {self.shape.dim}"
            )
        return heads, dim

    def _empty(self, blocks: int) -> Tensor:
        shape = self.shape
        return torch.zeros(
            (blocks, len(shape.layers), 2, shape.kv_heads, BLOCK, shape.dim), dtype=shape.dtype, device=shape.device
        )

    def _set_storage(self, storage: Tensor) -> None:
        self._storage = storage
        self._addresses = {
            layer: (self.keys(layer).data_ptr(), self.values(layer).data_ptr(), storage.stride(0), BLOCK)
            for layer in self.layers
        }

    def _grow(self) -> None:
        before = self._storage
        if not len(before) and (reserved := self._reserve_addresses()) is not None:
            self._set_storage(reserved)
            return
        more = max(MIN_GROWTH, len(before) // 2)
        storage = self._empty(min(self._max_blocks, len(before) + more))
        storage[: len(before)] = before
        self._set_storage(storage)

    def _reserve_addresses(self) -> Tensor | None:
        """Return the storage of all blocks, whose pages are zero and take no memory until they are used, or None."""
        size = self._max_blocks * self.block_bytes
        if self.shape.device.type != "cpu" or not hasattr(mmap, "MAP_NORESERVE"):
            return None
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_NORESERVE
        try:
            self._mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=flags)
        except (OSError, ValueError, OverflowError):  # a limit of the address space
            return None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # kernels without huge pages: small pages work as well
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(self._mapping, dtype=self.shape.dtype)
        start = -buffer.data_ptr() % HUGE_PAGE // self.shape.dtype.itemsize
        count = size // self.shape.dtype.itemsize
        return buffer[start : start + count].view(self._max_blocks, *self._storage.shape[1:])
