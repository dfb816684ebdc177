"""Scheduler: waiting requests are admitted to prefill, then join the running batch; any can be preempted or aborted."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from torch import Tensor

from quintet.rollout.engines.hf.kv_cache import CacheShape
from quintet.rollout.engines.hf.model_runner import ModelRunner
from quintet.rollout.engines.hf.prefill import PrefillQueue
from quintet.rollout.engines.hf.running_batch import RunningBatch, ScheduledRequest


class Scheduler:
    """Queues of an engine: waiting → prefilling → running, at most `max_num_seqs` prefilling and running together."""

    def __init__(
        self,
        shape: CacheShape,
        runner: ModelRunner,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        prefill_tokens: int,
        chunked_prefill: bool,
    ) -> None:
        self._runner = runner
        self._device = shape.device
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._prefill = PrefillQueue(shape, runner, max_num_seqs, prefill_tokens, chunked=chunked_prefill)
        self._prefix_cache = self._prefill.prefix_cache
        self._waiting: deque[ScheduledRequest] = deque()
        self._prefilling: list[ScheduledRequest] = []
        self.running = RunningBatch(shape, self._prefix_cache, max_num_seqs, vocab_size)

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

    def add(self, scheduled: ScheduledRequest) -> None:
        """Queue a request after the waiting ones."""
        self._waiting.append(scheduled)

    def admit(self) -> None:
        """Move waiting requests to prefill while sequence slots are free."""
        num_free = self._max_num_seqs - len(self.running.requests) - len(self._prefilling)
        count = min(num_free, len(self._waiting))
        if not count:
            return
        admitted = [self._waiting.popleft() for _ in range(count)]
        if self._runner.images:
            self._runner.images.add(image for scheduled in admitted for image in scheduled.request.images)
        prompts = self._prefill.acquire([(scheduled.request.id, scheduled.tokens_to_prefill) for scheduled in admitted])
        for scheduled, prompt in zip(admitted, prompts, strict=True):
            scheduled.prompt = prompt
            scheduled.start_penalties(self._vocab_size, self._device)
        self._prefilling += admitted
        self.running.invalidate_shared_segments()

    def forward(self) -> Tensor | None:
        """Run one forward pass over the last tokens of running requests and the next chunk of prompts. Return the
        hidden states of the running ones, [running, hidden], if there are any."""
        is_decoding = bool(self.running.requests)
        prefill = self._prefill.next_batch(scheduled.prompt for scheduled in self._prefilling if scheduled.prompt)
        inputs = [*([self.running.forward_input()] if is_decoding else []), *([prefill] if prefill else [])]
        if not inputs:
            return None
        states = self._runner(inputs)
        if prefill:
            self._prefill.complete_batch(states[-1])
        return states[0] if is_decoding else None

    def start_decoding(self) -> list[Tensor]:
        """Append requests whose prompt is computed to the running ones. Return the hidden state of each one's last
        token, [hidden]."""
        ready = [
            scheduled for scheduled in self._prefilling if scheduled.prompt and scheduled.prompt.hidden is not None
        ]
        if not ready:
            return []
        self._prefilling = [
            scheduled for scheduled in self._prefilling if scheduled.prompt is None or scheduled.prompt.hidden is None
        ]
        if self._runner.images and not self._prefilling:
            self._runner.images.release()
        self.running.add(ready, self._max_model_len)
        return [
            scheduled.prompt.hidden for scheduled in ready if scheduled.prompt and scheduled.prompt.hidden is not None
        ]

    def abort(self, ids: Collection[int]) -> list[ScheduledRequest]:
        """Remove requests and return them with their responses so far."""
        ids = set(ids)
        aborted = [scheduled for scheduled in self._waiting if scheduled.request.id in ids]
        self._waiting = deque(scheduled for scheduled in self._waiting if scheduled.request.id not in ids)
        prefilling = [scheduled for scheduled in self._prefilling if scheduled.request.id in ids]
        self._prefilling = [scheduled for scheduled in self._prefilling if scheduled.request.id not in ids]
        self._prefix_cache.release((scheduled.prompt for scheduled in prefilling if scheduled.prompt), keep=False)
        rows = [row for row, scheduled in enumerate(self.running.requests) if scheduled.request.id in ids]
        running = [self.running.snapshot(row) for row in rows]
        self.running.remove(rows, keep_prompts=False)
        return aborted + prefilling + running

    def preempt_all(self) -> None:
        """Put running and prefilling requests back at the head of the waiting queue, with their responses so far, and
        reset the prefix cache."""
        running = [self.running.snapshot(row) for row in range(len(self.running.requests))]
        for scheduled in reversed([*running, *self._prefilling]):
            scheduled.prompt = None
            self._waiting.appendleft(scheduled)
        self._prefilling.clear()
        self.running.clear()
        self._prefix_cache.reset()
        if self._runner.images:
            self._runner.images.clear()

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
