"""Which way attention is computed, where somebody names one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quintet.errors import ConfigError

__all__ = ["allows_flash", "attention_kernel", "computed_by", "product", "use_attention"]

KEY = "policy.attention"
PLAIN, TORCH, FLASH = "eager", "sdpa", "flash_attention_2"
FLASH_FIRST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_named: ContextVar[str | None] = ContextVar("attention", default=None)


def use_attention(model: nn.Module, kind: str | None) -> None:
    """Have the model's attention computed by `eager`, plain matrix products, `sdpa`, torch's own choice, or
    `flash_attention_2`, torch's kernels of that where masks allow them; None leaves it to what is fastest.

    Raises:
        ConfigError: there is no such kernel here.
    """
    if kind is None:
        return
    if kind not in (PLAIN, TORCH, FLASH):
        hint = f"take {TORCH}, {PLAIN} or, on a GPU, {FLASH}; null takes the fastest"
        raise ConfigError(f"{KEY} = {kind}: no such kernels here", key=KEY, value=kind, hint=hint)
    if kind == FLASH and next(model.parameters()).device.type != "cuda":
        told = f"{KEY} = {kind}: its kernels run on a GPU, and this model is on the CPU"
        raise ConfigError(told, key=KEY, value=kind, hint=f"take {TORCH}, or null for the fastest")
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.attention_kernel = kind  # type: ignore[assignment]


def attention_kernel(module: nn.Module) -> str | None:
    """What was named for a layer's attention; None where nothing was."""
    kind = getattr(module, "attention_kernel", None)
    return kind if isinstance(kind, str) else None


@contextmanager
def computed_by(kind: str | None) -> Iterator[None]:
    """Have products inside computed that way."""
    before = _named.set(kind)
    try:
        yield
    finally:
        _named.reset(before)


def allows_flash() -> bool:
    """Whether nobody asked for another way."""
    return _named.get() in (None, FLASH)


def product(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(query keyᵀ · scale) value: query [B, heads, q, dim], key and value [B, kv_heads, k, dim]; `mask` bool
    [q, k] or [B, 1, q, k], None for plain causal attention."""
    kind = _named.get()
    if kind == PLAIN:
        return _plain(query, key, value, mask, scale)
    if kind == FLASH:
        with sdpa_kernel(FLASH_FIRST, set_priority=True):
            return _torchs(query, key, value, mask, scale)
    return _torchs(query, key, value, mask, scale)


def _torchs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The whole matrix of scores at once, in float32 as `transformers` has it."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if mask is None:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(-1, -2)) * scale
    weights = scores.float().masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.nan_to_num().to(value.dtype) @ value
