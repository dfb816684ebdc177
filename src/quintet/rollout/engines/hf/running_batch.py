"""The running batch: sequences that decode one token per step, their KV cache and their sampling parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quintet.records import FinishReason, PromptLogprobs, Request, TopLogprobs
from quintet.rollout.engines.async_engine import PartialResponse
from quintet.rollout.engines.grammars import TokenMatcher, allowed_tokens
from quintet.rollout.engines.hf.attention_layouts import DecodeLayout, SharedSegment
from quintet.rollout.engines.hf.decode import NewSequence, SequenceSlots
from quintet.rollout.engines.hf.kv_cache import CacheShape, KVCache
from quintet.rollout.engines.hf.model_runner import ForwardInput
from quintet.rollout.engines.hf.prefix_cache import CachedPrompt, PrefixCache
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
    prompt: CachedPrompt | None = None
    """Cached keys and values of `tokens_to_prefill`; None while waiting."""
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

    def __init__(self, shape: CacheShape, prefix_cache: PrefixCache, max_num_seqs: int, vocab_size: int) -> None:
        self.requests: list[ScheduledRequest] = []
        self.rows = SequenceSlots(max_num_seqs)
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._device = shape.device
        self._kv_cache = KVCache(shape)
        self._prefix_cache = prefix_cache
        self._free_slots = list(range(max_num_seqs))[::-1]
        self._sampling: _SamplingState | None = None
        self._shared: list[SharedSegment] | None = None

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
        self.rows.add(sequences, [self._free_slots.pop() for _ in requests], self._vocab_size)
        self.requests += requests
        self._invalidate()

    def forward_input(self) -> ForwardInput:
        """Return the last token of each sequence as input of the next forward pass."""
        rows, n = self.rows, self.rows.count
        positions = rows.num_tokens[:n] - 1
        in_slot = positions - rows.num_prefilled[:n]
        self._kv_cache.reserve(int(rows.cache_slot[:n].max()) + 1, int(in_slot.max()) + 1)
        slots = self._to_device(rows.cache_slot[:n])
        layout = DecodeLayout(self._kv_cache, self._shared_segments(), slots, self._to_device(in_slot))
        return ForwardInput(
            self._to_device(rows.last_token[:n]), self._to_device(rows.first_position[:n] + positions), layout
        )

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
        """Remove finished rows. Dialogues that continue, see `Request.keep_kv_cache`, stay in the prefix cache."""
        for row, reason in reasons.items():
            scheduled = self.requests[row]
            if reason is not FinishReason.FAILED and scheduled.request.keep_kv_cache and scheduled.prompt:
                response = self.rows.tokens(row)[self.rows.num_prefilled[row] : -1]
                slot = int(self.rows.cache_slot[row])
                request_id = scheduled.request.id
                self._prefix_cache.keep_dialogue(request_id, scheduled.prompt, response, self._kv_cache, slot)
        self.remove(list(reasons))

    def remove(self, removed: Sequence[int], *, keep_prompts: bool = True) -> None:
        """Remove rows; the last rows move into the gaps."""
        if not removed:
            return
        rows = self.rows
        requests = [self.requests[row] for row in removed]
        for keep in (False, True):
            # the prompt of a dialogue that continues is cached together with the response
            prompts = [
                r.prompt for r in requests if r.prompt and keep == (keep_prompts and not r.request.keep_kv_cache)
            ]
            self._prefix_cache.release(prompts, keep=keep)
        freed = [int(rows.cache_slot[row]) for row in removed]
        gaps, moved = rows.remove(removed)
        for gap, moved_row in zip(gaps, moved, strict=True):
            self.requests[gap] = self.requests[moved_row]
        del self.requests[rows.count :]
        if gaps and not self._kv_cache.supports_any_slot:
            # matrix products over all rows read slot i for row i; the last token is not in the cache yet
            used = int((rows.num_tokens[gaps] - rows.num_prefilled[gaps]).max()) - 1
            self._kv_cache.copy_from(gaps, self._kv_cache, moved, used)
            freed = list(range(rows.count, rows.count + len(removed)))
            rows.cache_slot[gaps] = gaps
        self._free_slots += freed[::-1]
        self._invalidate()

    def clear(self) -> None:
        """Remove all rows without touching the prefix cache."""
        self.requests.clear()
        self._free_slots = list(range(self._max_num_seqs))[::-1]
        self.rows.count = 0
        self._invalidate()

    def invalidate_shared_segments(self) -> None:
        """Rebuild the shared segments at the next step, because the prompts in use have changed."""
        self._shared = None

    def _invalidate(self) -> None:
        self._sampling = self._shared = None

    def _shared_segments(self) -> list[SharedSegment]:
        """Prefixes and prompts of the running sequences."""
        if self._shared is None:
            cache = self._prefix_cache
            prompts = [request.prompt for request in self.requests if request.prompt]
            slots, lengths = [prompt.slot for prompt in prompts], [prompt.num_in_slot for prompt in cache.in_use]
            self._shared = [SharedSegment(cache.kv_cache, slots, lengths)]
            if any(prompt.prefix.tokens for prompt in prompts):
                slots, lengths = [p.prefix.slot for p in prompts], [len(prefix.tokens) for prefix in cache.prefixes]
                self._shared.insert(0, SharedSegment(cache.prefix_kv, slots, lengths))
        return self._shared

    def _to_device(self, values: npt.NDArray[Any]) -> Tensor:
        """The array on the model's device; on a CPU it shares memory."""
        return torch.from_numpy(values).to(self._device)
