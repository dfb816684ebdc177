"""The embedded engine: a transformers model under our own scheduler and cache."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quintet.policies.attention import PackedLayout
from quintet.policies.causal_lm import hidden_states
from quintet.records import Generation, Request, StopReason
from quintet.rollout.cache import DecodeLayout, PrefillLayout, Prefix, SlotCache
from quintet.rollout.sampling import sample, uniform

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HfEngine"]

SHORTEST_PREFIX = 8
"""Tokens that several prompts must have in common before the prefix is computed once for all."""


@dataclass(slots=True)
class _Running:
    """A request in a slot: what it wrote so far, and how many tokens its slot holds."""

    request: Request
    filled: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def stop_reason(self, room: int) -> StopReason | None:
        if self.tokens[-1] in self.request.stop_ids:
            return StopReason.STOP
        if len(self.tokens) >= self.request.max_tokens:
            return StopReason.LENGTH
        return StopReason.CONTEXT if self.filled >= room else None


@dataclass(frozen=True, slots=True)
class _Computed:
    """A prompt that lies in the cache, and the hidden state of its last token, [hidden]."""

    slot: int
    hidden: Tensor


class HfEngine:
    """Continuous batching over slots, in this process.

    Requests are admitted as soon as slots are free. A prompt is computed once for all requests that
    bring it, now or later under the same weights, and what prompts have in common only once; every
    step decodes one token for all. The model may be the learner's own (then `load_weights` only
    counts the version) or a copy in another type.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int, context: int, weight_version: int = 0) -> None:
        """`slots` requests at a time, `context` tokens for prompt and answer together."""
        self._model = model
        self._slots = slots
        self._context = context
        self.weight_version = weight_version
        self._waiting: deque[Request] = deque()
        self._running: list[_Running] = []
        self._prefix = Prefix()
        self._computed: OrderedDict[tuple[int, ...], _Computed] = OrderedDict()
        self._prompts = max(slots // 2, 1)
        self._spare = list(range(slots, slots + self._prompts))
        self._cache: SlotCache | None = None

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(self, request: Request) -> None:
        """See `Engine.submit`."""
        if not 0 < len(request.prompt) < self._context:
            raise ValueError(f"a prompt of {len(request.prompt)} tokens in a context of {self._context}")
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """See `Engine.step`."""
        admitted = self._admit()
        if self._running:
            decoding = len(self._running) - len(admitted)
            hidden = [self._decode(decoding)] if decoding else []
            if admitted:
                hidden.append(self._prefill(decoding, admitted))
            self._draw(torch.cat(hidden))
        return self._retire()

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.load_weights`. An empty stream says that the model is shared and already new."""
        parameters = dict(self._model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                parameters[name].copy_(tensor)
        self.forget()
        self.weight_version = version

    def forget(self) -> None:
        """See `Engine.forget`."""
        self._spare += [known.slot for known in self._computed.values()]
        self._spare.sort()
        self._computed.clear()
        self._prefix = Prefix()

    def sleep(self) -> None:
        """Free the cache; running requests must have ended."""
        if self.busy:
            raise RuntimeError("the engine can't sleep while requests run")
        self.forget()
        self._cache = None

    def wake(self) -> None:
        """The cache comes back with the next request."""

    def _store(self) -> SlotCache:
        if self._cache is None:
            config = self._model.config
            heads, dim = config.num_attention_heads, getattr(config, "head_dim", None)
            self._cache = SlotCache(
                config.num_hidden_layers,
                self._slots + self._prompts,
                config.num_key_value_heads,
                self._context,
                dim or config.hidden_size // heads,
                self._model.dtype,
            )
        return self._cache

    def _admit(self) -> list[_Running]:
        """Move waiting requests into the free slots behind the running ones."""
        free = self._slots - len(self._running)
        prompts: set[tuple[int, ...]] = set()
        admitted: list[_Running] = []
        while self._waiting and len(admitted) < free:
            prompts.add(self._waiting[0].prompt)
            if len(prompts) > self._prompts:
                break
            request = self._waiting.popleft()
            admitted.append(_Running(request, len(request.prompt)))
        self._running.extend(admitted)
        return admitted

    def _prefill(self, first: int, admitted: list[_Running]) -> Tensor:
        """Bring prompts into the slots from `first` on; hidden states of their last tokens, [b, hidden]."""
        prompts = [run.request.prompt for run in admitted]
        for prompt in prompts:
            if prompt in self._computed:
                self._computed.move_to_end(prompt)
        if fresh := [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._computed]:
            self._compute(fresh)
        known = [self._computed[prompt] for prompt in prompts]
        slots = range(first, first + len(prompts))
        self._store().copy([one.slot for one in known], slots, max(map(len, prompts)))
        return torch.stack([one.hidden for one in known])

    def _compute(self, prompts: list[tuple[int, ...]]) -> None:
        """Keys and values of new prompts into spare slots; those not used for longest make room."""
        while len(self._spare) < len(prompts):
            self._spare.append(self._computed.popitem(last=False)[1].slot)
        slots = [self._spare.pop() for _ in prompts]
        past = self._share_prefix(prompts)
        lengths = torch.tensor([len(prompt) - past for prompt in prompts])
        tokens = torch.tensor([token for prompt in prompts for token in prompt[past:]])
        positions = torch.cat([torch.arange(past, len(prompt)) for prompt in prompts])
        layout = PrefillLayout(self._store(), slots, lengths, self._prefix, past)
        hidden = hidden_states(self._model.model, tokens, positions, layout)[lengths.cumsum(0) - 1]
        for prompt, slot, last in zip(prompts, slots, hidden, strict=True):
            self._computed[prompt] = _Computed(slot, last)

    def _share_prefix(self, prompts: list[tuple[int, ...]]) -> int:
        """Tokens that all prompts share with the kept prefix; makes a new one where that pays."""
        longest = min(map(len, prompts)) - 1
        kept = _common([self._prefix.tokens, *prompts])
        common = min(_common(prompts), longest)
        if len(prompts) < 2 or common < SHORTEST_PREFIX or common <= kept or kept == len(self._prefix.tokens) > 0:
            return min(kept, longest)
        recorder = _Recorder(common)
        tokens = torch.tensor(prompts[0][:common])
        hidden_states(self._model.model, tokens, torch.arange(common), recorder)
        self._prefix = Prefix(prompts[0][:common], tuple(recorder.keys), tuple(recorder.values))
        return common

    def _decode(self, count: int) -> Tensor:
        """Feed the last token of the first `count` slots, [count, hidden]."""
        tokens = torch.tensor([run.tokens[-1] for run in self._running[:count]])
        places = torch.tensor([run.filled for run in self._running[:count]])
        for run in self._running[:count]:
            run.filled += 1
        return hidden_states(self._model.model, tokens, places, DecodeLayout(self._store(), places))

    def _draw(self, hidden: Tensor) -> None:
        """Sample one token for every running request from hidden states [n, hidden]."""
        requests = [run.request for run in self._running]
        seeds = torch.tensor([request.seed for request in requests])
        places = torch.tensor([len(run.tokens) for run in self._running])
        tokens, logprobs = sample(
            self._model.lm_head(hidden),
            torch.tensor([request.temperature for request in requests]),
            torch.tensor([request.top_k for request in requests]),
            torch.tensor([request.top_p for request in requests]),
            uniform(seeds, places),
        )
        for run, token, logprob in zip(self._running, tokens.tolist(), logprobs.tolist(), strict=True):
            run.tokens.append(token)
            run.logprobs.append(logprob)

    def _retire(self) -> list[Generation]:
        """Take out what ended and close the gaps with the requests of the last slots."""
        reasons = [run.stop_reason(self._context) for run in self._running]
        ended = [
            Generation(run.request.id, tuple(run.tokens), tuple(run.logprobs), reason, self.weight_version)
            for run, reason in zip(self._running, reasons, strict=True)
            if reason is not None
        ]
        stay = [slot for slot, reason in enumerate(reasons) if reason is None]
        gaps = [slot for slot, reason in enumerate(reasons) if reason is not None and slot < len(stay)]
        movers = [slot for slot in stay if slot >= len(stay)]
        if movers:
            self._store().copy(movers, gaps, max(self._running[slot].filled for slot in movers))
        for source, target in zip(movers, gaps, strict=True):
            self._running[target] = self._running[source]
        del self._running[len(stay) :]
        return ended


class _Recorder(PackedLayout):
    """Attention over one sequence that keeps its keys and values."""

    def __init__(self, length: int) -> None:
        super().__init__(torch.tensor([length]))
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.keys.append(key.transpose(0, 1)[None])
        self.values.append(value.transpose(0, 1)[None])
        return super().attend(layer, query, key, value, scale)


def _common(sequences: list[tuple[int, ...]]) -> int:
    """Length of the longest common prefix."""
    low, high = min(sequences), max(sequences)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
