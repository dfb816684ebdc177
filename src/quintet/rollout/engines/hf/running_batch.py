"""The running batch: sequences that decode one token per step, their KV cache and their sampling parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from quintet.config.plan.kv_blocks import BLOCK
from quintet.records import FinishReason, PromptLogprobs, Request, TopLogprobs
from quintet.rollout.engines.async_engine import PartialResponse
from quintet.rollout.engines.grammars import TokenMatcher, allowed_tokens
from quintet.rollout.engines.hf.decode import IntArray, NewSequence, SequenceSlots
from quintet.rollout.engines.hf.paged_cache import CachedSequence, PagedCache
from quintet.rollout.engines.hf.sampling import LogitsProcessing, sample, top_logprobs, uniform
from quintet.rollout.engines.stop_strings import StopStringMatcher

if TYPE_CHECKING:
    import numpy.typing as npt

NUMBERS_AHEAD = 16
"""Steps for which random numbers are generated at once."""


@dataclass(eq=False, slots=True)
class ScheduledRequest:
    """A request in the engine, with its response so far unless it is running."""

    request: Request
    weight_version: int
    """Version of the weights of the first response token."""
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    version_changes: list[tuple[int, int]] = field(default_factory=list)
    """See `Generation.version_changes`."""
    arrival: int = 0
    """Rank among the requests by the time they came; the last ones are preempted first."""
    sequence: CachedSequence | None = None
    """Keys and values of `tokens_to_prefill` and of the response; None while waiting."""
    penalized_tokens: Tensor | None = None
    """bool [vocab], tokens of prompt and response; only with a repetition penalty."""
    biases: Tensor | None = None
    """float32 [vocab], see `LogitsProcessing.biases`; only with a bias, or a frequency or presence penalty."""
    sampled_tokens: set[int] = field(default_factory=set)
    """Distinct tokens of the response; only with `biases`."""
    matcher: TokenMatcher | None = None
    """State of the structured output after the response so far, also while the request is preempted."""
    stop_strings: StopStringMatcher | None = None
    """Stop strings in the response so far."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """See `Generation.top_logprobs`."""
    prompt_logprobs: PromptLogprobs | None = None
    """See `Generation.prompt_logprobs`."""

    @property
    def tokens_to_prefill(self) -> tuple[int, ...]:
        """The prompt, and after a preemption also the response so far."""
        return self.request.prompt + tuple(self.tokens)

    @property
    def needs_processing(self) -> bool:
        """Whether its logits need more than the temperature; see `LogitsProcessing`."""
        request = self.request
        plain = request.top_k == 0 and request.top_p >= 1 and request.min_p == 0 and request.repetition_penalty == 1
        has_minimum = bool(request.min_tokens and request.stop_token_ids)
        return not plain or has_minimum or self.matcher is not None or self.has_biases

    @property
    def has_biases(self) -> bool:
        """Whether numbers are added to its logits."""
        request = self.request
        return bool(request.frequency_penalty or request.presence_penalty or request.logit_bias)

    def start_penalties(self, vocab_size: int, device: torch.device) -> None:
        """Build the tensors of its penalties and biases for the response so far."""
        if self.request.repetition_penalty != 1.0:
            self.penalized_tokens = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            text = [token for token in self.tokens_to_prefill if token >= 0]
            self.penalized_tokens[torch.tensor(text, device=device)] = True
        if self.has_biases:
            self.biases = torch.zeros(vocab_size, device=device)
            for token, bias in self.request.logit_bias:
                self.biases[token] += bias
            self.sampled_tokens.clear()
            for token in self.tokens:
                self._penalize(token)

    def record_token(self, token: int) -> None:
        """Note a sampled token in the state of its sampling."""
        if self.penalized_tokens is not None:
            self.penalized_tokens[token] = True
        if self.biases is not None:
            self._penalize(token)
        if self.matcher is not None:
            self.matcher.accept_token(token)

    def _penalize(self, token: int) -> None:
        if self.biases is not None:
            is_first = token not in self.sampled_tokens
            self.biases[token] -= self.request.frequency_penalty + self.request.presence_penalty * is_first
            self.sampled_tokens.add(token)


@dataclass(slots=True)
class _SamplingState:
    """Sampling parameters of the running rows, valid until rows are added or removed; tensors [n]."""

    seeds: Tensor
    temperature: Tensor
    processed_rows: list[int]
    """Rows that need `LogitsProcessing`."""
    top_logprobs_rows: list[int]
    """Rows whose requests ask for the likeliest tokens."""
    _numbers: list[Tensor] = field(default_factory=list)

    def next_numbers(self, num_tokens: Tensor) -> Tensor:
        """Uniform numbers for the rows' next tokens, float64 [n], generated for several steps at once: each row samples
        one token per step."""
        if not self._numbers:
            steps = torch.arange(NUMBERS_AHEAD, device=num_tokens.device)[:, None]
            self._numbers = list(uniform(self.seeds, num_tokens + steps).flip(0))
        return self._numbers.pop()

    def processing(
        self, running: Sequence[ScheduledRequest], rows: SequenceSlots, vocab_size: int
    ) -> LogitsProcessing | None:
        if not self.processed_rows:
            return None
        device, processed = self.seeds.device, [running[row] for row in self.processed_rows]
        requests = [row_request.request for row_request in processed]
        penalized = _stacked([row_request.penalized_tokens for row_request in processed])
        return LogitsProcessing(
            torch.tensor(self.processed_rows, device=device),
            torch.tensor([request.top_k for request in requests], device=device),
            torch.tensor([request.top_p for request in requests], device=device),
            torch.tensor([request.min_p for request in requests], device=device),
            torch.tensor([request.repetition_penalty for request in requests], device=device),
            penalized,
            _stacked([row_request.biases for row_request in processed]),
            [
                (index, request.stop_token_ids)
                for index, request in enumerate(requests)
                if rows.num_tokens[self.processed_rows[index]] < request.min_tokens and request.stop_token_ids
            ],
            _allowed_tokens(processed, vocab_size, device),
        )


def _stacked(rows: Sequence[Tensor | None]) -> Tensor | None:
    """Stack the rows, zeros for those that are None; None if all are."""
    filled = next((row for row in rows if row is not None), None)
    if filled is None:
        return None
    return torch.stack([torch.zeros_like(filled) if row is None else row for row in rows])


def _allowed_tokens(
    requests: Sequence[ScheduledRequest], vocab_size: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """See `LogitsProcessing.allowed_tokens`."""
    matchers = {
        index: row_request.matcher for index, row_request in enumerate(requests) if row_request.matcher is not None
    }
    if not matchers:
        return None
    allowed = torch.from_numpy(allowed_tokens(list(matchers.values()), vocab_size))
    return torch.tensor(list(matchers), device=device), allowed.to(device)


class RunningBatch:
    """Sequences that decode; `requests[row]` is the request of a row of `rows`."""

    def __init__(self, cache: PagedCache, max_num_seqs: int, vocab_size: int) -> None:
        self.requests: list[ScheduledRequest] = []
        self.rows = SequenceSlots(max_num_seqs)
        self._vocab_size = vocab_size
        self._device = cache.device
        self._cache = cache
        self._sampling: _SamplingState | None = None
        self._order: Tensor | None = None

    def add(self, requests: Sequence[ScheduledRequest], max_model_len: int) -> None:
        """Append requests whose prompts are computed."""
        sequences = [
            NewSequence(
                request.request,
                request.tokens,
                request.logprobs,
                min(request.request.max_tokens, max_model_len - len(request.request.prompt)),
                request.needs_processing,
            )
            for request in requests
        ]
        table_rows = [request.sequence.row for request in requests if request.sequence]
        self.rows.add(sequences, table_rows, self._vocab_size)
        self.requests += requests
        self._invalidate()

    @property
    def tokens(self) -> tuple[Tensor, Tensor]:
        """The last token of each sequence and its position, int64 [n] each: input of the next forward pass."""
        rows, n = self.rows, self.rows.count
        positions = rows.first_position[:n] + rows.num_tokens[:n] - 1
        return self._to_device(rows.last_token[:n]), self._to_device(positions)

    @property
    def cache_positions(self) -> IntArray:
        """Index of the last token in its sequence, [n]: the number of tokens before it, also those of images."""
        rows, n = self.rows, self.rows.count
        return rows.prompt_length[:n] + rows.num_tokens[:n] - 1

    def starting_blocks(self) -> list[tuple[ScheduledRequest, int]]:
        """Return the requests whose last token is the first one that they write in its block, and its index."""
        rows, positions = self.rows, self.cache_positions
        is_first = rows.num_tokens[: rows.count] == rows.num_prefilled[: rows.count] + 1
        starting = ((positions % BLOCK == 0) | is_first).nonzero()[0]
        return [(self.requests[row], int(positions[row])) for row in starting]

    @property
    def order(self) -> Tensor:
        """int64 [n], the rows sorted so that samples of one prompt follow each other."""
        if self._order is None:
            rows, n = self.rows, self.rows.count
            last_full = np.maximum(rows.prompt_length[:n] // BLOCK - 1, 0)
            self._order = torch.from_numpy(self._cache.tables[rows.table_row[:n], last_full].argsort(kind="stable"))
        return self._order

    def sample(self, logits: Tensor) -> None:
        """Sample and append one token for every sequence from logits, float32 [n, vocab]."""
        rows = self.rows
        state = self._sampling = self._sampling or _SamplingState(
            self._to_device(rows.seed[: rows.count]),
            self._to_device(rows.temperature[: rows.count]),
            rows.needs_processing[: rows.count].nonzero()[0].tolist(),
            [row for row, row_request in enumerate(self.requests) if row_request.request.top_logprobs],
        )
        if state.top_logprobs_rows:
            self._record_top_logprobs(logits, state)
        numbers = state.next_numbers(self._to_device(rows.num_tokens[: rows.count]))
        processing = state.processing(self.requests, rows, self._vocab_size)
        tokens, logprobs = sample(logits, state.temperature, numbers, processing)
        rows.append(tokens.cpu().numpy(), logprobs.cpu().numpy())
        for row in state.processed_rows:
            self.requests[row].record_token(int(rows.last_token[row]))

    def _record_top_logprobs(self, logits: Tensor, state: _SamplingState) -> None:
        rows = state.top_logprobs_rows
        requests = [self.requests[row] for row in rows]
        count = max(request.request.top_logprobs for request in requests)
        for row_request, best in zip(requests, top_logprobs(logits[rows], state.temperature[rows], count), strict=True):
            row_request.top_logprobs.append(best[: row_request.request.top_logprobs])

    def partial_responses(self, ids: Collection[int]) -> Mapping[int, PartialResponse]:
        """Return the responses so far of those of the requests that are running."""
        return {
            row_request.request.id: (self.rows.tokens(row), self.rows.logprobs(row), row_request.top_logprobs)
            for row, row_request in enumerate(self.requests)
            if row_request.request.id in ids
        }

    def snapshot(self, row: int) -> ScheduledRequest:
        """Return the request of a row, updated with its response so far."""
        scheduled = self.requests[row]
        scheduled.tokens, scheduled.logprobs = self.rows.tokens(row), self.rows.logprobs(row)
        return scheduled

    def finish(self, reasons: Mapping[int, FinishReason]) -> None:
        """Remove finished rows. The cache keeps the responses of dialogues that continue, see
        `Request.keep_kv_cache`."""
        kept = [row for row, reason in reasons.items() if reason is not FinishReason.FAILED]
        self.remove(list(reasons), kept=[row for row in kept if self.requests[row].request.keep_kv_cache])

    def remove(self, removed: Sequence[int], *, kept: Collection[int] = ()) -> None:
        """Remove rows; the last rows move into the gaps. The cache keeps the responses of the rows in `kept`."""
        if not removed:
            return
        for row in removed:
            scheduled = self.requests[row]
            if scheduled.sequence is not None:
                # the last token is not computed
                response = self.rows.tokens(row)[:-1] if row in kept else ()
                self._cache.close(scheduled.sequence, (*scheduled.request.prompt, *response) if row in kept else ())
                scheduled.sequence = None
        gaps, moved = self.rows.remove(removed)
        for gap, moved_row in zip(gaps, moved, strict=True):
            self.requests[gap] = self.requests[moved_row]
        del self.requests[self.rows.count :]
        self._invalidate()

    def clear(self) -> None:
        """Remove all rows without touching the cache."""
        self.requests.clear()
        self.rows.count = 0
        self._invalidate()

    def _invalidate(self) -> None:
        self._sampling = self._order = None

    def _to_device(self, values: npt.NDArray[Any]) -> Tensor:
        """The array on the model's device; on a CPU it shares memory."""
        return torch.from_numpy(values).to(self._device)
