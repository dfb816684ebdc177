"""Attention of packed sequences by flash-attn, on a GPU where it is installed.

Its function for sequences of various lengths aligns queries with the end of their keys, so a branch that follows a
shared prompt is a few queries with many keys: only keys and values of what is shared are repeated, and nothing is
padded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

__all__ = ["Varlen", "takes_flash"]

HALVES = (torch.float16, torch.bfloat16)


@lru_cache(maxsize=1)
def flash() -> Callable[..., Any] | None:
    """`flash_attn_varlen_func`; None where flash-attn isn't installed."""
    if find_spec("flash_attn") is None:
        return None
    found: Callable[..., Any] = import_module("flash_attn").flash_attn_varlen_func
    return found


def takes_flash(query: Tensor) -> bool:
    """Whether flash-attn can be asked: it knows GPUs and numbers of 16 bits alone."""
    return query.is_cuda and query.dtype in HALVES and flash() is not None


@dataclass(frozen=True, slots=True)
class Varlen:
    """Ends of queries and of keys, int32 [sequences + 1], and which tokens the keys are, int64; None for all in their
    order."""

    queries: Tensor
    keys: Tensor
    tokens: Tensor | None
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, prefix: int, stems: Tensor | None, parents: Tensor | None, branches: Tensor) -> Varlen:
        """Of the parts of a `PackedLayout`, on the CPU."""
        shared = list(range(prefix))
        rows: list[tuple[int, list[int]]] = [(prefix, shared)] if prefix else []
        at, known = prefix, []
        for length in [] if stems is None else stems.tolist():
            known.append([*shared, *range(at, at + length)])
            rows.append((length, known[-1]))
            at += length
        owners = [None] * len(branches) if parents is None or stems is None else parents.tolist()
        for length, owner in zip(branches.tolist(), owners, strict=True):
            rows.append((length, [*(shared if owner is None else known[owner]), *range(at, at + length)]))
            at += length
        asked, seen = [count for count, _ in rows], [len(tokens) for _, tokens in rows]
        tokens = None if asked == seen else torch.tensor([token for _, row in rows for token in row])
        return cls(_ends(asked), _ends(seen), tokens, max(asked), max(seen))

    def to(self, device: torch.device) -> Varlen:
        """The same there."""
        tokens = None if self.tokens is None else self.tokens.to(device)
        return Varlen(self.queries.to(device), self.keys.to(device), tokens, self.most_queries, self.most_keys)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """See `Layout.attend`."""
        function = flash()
        if function is None:
            raise RuntimeError("flash-attn isn't installed: ask takes_flash first")
        if self.tokens is not None:
            key, value = key.index_select(0, self.tokens), value.index_select(0, self.tokens)
        out: Tensor = function(
            query,
            key,
            value,
            cu_seqlens_q=self.queries,
            cu_seqlens_k=self.keys,
            max_seqlen_q=self.most_queries,
            max_seqlen_k=self.most_keys,
            softmax_scale=scale,
            causal=True,
        )
        return out


def _ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
