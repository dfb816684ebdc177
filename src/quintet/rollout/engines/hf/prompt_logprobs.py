"""Log-probs of prompts: their own forward passes, outside of the prefix cache, because those of requests keep only the
hidden state of the last token."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from quintet.policies.inference_decoder import apply_head
from quintet.records import PromptLogprobs, Request, TopLogprobs
from quintet.rollout.engines.hf.attention_layouts import PrefillLayout
from quintet.rollout.engines.hf.kv_cache import CacheShape, KVCache
from quintet.rollout.engines.hf.model_runner import ForwardInput, ModelRunner
from quintet.rollout.engines.hf.sampling import top_logprobs

MAX_LOGITS = 1 << 24
"""Number of logits that are computed at the same time: 64 MiB in float32."""


@dataclass(eq=False, slots=True)
class _Prompt:
    """A prompt, whose first tokens are computed."""

    request: Request
    num_computed: int = 0
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)


class PromptScorer:
    """Computes log-probs of prompts, the first one's first, some tokens in each pass."""

    def __init__(
        self, shape: CacheShape, runner: ModelRunner, head: nn.Module, vocab_size: int, max_tokens: int
    ) -> None:
        """A pass has up to `max_tokens` tokens. `head` computes the logits, [tokens, vocab_size]."""
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

    def add(self, request: Request) -> None:
        """Queue the prompt of a request."""
        self._waiting.append(_Prompt(request))

    def abort(self, ids: Collection[int]) -> list[Request]:
        """Remove requests, and return them."""
        removed = [prompt for prompt in self._waiting if prompt.request.id in ids]
        self._waiting = deque(prompt for prompt in self._waiting if prompt.request.id not in ids)
        return [prompt.request for prompt in removed]

    def restart(self) -> None:
        """Compute the waiting prompts from their beginning, because the weights have changed."""
        self._waiting = deque(_Prompt(prompt.request) for prompt in self._waiting)

    def step(self) -> Iterator[tuple[Request, PromptLogprobs]]:
        """Run one pass; yield the requests whose prompts are computed."""
        batch = self._select()
        if not batch:
            return
        states = torch.split(self._forward(batch), [count for _, count in batch])
        for (prompt, count), hidden in zip(batch, states, strict=True):
            self._record(prompt, hidden[: len(prompt.request.prompt) - 1 - prompt.num_computed])
            prompt.num_computed += count
            if prompt.num_computed == len(prompt.request.prompt):
                self._waiting.remove(prompt)
                yield prompt.request, PromptLogprobs(tuple(prompt.logprobs), tuple(prompt.top_logprobs))

    def _select(self) -> list[tuple[_Prompt, int]]:
        """Return whole prompts within the tokens of a pass, or the next part of a longer one."""
        batch: list[tuple[_Prompt, int]] = []
        budget = self._max_tokens
        for prompt in self._waiting:
            missing = len(prompt.request.prompt) - prompt.num_computed
            if missing > budget and batch:
                break
            batch.append((prompt, min(missing, budget)))
            budget -= missing
            if budget <= 0 or prompt.num_computed:
                break
        return batch

    def _forward(self, batch: list[tuple[_Prompt, int]]) -> Tensor:
        """Return the hidden states of the batch's tokens, [tokens, hidden]."""
        if not batch[0][0].num_computed:
            self._kv_cache = KVCache(self._shape)
        self._kv_cache.reserve(len(batch), max(prompt.num_computed + count for prompt, count in batch))
        spans = [(prompt.request.prompt, prompt.num_computed, prompt.num_computed + count) for prompt, count in batch]
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
        following = prompt.request.prompt[prompt.num_computed + 1 :]
        count = prompt.request.prompt_logprobs or 0
        start = 0
        for states in torch.split(hidden, self._max_rows):
            logits = apply_head(self._head, states).float()
            tokens = torch.tensor(following[start : start + len(states)], device=logits.device)
            start += len(states)
            prompt.logprobs += logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
            if count:
                prompt.top_logprobs += top_logprobs(logits, torch.ones(len(states), device=logits.device), count)
