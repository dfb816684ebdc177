"""Attention of packed sequences by flash-attn, on a GPU if it is installed.

Its variable-length function aligns the last query with the last key of each sequence, so a branch after a shared prompt
has few queries and many keys: only the keys and values of shared tokens are repeated, and nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

HALF_DTYPES = (torch.float16, torch.bfloat16)


@lru_cache(maxsize=1)
def load_flash_attn() -> Callable[..., Any] | None:
    """Return `flash_attn_varlen_func`, or None if flash-attn is not installed."""
    if find_spec("flash_attn") is None:
        return None
    function: Callable[..., Any] = import_module("flash_attn").flash_attn_varlen_func
    return function


def supports_flash_varlen(query: Tensor) -> bool:
    """Return whether flash-attn can be used: on a GPU, for 16-bit dtypes."""
    return query.is_cuda and query.dtype in HALF_DTYPES and load_flash_attn() is not None


@dataclass(frozen=True, slots=True)
class FlashVarlenInputs:
    """Cumulative lengths of queries and keys, int32 [sequences + 1].

    `key_indices` int64 [keys] selects the tokens that are keys; None for all tokens in order.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    key_indices: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def from_lengths(
        cls, prefix: int, stems: Tensor | None, parents: Tensor | None, branches: Tensor
    ) -> FlashVarlenInputs:
        """Build the inputs on the CPU from the arguments of a `PackedLayout`."""
        prefix_tokens = list(range(prefix))
        rows: list[tuple[int, list[int]]] = [(prefix, prefix_tokens)] if prefix else []
        start, stem_tokens = prefix, []
        for length in [] if stems is None else stems.tolist():
            stem_tokens.append([*prefix_tokens, *range(start, start + length)])
            rows.append((length, stem_tokens[-1]))
            start += length
        owners = [None] * len(branches) if parents is None or stems is None else parents.tolist()
        for length, owner in zip(branches.tolist(), owners, strict=True):
            shared = prefix_tokens if owner is None else stem_tokens[owner]
            rows.append((length, [*shared, *range(start, start + length)]))
            start += length
        q_lengths, k_lengths = [count for count, _ in rows], [len(tokens) for _, tokens in rows]
        indices = None if q_lengths == k_lengths else torch.tensor([token for _, tokens in rows for token in tokens])
        return cls(_cu_seqlens(q_lengths), _cu_seqlens(k_lengths), indices, max(q_lengths), max(k_lengths))

    def to(self, device: torch.device) -> FlashVarlenInputs:
        """Return the inputs on `device`."""
        return replace(
            self,
            cu_seqlens_q=self.cu_seqlens_q.to(device),
            cu_seqlens_k=self.cu_seqlens_k.to(device),
            key_indices=None if self.key_indices is None else self.key_indices.to(device),
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
        """See `AttentionLayout.attend`."""
        function = load_flash_attn()
        if function is None:
            raise RuntimeError("flash-attn is not installed: check supports_flash_varlen first")
        if self.key_indices is not None:
            key, value = key.index_select(0, self.key_indices), value.index_select(0, self.key_indices)
        out: Tensor = function(
            query,
            key,
            value,
            cu_seqlens_q=self.cu_seqlens_q,
            cu_seqlens_k=self.cu_seqlens_k,
            max_seqlen_q=self.max_seqlen_q,
            max_seqlen_k=self.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            **({} if window is None else {"window_size": (window - 1, 0)}),
        )
        return out


def _cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
