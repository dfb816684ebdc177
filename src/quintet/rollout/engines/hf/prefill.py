"""Prefill: the cached prompts of admitted requests, and the next chunk of prompt tokens to compute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from quintet.rollout.engines.hf.attention_layouts import MAX_KERNEL_TOKENS, PrefillLayout
from quintet.rollout.engines.hf.kv_cache import CacheShape
from quintet.rollout.engines.hf.model_runner import ForwardInput, ModelRunner
from quintet.rollout.engines.hf.prefix_cache import (
    MIN_SHARED_PREFIX,
    CachedPrompt,
    PrefixCache,
    SharedPrefix,
    common_prefix,
)


class PrefillQueue:
    """Prompts to prefill. Each distinct prompt is computed once, and a common prefix of several prompts once."""

    def __init__(
        self, shape: CacheShape, runner: ModelRunner, max_unused: int, max_tokens: int, *, chunked: bool
    ) -> None:
        """`max_unused` limits the cached prompts without a running request, `max_tokens` the prompt tokens of one
        forward pass; `chunked` splits longer prompts over several passes."""
        self.prefix_cache = PrefixCache(shape, max_unused)
        self._device = shape.device
        self._runner = runner
        self._max_tokens = max_tokens
        self._chunked = chunked
        self._batch: list[tuple[CachedPrompt, int]] = []

    def acquire(self, requests: Sequence[tuple[int, tuple[int, ...]]]) -> list[CachedPrompt]:
        """Return the cached prompts of requests, given as ids and prompt tokens: cached ones, continued dialogues, or
        new ones behind the longest known prefix. They count as used until `PrefixCache.release`."""
        cache = self.prefix_cache
        cached = [cache.find(tokens) or cache.continue_dialogue(number, tokens) for number, tokens in requests]
        new = list(dict.fromkeys(tokens for hit, (_, tokens) in zip(cached, requests, strict=True) if hit is None))
        added = {tokens: cache.add(tokens, self._prefix_of(tokens, new)) for tokens in new}
        prompts = [hit or added[tokens] for hit, (_, tokens) in zip(cached, requests, strict=True)]
        cache.use(prompts)
        return prompts

    def next_batch(self, prompts: Iterable[CachedPrompt]) -> ForwardInput | None:
        """Return the next tokens to prefill of prompts that share a prefix, and are short or long enough for the same
        kind of attention; None if all are computed."""
        incomplete = dict.fromkeys(prompt for prompt in prompts if prompt.hidden is None)
        self._batch = batch = self._select(incomplete)
        if not batch:
            return None
        cache, prefix = self.prefix_cache, batch[0][0].prefix
        lengths = [count for _, count in batch]
        slots, past = [prompt.slot for prompt, _ in batch], [prompt.num_in_slot for prompt, _ in batch]
        before = (cache.prefix_kv, prefix.slot, len(prefix.tokens)) if prefix.tokens else None
        return ForwardInput(
            self._tensor([x for p, count in batch for x in p.tokens[p.num_computed : p.num_computed + count]]),
            self._tensor(
                [i for p, n in batch for i in self._runner.positions(p.tokens, p.num_computed, p.num_computed + n)]
            ),
            PrefillLayout(cache.kv_cache, slots, past, lengths, before),
        )

    def complete_batch(self, states: Tensor) -> None:
        """Record that the last batch is computed; `states` are its hidden states, [tokens, hidden]."""
        last = states[self._tensor([count for _, count in self._batch]).cumsum(0) - 1]
        for (prompt, count), state in zip(self._batch, last, strict=True):
            prompt.num_computed += count
            if prompt.num_computed == len(prompt.tokens):
                prompt.hidden = state

    def _select(self, prompts: Iterable[CachedPrompt]) -> list[tuple[CachedPrompt, int]]:
        """Prompts behind one prefix, each with the number of its tokens in the next pass, within `max_tokens`. Prompts
        that are too long for the kernels have other passes, so that the others' numbers do not depend on them."""
        batch: list[tuple[CachedPrompt, int]] = []
        budget = self._max_tokens
        for prompt in prompts:
            missing = len(prompt.tokens) - prompt.num_computed
            if budget <= 0 or (batch and _attention_key(prompt) != _attention_key(batch[0][0])):
                continue
            if not self._chunked and missing > budget and batch:
                break
            count = min(missing, budget) if self._chunked else missing
            batch.append((prompt, count))
            budget -= count
        return batch

    def _prefix_of(self, tokens: tuple[int, ...], new: Sequence[tuple[int, ...]]) -> SharedPrefix:
        """The longest known prefix of a prompt, or a new one that the `new` prompts share."""
        cache = self.prefix_cache
        cached = [p for p in cache.prefixes if len(p.tokens) < len(tokens) and tokens[: len(p.tokens)] == p.tokens]
        best = max(cached, key=lambda prefix: len(prefix.tokens))
        if best.tokens or len(new) < 2:
            return best
        length = min(common_prefix(new), min(map(len, new)) - 1)
        if length < MIN_SHARED_PREFIX or (prefix := cache.add_prefix(tokens[:length])) is None:
            return best
        layout = PrefillLayout(cache.prefix_kv, [prefix.slot], [0], [length])
        positions = self._tensor(self._runner.positions(prefix.tokens, 0, length))
        self._runner([ForwardInput(self._tensor(prefix.tokens), positions, layout)])
        return prefix

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, device=self._device)


def _attention_key(prompt: CachedPrompt) -> tuple[int, bool]:
    """Return the key by which prompts share a pass: the slot of their prefix, and whether the kernels compute them."""
    return prompt.prefix.slot, len(prompt.tokens) <= MAX_KERNEL_TOKENS
