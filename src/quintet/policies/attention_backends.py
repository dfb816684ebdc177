"""Attention backends of `policy.attention`: eager, torch's SDPA or its FlashAttention kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quintet.errors import ConfigError

KEY = "policy.attention"
EAGER, SDPA, FLASH = "eager", "sdpa", "flash_attention_2"
FLASH_FIRST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_active_backend: ContextVar[str | None] = ContextVar("attention", default=None)


def set_attention_backend(model: nn.Module, backend: str | None) -> None:
    """Set the backend of the model's attention layers.

    `eager` computes plain matrix products, `sdpa` lets torch choose a kernel, `flash_attention_2` takes torch's
    FlashAttention kernels where masks allow them; None uses the fastest backend.

    Raises:
        ConfigError: the backend is unknown or does not run on the model's device.
    """
    if backend is None:
        return
    if backend not in (EAGER, SDPA, FLASH):
        hint = f"{KEY}={SDPA}, {EAGER} or, on a GPU, {FLASH}; null selects the fastest"
        raise ConfigError(f"{KEY} = {backend}: unknown attention backend", key=KEY, value=backend, hint=hint)
    if backend == FLASH and next(model.parameters()).device.type != "cuda":
        message = f"{KEY} = {backend} requires a GPU, but this model is on the CPU"
        raise ConfigError(message, key=KEY, value=backend, hint=f"{KEY}={SDPA}, or {KEY}=null for the fastest")
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.attention_backend = backend  # type: ignore[assignment]


def attention_backend(module: nn.Module) -> str | None:
    """Return the backend set for an attention layer, or None."""
    backend = getattr(module, "attention_backend", None)
    return backend if isinstance(backend, str) else None


@contextmanager
def use_attention_backend(backend: str | None) -> Iterator[None]:
    """Compute attention with `backend` inside the `with` block."""
    token = _active_backend.set(backend)
    try:
        yield
    finally:
        _active_backend.reset(token)


def is_flash_allowed() -> bool:
    """Return whether the active backend permits flash-attn."""
    return _active_backend.get() in (None, FLASH)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Return softmax(query keyᵀ · scale) value for query [B, heads, q, dim], key and value [B, kv_heads, k, dim].

    `mask` is bool [q, k] or [B, 1, q, k]; None for causal attention.
    """
    backend = _active_backend.get()
    if backend == EAGER:
        return _eager_attention(query, key, value, mask, scale)
    if backend == FLASH:
        with sdpa_kernel(FLASH_FIRST, set_priority=True):
            return _torch_attention(query, key, value, mask, scale)
    return _torch_attention(query, key, value, mask, scale)


def _torch_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def _eager_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention with the full score matrix and softmax in float32, as in `transformers`."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if mask is None:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(-1, -2)) * scale
    weights = scores.float().masked_fill(~mask, float("-inf")).softmax(-1)
    return weights.nan_to_num().to(value.dtype) @ value
