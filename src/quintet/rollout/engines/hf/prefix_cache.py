"""Prefix cache: keys and values of prompts in use, of earlier prompts and dialogues, and of shared prefixes.

Prompts in use occupy the slots from 0 on without gaps, so that attention reads them in place; unused prompts wait in a
second store until they are used again or evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from quintet.rollout.engines.hf.kv_cache import CacheShape, KVCache

MIN_SHARED_PREFIX = 8
"""Number of common tokens from which a prefix of several prompts is computed once for all."""
MAX_SHARED_PREFIXES = 4


@dataclass(frozen=True, eq=False, slots=True)
class SharedPrefix:
    """Tokens that several prompts begin with, in a slot of `PrefixCache.prefix_kv`."""

    tokens: tuple[int, ...]
    slot: int


@dataclass(eq=False, slots=True)
class CachedPrompt:
    """A prompt, or a dialogue so far. Its slot holds the tokens behind its shared prefix."""

    tokens: tuple[int, ...]
    prefix: SharedPrefix
    num_computed: int
    """Tokens whose keys and values are computed, the prefix included."""
    slot: int = -1
    """Slot among the prompts in use while it has users, else among the unused ones; -1 without a slot."""
    users: int = 0
    hidden: Tensor | None = None
    """Hidden state of the last token, [hidden]; None until all tokens are computed."""

    @property
    def num_in_slot(self) -> int:
        """Number of computed tokens in its slot."""
        return self.num_computed - len(self.prefix.tokens)


class PrefixCache:
    """Prompts with cached keys and values under the current weights."""

    def __init__(self, shape: CacheShape, max_unused: int) -> None:
        """`max_unused` prompts without users are kept; the least recently used ones are evicted."""
        self._max_unused = max_unused
        self.in_use: list[CachedPrompt] = []
        """Prompts with users; the index is the slot."""
        self.kv_cache = KVCache(shape)
        self.prefixes: list[SharedPrefix] = []
        self.prefix_kv = KVCache(shape)
        self.prefix_kv.reserve(1, 1)
        self._unused: OrderedDict[CachedPrompt, None] = OrderedDict()
        self._unused_kv = KVCache(shape)
        self._free: list[int] = []
        self._by_tokens: dict[tuple[int, ...], CachedPrompt] = {}
        self._dialogues: dict[int, CachedPrompt] = {}
        self.reset()

    def reset(self) -> None:
        """Drop all prompts; the memory stays allocated."""
        self.in_use.clear()
        self.prefixes[:] = [SharedPrefix((), 0)]
        self._unused.clear()
        self._by_tokens.clear()
        self._dialogues.clear()
        self._free = list(range(self._max_unused))[::-1]

    def find(self, tokens: tuple[int, ...]) -> CachedPrompt | None:
        """Return the prompt if it is cached or being prefilled."""
        return self._by_tokens.get(tokens)

    def continue_dialogue(self, number: int, tokens: tuple[int, ...]) -> CachedPrompt | None:
        """Return the dialogue cached under `number`, cut where `tokens` differ from it and retargeted to `tokens`; None
        if nothing of it can be reused."""
        prompt = self._dialogues.pop(number, None)
        if prompt is None or prompt not in self._unused:
            return None
        num_computed = min(common_prefix([prompt.tokens, tokens]), len(tokens) - 1)
        if tokens in self._by_tokens or num_computed <= len(prompt.prefix.tokens):
            return None
        prompt.tokens = tokens
        prompt.num_computed = num_computed
        prompt.hidden = None
        self._by_tokens[tokens] = prompt
        return prompt

    def add(self, tokens: tuple[int, ...], prefix: SharedPrefix) -> CachedPrompt:
        """Add a prompt of which only the prefix is computed."""
        prompt = self._by_tokens[tokens] = CachedPrompt(tokens, prefix, len(prefix.tokens))
        return prompt

    def add_prefix(self, tokens: tuple[int, ...]) -> SharedPrefix | None:
        """Add a prefix, which the caller has to compute; None if `MAX_SHARED_PREFIXES` exist."""
        if len(self.prefixes) > MAX_SHARED_PREFIXES:
            return None
        prefix = SharedPrefix(tokens, len(self.prefixes))
        self.prefixes.append(prefix)
        self.prefix_kv.reserve(len(self.prefixes), len(tokens))
        return prefix

    def use(self, prompts: Sequence[CachedPrompt]) -> None:
        """Add one user to each prompt; unused prompts move to slots behind those in use."""
        arriving = [prompt for prompt in dict.fromkeys(prompts) if not prompt.users]
        for prompt in prompts:
            prompt.users += 1
        longest = max((len(prompt.tokens) - len(prompt.prefix.tokens) for prompt in arriving), default=0)
        self.kv_cache.reserve(len(self.in_use) + len(arriving), longest)
        reused = [prompt for prompt in arriving if prompt in self._unused]
        sources = [prompt.slot for prompt in reused]
        for prompt in arriving:
            prompt.slot = len(self.in_use)
            self.in_use.append(prompt)
        if reused:
            self.kv_cache.copy_from(
                [p.slot for p in reused], self._unused_kv, sources, max(p.num_in_slot for p in reused)
            )
            for prompt in reused:
                del self._unused[prompt]
            self._free += sources

    def release(self, prompts: Iterable[CachedPrompt], *, keep: bool = True) -> None:
        """Remove one user from each prompt. Prompts without users stay cached, or are dropped without `keep`."""
        leaving: list[CachedPrompt] = []
        for prompt in prompts:
            prompt.users -= 1
            if not prompt.users:
                leaving.append(prompt)
        if not leaving:
            return
        gaps = [prompt.slot for prompt in leaving]
        cached = leaving[-self._max_unused :] if keep and self._max_unused else []
        for prompt in leaving[: len(leaving) - len(cached)]:
            self._drop(prompt)
        if cached:
            self._move_to_unused(cached)
        self._close_gaps(gaps)

    def keep_dialogue(
        self, number: int, prompt: CachedPrompt, response: Sequence[int], responses: KVCache, row: int
    ) -> None:
        """Cache a dialogue under `number`: its prompt and the response tokens in slot `row` of `responses`."""
        if not self._max_unused:
            return
        tokens = prompt.tokens + tuple(response)
        dialogue = CachedPrompt(tokens, prompt.prefix, len(tokens), self._free_slot())
        self._unused_kv.reserve(dialogue.slot + 1, dialogue.num_in_slot)
        self._unused_kv.copy_from([dialogue.slot], self.kv_cache, [prompt.slot], prompt.num_in_slot)
        self._unused_kv.copy_from([dialogue.slot], responses, [row], len(response), offset=prompt.num_in_slot)
        self._unused[dialogue] = None
        self._dialogues[number] = dialogue

    def _move_to_unused(self, prompts: Sequence[CachedPrompt]) -> None:
        sources = [prompt.slot for prompt in prompts]
        for prompt in prompts:
            prompt.slot = self._free_slot()
            self._unused[prompt] = None
        used = max(prompt.num_in_slot for prompt in prompts)
        self._unused_kv.reserve(max(prompt.slot for prompt in prompts) + 1, used)
        self._unused_kv.copy_from([prompt.slot for prompt in prompts], self.kv_cache, sources, used)

    def _free_slot(self) -> int:
        """A free slot for an unused prompt; evicts the least recently used one if there is none."""
        if not self._free:
            oldest, _ = self._unused.popitem(last=False)
            self._drop(oldest)
            return oldest.slot
        return self._free.pop()

    def _drop(self, prompt: CachedPrompt) -> None:
        if self._by_tokens.get(prompt.tokens) is prompt:
            del self._by_tokens[prompt.tokens]

    def _close_gaps(self, gaps: list[int]) -> None:
        """Move the last prompts in use into the slots that became free."""
        count = len(self.in_use) - len(gaps)
        freed = set(gaps)
        moved = [prompt for slot, prompt in enumerate(self.in_use[count:], count) if slot not in freed]
        targets = sorted(slot for slot in gaps if slot < count)
        if moved:
            sources, used = [prompt.slot for prompt in moved], max(prompt.num_in_slot for prompt in moved)
            self.kv_cache.copy_from(targets, self.kv_cache, sources, used)
        for prompt, slot in zip(moved, targets, strict=True):
            prompt.slot = slot
            self.in_use[slot] = prompt
        del self.in_use[count:]


def common_prefix(sequences: Sequence[tuple[int, ...]]) -> int:
    """Return the length of the longest common prefix."""
    low, high = min(sequences), max(sequences)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
