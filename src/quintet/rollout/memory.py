"""How many requests an engine may decode side by side in its share of a device's memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from quintet.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["slots_within"]

KEY = "rollout.engine_options.memory_share"
SLOTS_FOR_ONE = 1.5
"""Slots of the cache that a request takes: its own, and half a one for prompts that are kept."""


def slots_within(model: PreTrainedModel, context: int, wanted: int, share: float | None) -> int:
    """Requests for which weights and cache together keep to `share` of the memory, `wanted` at most.

    Raises:
        ConfigError: not even one fits.
    """
    if share is None:
        return wanted
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    fit = int((share * memory - weights) / (SLOTS_FOR_ONE * _slot_bytes(model, context)))
    if fit < 1:
        needed = (weights + SLOTS_FOR_ONE * _slot_bytes(model, context)) / memory
        raise ConfigError(
            f"{KEY} = {share:g}: weights and one request of {context} tokens need {needed:.2g} of "
            f"{memory / 2**30:.0f} GiB",
            key=KEY,
            value=share,
            hint=f"give at least {needed:.2g}, or shorter contexts",
        )
    return min(fit, wanted)


def _slot_bytes(model: PreTrainedModel, context: int) -> int:
    """Keys and values of one request."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * dim * context * model.dtype.itemsize)
