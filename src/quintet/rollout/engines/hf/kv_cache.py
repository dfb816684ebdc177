"""Keys and values of prompts and responses, in slots that attention reads in place."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quintet import hardware
from quintet.errors import ConfigError
from quintet.kernels.decode import DecodeKernels, decode_kernels

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 32
"""Tokens by which the slots of a cache grow, at least."""


def key_dim(config: Any) -> int:
    """Return the width of a head's keys, and values up to it, from the configuration of a text model."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Dimensions, type and device of a model's keys and values."""

    layers: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def from_model(cls, model: torch.nn.Module) -> CacheShape:
        """Read the shape from a transformers decoder."""
        config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        dim = key_dim(config)
        weight = next(model.parameters())
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return cls(config.num_hidden_layers, kv_heads, dim, weight.dtype, weight.device)


class KVCache:
    """Keys and values, `[layers][slots, kv_heads, length, dim]` each. Slots and length grow on demand."""

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self.slots = 0
        self.length = 0
        self.keys: list[Tensor] = [self._empty(0, 0) for _ in range(shape.layers)]
        self.values: list[Tensor] = [self._empty(0, 0) for _ in range(shape.layers)]
        self._descriptors = self._kernel_descriptors()

    def reserve(self, slots: int, length: int) -> None:
        """Grow to at least `slots` slots of `length` tokens; existing contents are kept."""
        if slots <= self.slots and length <= self.length:
            return
        if slots > self.slots:
            slots = max(slots, min(2 * self.slots, self.slots + 64))
        if length > self.length:
            length = max(-(-length // BLOCK) * BLOCK, min(2 * self.length, self.length + 8 * BLOCK))
        before = (self.slots, self.length)
        self.slots, self.length = max(slots, self.slots), max(length, self.length)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = new = self._empty(self.slots, self.length)
                new[: before[0], :, : before[1]] = old
        self._descriptors = self._kernel_descriptors()

    def copy_from(
        self, targets: Sequence[int], other: KVCache, sources: Sequence[int], count: int, *, offset: int = 0
    ) -> None:
        """Copy the first `count` tokens of the `sources` slots of another cache, or of this one, to position `offset`
        of the `targets` slots."""
        if not count:
            return
        device = self._shape.device
        target, source = torch.tensor(targets, device=device), torch.tensor(sources, device=device)
        for own_tensors, other_tensors in ((self.keys, other.keys), (self.values, other.values)):
            for target_tensor, source_tensor in zip(own_tensors, other_tensors, strict=True):
                target_tensor[target, :, offset : offset + count] = source_tensor[source, :, :count]

    def check_shape(self, key: Tensor) -> None:
        """Raise ValueError unless keys [n, kv_heads, dim] fit into the cache: kernels write without checks."""
        if key.shape[1:] != (self._shape.kv_heads, self._shape.dim):
            raise ValueError(
                f"the model has {key.shape[1]} key heads of {key.shape[2]} numbers, but its configuration"
                f" {self._shape.kv_heads} of {self._shape.dim}"
            )

    def kernels(self) -> DecodeKernels | None:
        """Return the compiled kernels for this type and device, if there are any."""
        return decode_kernels(self._shape.dtype, self._shape.device.type)

    @property
    def supports_any_slot(self) -> bool:
        """Whether attention finds a row in any slot; otherwise row i has to be in slot i."""
        return self.kernels() is not None

    def kernel_descriptor(self, layer: int, slots: Tensor, num_visible: Tensor) -> tuple[int, ...]:
        """Describe a segment to `DecodeKernels.attention`: token i attends to the first `num_visible[i]` tokens of
        slot `slots[i]`, int64 [n] each."""
        return (*self._descriptors[layer], slots.data_ptr(), num_visible.data_ptr())

    def _kernel_descriptors(self) -> list[tuple[int, ...]]:
        """Addresses of each layer's keys and values, and the strides of slots and heads in elements."""
        both = zip(self.keys, self.values, strict=True)
        return [(keys.data_ptr(), values.data_ptr(), *keys.stride()[:2]) for keys, values in both]

    def _empty(self, slots: int, length: int) -> Tensor:
        shape = self._shape
        return zeros((slots, shape.kv_heads, length, shape.dim), shape.dtype, shape.device)


HUGE_PAGE = 2 << 20
"""Size of a huge page in bytes (x86-64 and arm64 Linux)."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros, on a CPU under Linux in huge pages if it fills at least two."""
    count = math.prod(shape)
    if device.type != "cpu" or count * dtype.itemsize < 2 * HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # kernels without huge pages: small pages work as well
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(memory, dtype=dtype)
    start = -buffer.data_ptr() % HUGE_PAGE // dtype.itemsize
    return buffer[start : start + count].view(*shape)


KEY = "rollout.engine_options.memory_share"
CACHE_SLOTS_PER_REQUEST = 2.0
"""One for the running request, one for prompts that stay in the prefix cache."""


def max_seqs_in_memory(
    model: PreTrainedModel,
    max_model_len: int,
    max_num_seqs: int,
    memory_share: float | None,
    dtype: torch.dtype | None = None,
) -> int:
    """Return the number of requests, up to `max_num_seqs`, for which weights and KV cache fit into `memory_share` of
    the memory of the model's device. `dtype` is the cache's data type (default: the model's).

    Raises:
        ConfigError: not a single request fits.
    """
    if memory_share is None:
        return max_num_seqs
    memory = _total_memory(model.device)
    per_request = CACHE_SLOTS_PER_REQUEST * _kv_bytes(model, max_model_len, dtype or model.dtype)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    fitting = int((memory_share * memory - weights) / per_request)
    if fitting < 1:
        needed = math.ceil((weights + per_request) / memory * 1000) / 1000
        shorter = "shorten rollout.max_prompt_tokens + rollout.max_response_tokens"
        raise ConfigError(
            f"{KEY} = {memory_share:g}: weights and one request of {max_model_len} tokens need {needed:g} of "
            f"{memory / 2**30:.0f} GiB",
            key=KEY,
            value=memory_share,
            hint=f"at least: {KEY}={needed:g}, or {shorter}" if needed <= 1 else shorter,
        )
    return min(fitting, max_num_seqs)


def _total_memory(device: torch.device) -> int:
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[1])
    return hardware.memory_bytes()


def _kv_bytes(model: PreTrainedModel, max_model_len: int, dtype: torch.dtype) -> int:
    """Size of the keys and values of one request."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * key_dim(config) * max_model_len * dtype.itemsize)
