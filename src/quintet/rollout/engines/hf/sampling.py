"""Sampling of tokens from logits. Each token uses one uniform random number, a pure function of the request's seed and
the token's position, so that a response does not depend on the other requests of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.kernels.decode import decode_kernels
from quintet.records import TopLogprobs

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

BLOCK = 64
"""Tokens of the vocabulary whose probabilities are summed first; the sampled token is then searched in one block."""


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64; torch's own shift is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return float64 [n] in [0, 1): splitmix64 (Steele et al. 2014) of seed and position, int64 [n] each."""
    x = seeds * _signed(_MIX[0]) + (positions + 1) * _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX[0])
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX[1])
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).double() / float(1 << 53)


@dataclass(frozen=True, slots=True)
class LogitsProcessing:
    """Top-k, top-p, min-p, penalties, biases, minimum length and structured outputs, for the m rows that use any."""

    rows: Tensor
    """int64 [m], rows of the batch."""
    top_k: Tensor
    """int64 [m]; 0 keeps the whole vocabulary."""
    top_p: Tensor
    """[m]"""
    min_p: Tensor
    """[m]"""
    repetition_penalty: Tensor
    """[m], applied to `penalized_tokens`."""
    penalized_tokens: Tensor | None = None
    """bool [m, vocab], tokens of prompt and response; None without repetition penalties."""
    biases: Tensor | None = None
    """[m, vocab], added to the logits: biases of requests, minus their frequency and presence penalties."""
    banned_tokens: Sequence[tuple[int, tuple[int, ...]]] = ()
    """Indices into `rows` with the tokens that cannot be sampled yet (stop tokens before `min_tokens`)."""
    allowed_tokens: tuple[Tensor, Tensor] | None = None
    """Indices into `rows`, int64 [k], and the tokens that their structured outputs allow, bool [k, vocab]."""


def _divisors(temperature: Tensor) -> Tensor:
    """Return the divisors of the logits, [n]: the temperature, or 1 where it is 0 (greedy)."""
    return temperature.masked_fill(temperature == 0, 1.0)


def top_logprobs(logits: Tensor, temperature: Tensor, count: int) -> list[TopLogprobs]:
    """Return the `count` likeliest tokens of each row and their log-probs as in `sample`; logits are [n, vocab]."""
    best = (logits / _divisors(temperature)[:, None]).log_softmax(-1).topk(min(count, logits.shape[-1]))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [tuple(zip(tokens, logprobs, strict=True)) for tokens, logprobs in rows]


def sample(
    logits: Tensor, temperature: Tensor, numbers: Tensor, processing: LogitsProcessing | None = None
) -> tuple[Tensor, Tensor]:
    """Sample next tokens, int64 [n], and return them with their log-probs, float32 [n], nats.

    `logits`, float32 [n, vocab], are overwritten; `temperature` and the uniform `numbers` are [n], temperature 0 is
    greedy. Log-probs are of the whole vocabulary under the temperature (1 if greedy) regardless of `processing`,
    because that is what the learner computes. A row of non-finite logits returns NaN.
    """
    raw = processed = None
    if processing is not None:
        raw = logits[processing.rows]
        processed = _process(processing, raw, temperature[processing.rows])
    compiled = decode_kernels(logits.dtype, logits.device.type)
    if compiled:
        tokens, logprobs, totals = compiled.sample(logits, temperature, numbers.double())
    else:
        tokens, logprobs, totals = _sample(logits, temperature, numbers)
    if processing is not None and raw is not None and processed is not None:
        rows, weights = processing.rows, processed.sub(processed.amax(-1, keepdim=True)).exp_()
        sampled = _search(weights, _block_sums(weights), numbers[rows])
        tokens[rows] = torch.where(temperature[rows] == 0, processed.argmax(-1), sampled)
        # not by the logarithm of the probability: that of a token that only a structured output allows may be 0
        below = (raw.gather(-1, tokens[rows, None]) - raw.amax(-1, keepdim=True)).squeeze(-1)
        logprobs[rows] = (below.double() / _divisors(temperature[rows]) - totals[rows].log()).float()
    return tokens, logprobs


def _sample(logits: Tensor, temperature: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, log-probs and the sums of the unnormalised probabilities, float64 [n], which overwrite the logits."""
    greedy = temperature == 0
    best = logits.argmax(-1) if bool(greedy.any()) else None
    if bool((temperature != 1).any()):
        logits /= _divisors(temperature)[:, None]
    weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    sums = _block_sums(weights)
    tokens = _search(weights, sums, numbers)
    if best is not None:
        tokens = torch.where(greedy, best, tokens)
    chosen = weights.gather(-1, tokens[:, None]).squeeze(-1)
    return tokens, (chosen.double().log() - sums[:, -1].log()).float(), sums[:, -1]


def _block_sums(weights: Tensor) -> Tensor:
    """Cumulative sums over blocks of the vocabulary, float64 [n, blocks]."""
    full = weights.shape[-1] // BLOCK * BLOCK
    sums: Tensor = torch.unflatten(weights[:, :full], -1, (-1, BLOCK)).sum(-1)
    if full < weights.shape[-1]:
        sums = torch.cat([sums, weights[:, full:].sum(-1, keepdim=True)], -1)
    return sums.double().cumsum(-1)


def _search(weights: Tensor, sums: Tensor, numbers: Tensor) -> Tensor:
    """Inverse-transform sampling, int64 [n]: the token at which the cumulative weights pass `numbers` of their sum."""
    vocab_size = weights.shape[-1]
    threshold = numbers * sums[:, -1]
    block = torch.searchsorted(sums, threshold[:, None], right=True).clamp_(max=sums.shape[-1] - 1)
    before = torch.where(block > 0, sums.gather(-1, (block - 1).clamp(min=0)), 0.0)
    ids = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(-1, ids.clamp(max=vocab_size - 1)).masked_fill_(ids >= vocab_size, 0.0).double()
    offset = torch.searchsorted(inside.cumsum(-1), threshold[:, None] - before, right=True)
    # the sum of a block and the sum of its parts differ by rounding: stay within tokens of non-zero weight
    last = (inside > 0).long().mul_(torch.arange(BLOCK, device=weights.device)).amax(-1, keepdim=True)
    return (block * BLOCK + torch.minimum(offset, last)).squeeze(-1)


def _process(processing: LogitsProcessing, logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits [m, vocab] after structured outputs, penalties, temperature, min-p, top-k and top-p, in vLLM's order."""
    processed = logits.clone()
    if processing.allowed_tokens is not None:
        rows, allowed = processing.allowed_tokens
        processed[rows] = processed[rows].masked_fill_(~allowed, -torch.inf)
    if processing.penalized_tokens is not None:
        penalty = processing.repetition_penalty[:, None]
        penalised = torch.where(processed > 0, processed / penalty, processed * penalty)
        processed = torch.where(processing.penalized_tokens, penalised, processed)
    if processing.biases is not None:
        processed += processing.biases
    for row, tokens in processing.banned_tokens:
        processed[row, list(tokens)] = -torch.inf
    processed /= _divisors(temperature)[:, None]
    if bool((processing.min_p > 0).any()):
        probs = processed.softmax(-1)
        processed.masked_fill_(probs < processing.min_p[:, None] * probs.amax(-1, keepdim=True), -torch.inf)
    if not bool(((processing.top_k > 0) | (processing.top_p < 1)).any()):
        return processed
    ordered, order = processed.sort(dim=-1, descending=True, stable=True)
    limit = torch.where(processing.top_k > 0, processing.top_k, processed.shape[-1])[:, None]
    ordered.masked_fill_(torch.arange(processed.shape[-1], device=processed.device) >= limit, -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    ordered.masked_fill_((before >= processing.top_p[:, None]) & (processing.top_p < 1)[:, None], -torch.inf)
    return torch.empty_like(processed).scatter_(-1, order, ordered)
