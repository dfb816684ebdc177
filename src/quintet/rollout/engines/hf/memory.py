"""Number of requests whose KV cache fits into the engine's share of a device's memory."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import torch

from quintet.errors import ConfigError
from quintet.rollout.engines.hf.kv_cache import key_dim

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _kv_bytes(model: PreTrainedModel, max_model_len: int, dtype: torch.dtype) -> int:
    """Size of the keys and values of one request."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * key_dim(config) * max_model_len * dtype.itemsize)
