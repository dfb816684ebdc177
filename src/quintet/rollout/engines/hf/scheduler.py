"""Scheduler: waiting requests are admitted to prefill, then join the running batch; any can be preempted or aborted."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from quintet.config.plan.kv_blocks import num_blocks
from quintet.rollout.engines.hf.model_runner import ForwardInput, ModelRunner
from quintet.rollout.engines.hf.paged_attention import PagedLayout
from quintet.rollout.engines.hf.paged_cache import PagedCache
from quintet.rollout.engines.hf.prefill import PassBudget, PrefillSpan, next_spans
from quintet.rollout.engines.hf.prefix_tree import PoolExhaustedError
from quintet.rollout.engines.hf.running_batch import RunningBatch, ScheduledRequest


class Scheduler:
    """Queues of an engine: waiting → prefilling → running, at most `max_num_seqs` prefilling and running together.

    Requests wait while there are no blocks for their prompts. A running request that gets no block preempts the one
    that came last, which is prefilled again later, with its response so far.
    """

    def __init__(
        self,
        cache: PagedCache,
        runner: ModelRunner,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        budget: PassBudget,
        chunked_prefill: bool,
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._device = cache.device
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._budget = budget
        self._chunked_prefill = chunked_prefill
        self._arrivals = itertools.count()
        self._waiting: deque[ScheduledRequest] = deque()
        self._prefilling: list[ScheduledRequest] = []
        self.num_prompt_tokens = 0
        """Prompt tokens of the last pass."""
        self.num_preempted = 0
        """Requests that lost their blocks to earlier ones."""
        self.running = RunningBatch(cache, max_num_seqs, vocab_size)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting, prefilling or running."""
        return bool(self._waiting or self._prefilling or self.running.requests)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_prefilling(self) -> int:
        return len(self._prefilling)

    @property
    def _num_active(self) -> int:
        return len(self.running.requests) + len(self._prefilling)

    def add(self, scheduled: ScheduledRequest) -> None:
        """Queue a request after the waiting ones."""
        scheduled.arrival = next(self._arrivals)
        self._waiting.append(scheduled)

    def admit(self) -> None:
        """Move waiting requests to prefill while sequence slots and blocks are free."""
        while self._waiting and self._num_active < self._max_num_seqs and self._has_blocks(self._waiting[0]):
            scheduled = self._waiting.popleft()
            scheduled.sequence = self._cache.open(scheduled.tokens_to_prefill)
            if self._runner.images:
                self._runner.images.add(scheduled.request.images)
            scheduled.start_penalties(self._vocab_size, self._device)
            self._prefilling.append(scheduled)

    def _has_blocks(self, scheduled: ScheduledRequest) -> bool:
        """Whether there are blocks for its prompt, and another one for each request in use. The first request always
        has them."""
        tree, active = self._cache.tree, self._num_active
        tokens = scheduled.tokens_to_prefill
        if not active or tree.num_available >= num_blocks(len(tokens)) + active + 1:
            return True
        return tree.num_available >= tree.num_new_blocks(tokens) + active + 1

    def reserve_blocks(self) -> None:
        """Give each running request a block for its last token; preempt the latest requests if there are too few."""
        for scheduled, position in self.running.starting_blocks():
            while scheduled.sequence is not None:
                try:
                    self._cache.make_writable(scheduled.sequence, position)
                    break
                except PoolExhaustedError:
                    self._preempt_last()

    def _preempt_last(self) -> None:
        """Put the request that came last back at the head of the waiting queue, with its response so far."""
        last = max([*self.running.requests, *self._prefilling], key=lambda scheduled: scheduled.arrival)
        if last in self._prefilling:
            self._prefilling.remove(last)
            self._close(last)
        else:
            row = self.running.requests.index(last)
            self.running.snapshot(row)
            self.running.remove([row])
        self.num_preempted += 1
        self._waiting.appendleft(last)

    def forward(self) -> Tensor | None:
        """Run one forward pass over the last tokens of running requests and the next tokens of prompts. Return the
        hidden states of the running ones, [running, hidden], if there are any."""
        count = len(self.running.requests)
        sequences = [scheduled.sequence for scheduled in self._prefilling if scheduled.sequence]
        spans: Sequence[PrefillSpan] = ()
        if sequences and (max_tokens := self._budget.next_tokens(count)):
            spans = next_spans(sequences, max_tokens, chunked=self._chunked_prefill)
        self.num_prompt_tokens = sum(span.count for span in spans)
        if not count and not spans:
            return None
        states = self._runner(self._forward_input(spans))
        end = count
        for span in spans:
            end += span.count
            if span.is_last:
                span.sequence.hidden = states[end - 1].clone()
        return states[:count] if count else None

    def _forward_input(self, spans: Sequence[PrefillSpan]) -> ForwardInput:
        """Return the tokens of a pass: those of the running requests before those of prompts."""
        running, rows = self.running, self.running.rows
        table_rows, starts = rows.table_row[: rows.count], running.cache_positions
        counts = np.ones(rows.count, np.int64)
        cache, (tokens, positions) = self._cache, running.tokens
        states = cache.pool.state_by_layer
        if not spans:
            layout = PagedLayout(states, cache.tables, table_rows, starts, counts, running.order, cache.recurrent)
            return ForwardInput(tokens, positions, layout)
        own = np.array([(span.sequence.row, span.start, span.count) for span in spans], np.int64).T
        joined = (np.concatenate(pair) for pair in zip((table_rows, starts, counts), own, strict=True))
        table_rows, starts, counts = joined
        prompt = [token for span in spans for token in span.sequence.tokens[span.start : span.end]]
        places = [x for span in spans for x in self._runner.positions(span.sequence.tokens, span.start, span.end)]
        return ForwardInput(
            torch.cat([tokens, torch.tensor(prompt, device=self._device)]),
            _join_positions(positions, torch.tensor(places, device=self._device)),
            PagedLayout(states, cache.tables, table_rows, starts, counts, recurrent=cache.recurrent),
        )

    def start_decoding(self) -> list[Tensor]:
        """Append requests whose prompt is computed to the running ones. Return the hidden state of each one's last
        token, [hidden]."""
        prefilling, ready, states = list[ScheduledRequest](), list[ScheduledRequest](), list[Tensor]()
        for scheduled in self._prefilling:
            hidden = scheduled.sequence.hidden if scheduled.sequence else None
            if hidden is None:
                prefilling.append(scheduled)
            else:
                ready.append(scheduled)
                states.append(hidden)
        self._prefilling = prefilling
        if ready:
            if self._runner.images and not prefilling:
                self._runner.images.release()
            self.running.add(ready, self._max_model_len)
        return states

    def abort(self, ids: Collection[int]) -> list[ScheduledRequest]:
        """Remove requests and return them with their responses so far."""
        ids = set(ids)
        aborted = [scheduled for scheduled in self._waiting if scheduled.request.id in ids]
        self._waiting = deque(scheduled for scheduled in self._waiting if scheduled.request.id not in ids)
        prefilling = [scheduled for scheduled in self._prefilling if scheduled.request.id in ids]
        self._prefilling = [scheduled for scheduled in self._prefilling if scheduled.request.id not in ids]
        for scheduled in prefilling:
            self._close(scheduled)
        rows = [row for row, scheduled in enumerate(self.running.requests) if scheduled.request.id in ids]
        running = [self.running.snapshot(row) for row in rows]
        self.running.remove(rows)
        return aborted + prefilling + running

    def _close(self, scheduled: ScheduledRequest) -> None:
        if scheduled.sequence is not None:
            self._cache.close(scheduled.sequence)
            scheduled.sequence = None

    def preempt_all(self) -> None:
        """Put running and prefilling requests back at the head of the waiting queue, with their responses so far, and
        reset the cache."""
        running = [self.running.snapshot(row) for row in range(len(self.running.requests))]
        for scheduled in sorted([*running, *self._prefilling], key=lambda scheduled: -scheduled.arrival):
            scheduled.sequence = None
            self._waiting.appendleft(scheduled)
        self._prefilling.clear()
        self.running.clear()
        self._cache.reset()
        if self._runner.images:
            self._runner.images.clear()

    def free_memory(self) -> None:
        """Free the memory of the cache; no request may be prefilling or running."""
        self.preempt_all()
        self._cache.release_memory()

    def remove_scored(self) -> list[ScheduledRequest]:
        """Remove and return waiting requests that have log-probs of their prompts, but no response yet."""
        scored = [each for each in self._waiting if each.prompt_logprobs is not None and not each.tokens]
        self._waiting = deque(each for each in self._waiting if each.prompt_logprobs is None or each.tokens)
        return scored

    def record_weight_update(self, version: int) -> None:
        """Note in all requests, which must be preempted, that later tokens come from new weights."""
        for scheduled in self._waiting:
            if scheduled.tokens:
                scheduled.version_changes.append((len(scheduled.tokens), version))
            else:
                scheduled.weight_version = version


def _join_positions(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate positions [n] and [m], or [m, 3] with images, which the first ones then get as well."""
    if second.dim() == 2:
        first = first[:, None].expand(-1, 3)
    return torch.cat([first, second])
