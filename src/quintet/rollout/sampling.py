"""Drawing tokens. One uniform number a token, a pure function of the request's seed and the place,
so that a request's answer doesn't depend on what else is in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.kernels.decoding import kernels

__all__ = ["Changed", "greedy_like", "sample", "uniform"]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

BLOCK = 64
"""Tokens of the vocabulary whose chances are added up first; the drawn one is then searched in one block alone."""


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


@dataclass(frozen=True, slots=True)
class Changed:
    """Rows whose draw is changed by more than the temperature, and how; each tensor [m]."""

    rows: Tensor
    """int64, of the batch."""
    top_k: Tensor
    """int64; 0 keeps the whole vocabulary."""
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    """Repetition penalty on the tokens `seen`."""
    seen: Tensor | None = None
    """bool [m, vocab], tokens that prompt or answer hold; where there is a penalty."""
    barred: Sequence[tuple[int, tuple[int, ...]]] = ()
    """Tokens that can't come yet, by place in `rows`."""


def greedy_like(temperature: Tensor) -> Tensor:
    """What logits are divided by, [n]: the temperature, 1 where it is 0 (greedy)."""
    return temperature.masked_fill(temperature == 0, 1.0)


def sample(logits: Tensor, temperature: Tensor, draws: Tensor, changed: Changed | None = None) -> tuple[Tensor, Tensor]:
    """Next tokens, int64 [n], and their log-probs, float32 [n], nats.

    `logits` float32 [n, vocab] are used up; `temperature` and `draws` [n], temperature 0 is greedy. The log-probs are
    of the whole vocabulary under the temperature (1 where greedy), whatever else changes the draw: that is what the
    learner computes too. A row of logits that aren't numbers gives NaN.
    """
    own = None if changed is None else _kept(changed, logits[changed.rows], temperature[changed.rows])
    compiled = kernels(logits.dtype, logits.device.type)
    if compiled:
        tokens, logprobs, totals = compiled.draw(logits, temperature, draws.double())
    else:
        tokens, logprobs, totals = _draw(logits, temperature, draws)
    if changed is not None and own is not None:
        rows, theirs = changed.rows, own.sub(own.amax(-1, keepdim=True)).exp_()
        drawn = _search(theirs, _block_sums(theirs), draws[rows])
        tokens[rows] = torch.where(temperature[rows] == 0, own.argmax(-1), drawn)
        logprobs[rows] = (logits[rows, tokens[rows]].double().log() - totals[rows].log()).float()
    return tokens, logprobs


def _draw(logits: Tensor, temperature: Tensor, draws: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their log-probs, and what the chances, which take the logits' place, add up to, float64 [n]."""
    greedy = temperature == 0
    best = logits.argmax(-1) if bool(greedy.any()) else None
    if bool((temperature != 1).any()):
        logits /= greedy_like(temperature)[:, None]
    chances = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    sums = _block_sums(chances)
    tokens = _search(chances, sums, draws)
    if best is not None:
        tokens = torch.where(greedy, best, tokens)
    chosen = chances.gather(-1, tokens[:, None]).squeeze(-1)
    return tokens, (chosen.double().log() - sums[:, -1].log()).float(), sums[:, -1]


def _block_sums(chances: Tensor) -> Tensor:
    """Cumulative sums over blocks of the vocabulary, float64 [n, blocks]."""
    whole = chances.shape[-1] // BLOCK * BLOCK
    sums: Tensor = torch.unflatten(chances[:, :whole], -1, (-1, BLOCK)).sum(-1)
    if whole < chances.shape[-1]:
        sums = torch.cat([sums, chances[:, whole:].sum(-1, keepdim=True)], -1)
    return sums.double().cumsum(-1)


def _search(chances: Tensor, sums: Tensor, draws: Tensor) -> Tensor:
    """The token of each row in which the cumulated chances pass its draw, int64 [n]."""
    vocabulary = chances.shape[-1]
    wanted = draws * sums[:, -1]
    block = torch.searchsorted(sums, wanted[:, None], right=True).clamp_(max=sums.shape[-1] - 1)
    before = torch.where(block > 0, sums.gather(-1, (block - 1).clamp(min=0)), 0.0)
    places = block * BLOCK + torch.arange(BLOCK, device=chances.device)
    inside = chances.gather(-1, places.clamp(max=vocabulary - 1)).masked_fill_(places >= vocabulary, 0.0).double()
    found = torch.searchsorted(inside.cumsum(-1), wanted[:, None] - before, right=True)
    # the sums of a block and of its parts differ by a rounding: never beyond the last token that has a chance
    last = (inside > 0).long().mul_(torch.arange(BLOCK, device=chances.device)).amax(-1, keepdim=True)
    return (block * BLOCK + torch.minimum(found, last)).squeeze(-1)


def _kept(changed: Changed, logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits [m, vocab] as they are drawn from: penalty, temperature, min-p, top-k, then top-p of what is left, in the
    order in which vLLM applies them."""
    own = logits.clone()
    if changed.seen is not None:
        penalty = changed.penalty[:, None]
        own = torch.where(changed.seen, torch.where(own > 0, own / penalty, own * penalty), own)
    for place, tokens in changed.barred:
        own[place, list(tokens)] = -torch.inf
    own /= greedy_like(temperature)[:, None]
    if bool((changed.min_p > 0).any()):
        chances = own.softmax(-1)
        own.masked_fill_(chances < changed.min_p[:, None] * chances.amax(-1, keepdim=True), -torch.inf)
    if not bool(((changed.top_k > 0) | (changed.top_p < 1)).any()):
        return own
    ordered, order = own.sort(dim=-1, descending=True, stable=True)
    limit = torch.where(changed.top_k > 0, changed.top_k, own.shape[-1])[:, None]
    ordered.masked_fill_(torch.arange(own.shape[-1], device=own.device) >= limit, -torch.inf)
    chances = ordered.softmax(-1)
    before = chances.cumsum(-1) - chances
    ordered.masked_fill_((before >= changed.top_p[:, None]) & (changed.top_p < 1)[:, None], -torch.inf)
    return torch.empty_like(own).scatter_(-1, order, ordered)
