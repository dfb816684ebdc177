"""Attention backends of `policy.attention`: eager, torch's SDPA or its FlashAttention kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quintet.errors import ConfigError

KEY = "policy.attention"
EAGER, SDPA, FLASH = "eager", "sdpa", "flash_attention_2"
FLASH_FIRST = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class AttentionOptions(NamedTuple):
    """Options of a layer's attention besides its scale and window."""

    backend: str | None = None
    softcap: float | None = None
    """Scores are `softcap · tanh(scores / softcap)`, as in Gemma 2 (arXiv:2408.00118)."""
    sinks: Tensor | None = None
    """[heads], the score of a further key with the value 0 for each head, as in gpt-oss."""

    @property
    def changes_scores(self) -> bool:
        """Whether the weights are not the softmax of scaled products, as kernels compute it."""
        return self.softcap is not None or self.sinks is not None


DEFAULT_OPTIONS = AttentionOptions()
_active: ContextVar[AttentionOptions] = ContextVar("attention", default=DEFAULT_OPTIONS)


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
def use_attention_options(options: AttentionOptions) -> Iterator[None]:
    """Compute attention with `options` inside the `with` block."""
    token = _active.set(options)
    try:
        yield
    finally:
        _active.reset(token)


def active_attention_options() -> AttentionOptions:
    """Return the options of the layer that is computed."""
    return _active.get()


def is_flash_allowed() -> bool:
    """Return whether the active options permit flash-attn."""
    options = _active.get()
    return options.backend in (None, FLASH) and not options.changes_scores


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Return softmax(query keyᵀ · scale) value for query [B, heads, q, dim], key and value [B, kv_heads, k, dim].

    `mask` is bool [q, k] or [B, 1, q, k]; None for causal attention.
    """
    options = _active.get()
    if options.backend == EAGER or options.changes_scores:
        return _eager_attention(query, key, value, mask, scale, options)
    if options.backend == FLASH:
        with sdpa_kernel(FLASH_FIRST, set_priority=True):
            return _torch_attention(query, key, value, mask, scale)
    return _torch_attention(query, key, value, mask, scale)


def _torch_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


def _eager_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, options: AttentionOptions
) -> Tensor:
    """Attention with the full score matrix and softmax in float32, as in `transformers`."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    if mask is None:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(-1, -2)) * scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores.float().masked_fill(~mask, float("-inf"))
    if options.sinks is None:
        weights = scores.softmax(-1).nan_to_num()
    else:
        sinks = options.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value
