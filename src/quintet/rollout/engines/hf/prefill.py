"""Prefill: the next tokens to compute of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quintet.rollout.engines.hf.paged_attention import MAX_KERNEL_TOKENS
from quintet.rollout.engines.hf.paged_cache import CachedSequence
from quintet.rollout.engines.hf.prefix_tree import BlockNode

AGEING = 0.25
"""Tokens by which a prompt moves forward in the queue for each token of the passes that it is left out of."""
FIRST_BUDGET = 64
"""Prompt tokens of a pass before times are measured."""
MIN_BUDGET = 16
SMOOTHING = 0.3
"""Weight of the last pass in the measured times."""
MAX_STALE_PASSES = 64
"""Passes with prompt tokens after which the time of pure decoding is measured again."""
MAX_PREFILL_SECONDS = 0.5
"""Duration of a pass without decoding, so that a short prompt that comes does not wait long."""


class PassBudget:
    """Prompt tokens of the next pass.

    With a `max_slowdown`, a pass takes about that many times the time of one that only decodes: the budget follows the
    measured times of passes.
    """

    def __init__(self, max_tokens: int, max_slowdown: float | None = None) -> None:
        self._max_tokens = max_tokens
        self._max_slowdown = max_slowdown
        self._decode_seconds: float | None = None
        self._num_decoding = 0
        """Sequences of the last pass that only decoded."""
        self._num_stale = 0
        """Passes since then."""
        self._seconds_per_token: float | None = None

    def next_tokens(self, num_decoding: int) -> int:
        """Return the number of prompt tokens beside `num_decoding` sequences; 0 where the time of pure decoding has to
        be measured first."""
        if self._max_slowdown is None:
            return self._max_tokens
        if num_decoding and self._is_stale(num_decoding):
            return 0
        if self._seconds_per_token is None:
            return min(FIRST_BUDGET, self._max_tokens)
        decode_seconds = self._decode_seconds or 0.0
        seconds = (self._max_slowdown - 1) * decode_seconds if num_decoding else MAX_PREFILL_SECONDS
        return min(max(MIN_BUDGET, int(seconds / self._seconds_per_token)), self._max_tokens)

    def record(self, seconds: float, num_decoding: int, num_prompt_tokens: int) -> None:
        """Note the duration of a pass."""
        if not num_prompt_tokens:
            if num_decoding:
                same = self._decode_seconds if num_decoding == self._num_decoding else None
                self._decode_seconds = _smooth(same, seconds)
                self._num_decoding, self._num_stale = num_decoding, 0
            return
        self._num_stale += 1
        decode_seconds = (self._decode_seconds or 0.0) if num_decoding else 0.0
        per_token = max(seconds - decode_seconds, 0.1 * seconds) / num_prompt_tokens
        self._seconds_per_token = _smooth(self._seconds_per_token, per_token)

    def _is_stale(self, num_decoding: int) -> bool:
        is_other = not 0.5 <= num_decoding / max(self._num_decoding, 1) <= 1.5
        return self._decode_seconds is None or is_other or self._num_stale > MAX_STALE_PASSES


def _smooth(before: float | None, value: float) -> float:
    return value if before is None else before + SMOOTHING * (value - before)


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Tokens of a sequence that a pass computes."""

    sequence: CachedSequence
    start: int
    count: int

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.start + self.count

    @property
    def is_last(self) -> bool:
        """Whether the prompt is computed with it."""
        return self.end == len(self.sequence.tokens)


def next_spans(sequences: Iterable[CachedSequence], max_tokens: int, *, chunked: bool) -> Sequence[PrefillSpan]:
    """Return up to `max_tokens` tokens to compute, and record that they will be. Each token is computed once for all
    sequences that share its block. Sequences with few remaining tokens come first, but not for ever before those that
    wait. Without `chunked`, prompts are computed as a whole, the
    first one also if it is longer. Tokens beyond the limit of the compiled kernels come last, see `PagedLayout`."""
    spans: list[PrefillSpan] = []
    ends = set[tuple[BlockNode, int]]()
    budget = max_tokens
    for sequence in sorted(sequences, key=_rank):
        last = (sequence.path[-1], sequence.length_in_last)
        if last in ends or sequence.hidden is not None:
            continue
        # the last token again if its keys and values are cached, but no prompt ended with it
        start = min(sequence.num_computed, len(sequence.tokens) - 1)
        missing = len(sequence.tokens) - start
        if not max_tokens or (not chunked and missing > max_tokens and spans):
            sequence.passed_over += budget
            continue
        count = min(missing, max_tokens) if chunked else missing
        sequence.mark_computed(start + count)
        spans += [PrefillSpan(sequence, *part) for part in split_at_kernel_limit(start, count)]
        max_tokens = max(0, max_tokens - count)
        if count == missing:
            ends.add(last)
    return sorted(spans, key=lambda span: span.start >= MAX_KERNEL_TOKENS)


def _rank(sequence: CachedSequence) -> float:
    """Return the remaining tokens, less for each token that was computed for others meanwhile."""
    return len(sequence.tokens) - sequence.num_computed - AGEING * sequence.passed_over


def split_at_kernel_limit(start: int, count: int) -> Sequence[tuple[int, int]]:
    """Split new tokens of a prompt, `count` from position `start` on, into those that the compiled kernels compute and
    those behind, so that keys and values do not depend on the length of the prompt that they were computed for."""
    inside = min(max(MAX_KERNEL_TOKENS - start, 0), count)
    return [part for part in ((start, inside), (start + inside, count - inside)) if part[1]]
