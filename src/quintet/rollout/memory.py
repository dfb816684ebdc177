"""How many requests an engine may decode side by side in its share of a device's memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from quintet.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["slots_within"]

KEY = "rollout.engine_options.memory_share"
SLOTS_FOR_ONE = 2.0
"""Slots of the cache that a request takes: its own, and one for what is kept for later."""


def slots_within(
    model: PreTrainedModel, context: int, wanted: int, share: float | None, dtype: torch.dtype | None = None
) -> int:
    """Requests for which weights and cache together keep to `share` of the memory of the model's device, `wanted` at
    most. `dtype` is that of the cache, where it isn't the model's.

    Raises:
        ConfigError: not even one fits.
    """
    if share is None:
        return wanted
    memory = _memory(model.device)
    one = SLOTS_FOR_ONE * _slot_bytes(model, context, dtype or model.dtype)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    fit = int((share * memory - weights) / one)
    if fit < 1:
        needed = (weights + one) / memory
        raise ConfigError(
            f"{KEY} = {share:g}: weights and one request of {context} tokens need {needed:.2g} of "
            f"{memory / 2**30:.0f} GiB",
            key=KEY,
            value=share,
            hint=f"give at least {needed:.2g}, or shorter contexts",
        )
    return min(fit, wanted)


def _memory(device: torch.device) -> int:
    """Of the device, bytes."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _slot_bytes(model: PreTrainedModel, context: int, dtype: torch.dtype) -> int:
    """Keys and values of one request."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * dim * context * dtype.itemsize)
