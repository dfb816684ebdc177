"""Log-probs of prompts: their own forward passes, outside of the prefix cache, because those of requests keep only the
hidden state of the last token."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from quintet.config.plan.kv_blocks import BLOCK, num_blocks
from quintet.policies.inference_decoder import apply_head
from quintet.records import PromptLogprobs, TopLogprobs
from quintet.rollout.engines.hf.attention_state import AttentionState, CacheShape
from quintet.rollout.engines.hf.block_pool import BlockPool
from quintet.rollout.engines.hf.model_runner import ForwardInput, ModelRunner
from quintet.rollout.engines.hf.paged_attention import PagedLayout
from quintet.rollout.engines.hf.recurrent_states import RecurrentStates
from quintet.rollout.engines.hf.running_batch import ScheduledRequest
from quintet.rollout.engines.hf.sampling import top_logprobs

MAX_LOGITS = 1 << 24
"""Number of logits that are computed at the same time: 64 MiB in float32."""


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt, whose first tokens are computed."""

    scheduled: ScheduledRequest
    num_computed: int = 0
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.scheduled.request.prompt


class PromptScorer:
    """Computes log-probs of prompts, the first one's first, some tokens in each pass."""

    def __init__(
        self, shape: CacheShape, runner: ModelRunner, head: nn.Module, vocab_size: int, max_tokens: int
    ) -> None:
        """A pass has up to `max_tokens` tokens in whole blocks. `head` computes the logits, [tokens, vocab_size]."""
        self._shape = shape
        self._runner = runner
        self._head = head
        self._max_tokens = max_tokens
        self._max_rows = max(1, MAX_LOGITS // vocab_size)
        self._waiting: deque[_Prompt] = deque()
        self._pool: BlockPool | None = None
        """Of the first waiting prompt while it takes several passes."""
        self._recurrent: RecurrentStates | None = None

    @property
    def busy(self) -> bool:
        """Whether prompts are waiting."""
        return bool(self._waiting)

    def add(self, scheduled: ScheduledRequest) -> None:
        """Queue the prompt of a request."""
        self._waiting.append(_Prompt(scheduled))

    def abort(self, ids: Collection[int]) -> list[ScheduledRequest]:
        """Remove requests, and return them."""
        removed = [prompt.scheduled for prompt in self._waiting if prompt.scheduled.request.id in ids]
        self._waiting = deque(prompt for prompt in self._waiting if prompt.scheduled.request.id not in ids)
        self._free_cache()
        return removed

    def restart(self, weight_version: int) -> None:
        """Compute the waiting prompts from their beginning, because the weights have changed."""
        self._waiting = deque(_Prompt(prompt.scheduled) for prompt in self._waiting)
        for prompt in self._waiting:
            prompt.scheduled.weight_version = weight_version
        self._free_cache()

    def step(self) -> list[ScheduledRequest]:
        """Run one pass; return the requests whose prompts are computed, with their log-probs."""
        batch = self._select()
        if not batch:
            return []
        states = torch.split(self._forward(batch), [count for _, count in batch])
        computed = list[ScheduledRequest]()
        for (prompt, count), hidden in zip(batch, states, strict=True):
            self._record(prompt, hidden[: len(prompt.tokens) - 1 - prompt.num_computed])
            prompt.num_computed += count
            if prompt.num_computed == len(prompt.tokens):
                self._waiting.remove(prompt)
                prompt.scheduled.prompt_logprobs = PromptLogprobs(tuple(prompt.logprobs), tuple(prompt.top_logprobs))
                computed.append(prompt.scheduled)
        self._free_cache()
        return computed

    def _free_cache(self) -> None:
        """Free the cache unless the first waiting prompt continues in it."""
        if not (self._waiting and self._waiting[0].num_computed):
            self._pool = None

    def _select(self) -> list[tuple[_Prompt, int]]:
        """Return whole prompts within the tokens of a pass, or the next part of a longer one."""
        batch: list[tuple[_Prompt, int]] = []
        total = 0
        for prompt in self._waiting:
            missing = len(prompt.tokens) - prompt.num_computed
            total += num_blocks(missing) * BLOCK
            if batch and total > self._max_tokens:
                break
            batch.append((prompt, min(missing, self._max_tokens)))
            if prompt.num_computed or missing > self._max_tokens:
                break
        return batch

    def _forward(self, batch: list[tuple[_Prompt, int]]) -> Tensor:
        """Return the hidden states of the batch's tokens, [tokens, hidden]."""
        spans = [(prompt.tokens, prompt.num_computed, prompt.num_computed + count) for prompt, count in batch]
        tokens = [token for prompt, start, end in spans for token in prompt[start:end]]
        positions = [place for span in spans for place in self._runner.positions(*span)]
        rows, starts, counts = np.array([(i, start, end - start) for i, (_, start, end) in enumerate(spans)]).T
        tables = _consecutive_blocks([len(prompt.tokens) for prompt, _ in batch])
        if self._pool is None:
            count = int(tables.max()) + 1
            self._pool = BlockPool([AttentionState(self._shape, count)], count)
            self._recurrent = self._runner.new_states()
            for _ in range(count):
                self._pool.allocate()
        layout = PagedLayout(
            self._pool.state_by_layer, tables, np.ascontiguousarray(rows), starts, counts, recurrent=self._recurrent
        )
        device = self._shape.device
        return self._runner(
            ForwardInput(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), layout)
        )

    def _record(self, prompt: _Prompt, hidden: Tensor) -> None:
        """Append the log-probs of the tokens that follow those of the hidden states."""
        following = prompt.tokens[prompt.num_computed + 1 :]
        count = prompt.scheduled.request.prompt_logprobs or 0
        start = 0
        for states in torch.split(hidden, self._max_rows):
            logits = apply_head(self._head, states).float()
            tokens = torch.tensor(following[start : start + len(states)], device=logits.device)
            start += len(states)
            prompt.logprobs += logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
            if count:
                prompt.top_logprobs += top_logprobs(logits, torch.ones(len(states), device=logits.device), count)


def _consecutive_blocks(lengths: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the block tables of prompts of these lengths, int32 [prompts, blocks]: one prompt's after the other's."""
    counts = np.array([num_blocks(length) for length in lengths])
    places = np.minimum(np.arange(counts.max()), counts[:, None] - 1)
    tables: npt.NDArray[np.int32] = ((counts.cumsum() - counts)[:, None] + places).astype(np.int32)
    return tables
