"""Log-probs of prompts: their own forward passes, outside of the prefix cache, because those of requests keep only the
hidden state of the last token."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quintet.policies.inference_decoder import apply_head
from quintet.records import PromptLogprobs, TopLogprobs
from quintet.rollout.engines.hf.attention_layouts import PrefillLayout
from quintet.rollout.engines.hf.kv_cache import BLOCK, CacheShape, KVCache
from quintet.rollout.engines.hf.model_runner import ForwardInput, ModelRunner
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
        """A pass has up to `max_tokens` tokens, counting the padding of prompts to the longest. `head` computes the
        logits, [tokens, vocab_size]."""
        self._shape = shape
        self._runner = runner
        self._head = head
        self._max_tokens = max_tokens
        self._max_rows = max(1, MAX_LOGITS // vocab_size)
        self._waiting: deque[_Prompt] = deque()
        self._kv_cache = KVCache(shape)
        """Of the first waiting prompt if it takes several passes."""

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
            self._kv_cache = KVCache(self._shape)

    def _select(self) -> list[tuple[_Prompt, int]]:
        """Return whole prompts within the tokens of a pass, or the next part of a longer one."""
        batch: list[tuple[_Prompt, int]] = []
        longest = 0
        for prompt in self._waiting:
            missing = len(prompt.tokens) - prompt.num_computed
            longest = max(longest, -(-missing // BLOCK) * BLOCK)
            # the cache has as many tokens for each prompt as for the longest
            if batch and (len(batch) + 1) * longest > self._max_tokens:
                break
            batch.append((prompt, min(missing, self._max_tokens)))
            if prompt.num_computed or missing > self._max_tokens:
                break
        return batch

    def _forward(self, batch: list[tuple[_Prompt, int]]) -> Tensor:
        """Return the hidden states of the batch's tokens, [tokens, hidden]."""
        self._kv_cache.reserve(len(batch), max(prompt.num_computed + count for prompt, count in batch))
        spans = [(prompt.tokens, prompt.num_computed, prompt.num_computed + count) for prompt, count in batch]
        tokens = [token for prompt, start, end in spans for token in prompt[start:end]]
        positions = [place for span in spans for place in self._runner.positions(*span)]
        device = self._shape.device
        layout = PrefillLayout(
            self._kv_cache, list(range(len(batch))), [start for _, start, _ in spans], [count for _, count in batch]
        )
        pass_input = ForwardInput(torch.tensor(tokens, device=device), torch.tensor(positions, device=device), layout)
        (states,) = self._runner([pass_input])
        return states

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
