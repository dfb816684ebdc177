"""Size of the embedded engine's paged KV cache, for the engine and for plans."""

from __future__ import annotations

from collections.abc import Sequence

BLOCK = 16
"""Tokens of a block; the compiled kernels need a multiple of 16."""
DEFAULT_CACHE_SHARE = 0.3
"""Share of the device's memory for the KV cache if `rollout.engine_options.memory_share` is not set."""


RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent"})
"""Kinds of layers in `layer_types` of a config.json that have no keys and values."""


def attention_layers(kinds: Sequence[str] | None, count: int) -> list[int]:
    """Return the numbers of the layers with keys and values, of `count` layers of these kinds; all if no kinds are
    known."""
    return [index for index, kind in enumerate(kinds or [""] * count) if kind not in RECURRENT_LAYERS]


def num_blocks(num_tokens: int) -> int:
    """Return the number of blocks that hold so many tokens."""
    return -(-num_tokens // BLOCK)


def request_blocks(max_model_tokens: int) -> int:
    """Return the maximum number of blocks of a sequence; one is a copy of a block that it shares with others."""
    return num_blocks(max_model_tokens) + 1


def cache_bytes(memory: int, memory_share: float | None, weight_bytes: int) -> int:
    """Return how much of a device's memory the KV cache may take: with the weights `memory_share`, or by default a
    share of its own. Negative if the weights alone need more."""
    if memory_share is None:
        return int(DEFAULT_CACHE_SHARE * memory)
    return int(memory_share * memory) - weight_bytes


def pool_blocks(max_model_tokens: int, max_requests: int, block_bytes: int, available: int | None) -> int:
    """Return the number of blocks of the pool: all that `max_requests` sequences need, in `available` bytes, but enough
    for one sequence."""
    one = request_blocks(max_model_tokens)
    needed = max_requests * one
    return needed if available is None else min(needed, max(one, available // block_bytes))
