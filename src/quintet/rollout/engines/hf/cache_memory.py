"""Limit of the memory of the KV cache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from quintet import hardware
from quintet.config.plan.kv_blocks import cache_bytes, pool_blocks, request_blocks
from quintet.errors import ConfigError
from quintet.rollout.engines.hf.attention_state import CacheShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY = "rollout.engine_options.memory_share"


def max_cache_blocks(
    model: PreTrainedModel,
    max_model_len: int,
    max_num_seqs: int,
    memory_share: float | None,
    dtype: torch.dtype | None = None,
) -> int:
    """Return the number of blocks of the KV cache: as many as `max_num_seqs` sequences of `max_model_len` tokens need,
    but with the weights at most `memory_share` of the memory of the model's device, or by default a share for the
    cache. `dtype` is the cache's data type
    (default: the model's).

    Raises:
        ConfigError: not a single request fits into `memory_share`.
    """
    block_bytes = CacheShape.from_model(model, dtype).block_bytes
    memory, weights = _total_memory(model.device), sum(parameter.nbytes for parameter in model.parameters())
    available = cache_bytes(memory, memory_share, weights)
    one_request = request_blocks(max_model_len) * block_bytes
    if memory_share is not None and available < one_request:
        needed = math.ceil((weights + one_request) / memory * 1000) / 1000
        shorter = "shorten rollout.max_prompt_tokens + rollout.max_response_tokens"
        raise ConfigError(
            f"{KEY} = {memory_share:g}: weights and one request of {max_model_len} tokens need {needed:g} of "
            f"{memory / 2**30:.0f} GiB",
            key=KEY,
            value=memory_share,
            hint=f"at least: {KEY}={needed:g}, or {shorter}" if needed <= 1 else shorter,
        )
    return pool_blocks(max_model_len, max_num_seqs, block_bytes, available)


def _total_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return hardware.memory_bytes()
