"""Drawing tokens. One uniform number a token, a pure function of the request's seed and the place,
so that a request's answer doesn't depend on what else is in the batch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sample", "uniform"]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64, which torch would do arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seeds: Tensor, places: Tensor) -> Tensor:
    """Float64 [n] in [0, 1): splitmix64 (Steele et al. 2014) of seed and place, int64 [n] each."""
    x = seeds * _signed(_MIX[0]) + (places + 1) * _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX[0])
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX[1])
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).double() / float(1 << 53)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Next tokens, int64 [n], and their log-probs, float32 [n].

    `logits` [n, vocab]; the rest [n]. Temperature 0 is greedy. The log-probs are of the whole
    vocabulary under the temperature (1 where greedy), before top-k and top-p cut it: that is what
    the learner computes too.
    """
    greedy = temperature == 0
    logprobs = (logits.float() / temperature.masked_fill(greedy, 1.0)[:, None]).log_softmax(-1)
    kept = logprobs.exp()
    if bool(((top_k > 0) | (top_p < 1)).any()):
        kept = _truncate(kept, top_k, top_p)
    cumulative = kept.double().cumsum(-1)
    threshold = draws * cumulative[:, -1]
    drawn = torch.searchsorted(cumulative, threshold[:, None], right=True).squeeze(-1)
    drawn = drawn.clamp(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1), drawn)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _truncate(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero what top-k or top-p drop; the token that crosses `top_p` stays."""
    ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1])
    limit = torch.where(top_k > 0, top_k, ordered.shape[-1])
    before = ordered.cumsum(-1) - ordered
    keep = (rank < limit[:, None]) & (before < top_p[:, None])
    return torch.zeros_like(probabilities).scatter(-1, order, ordered * keep)
