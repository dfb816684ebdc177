"""Forward passes of a model's body over tokens that lie in different places of a cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quintet.policies.attention import Layout
from quintet.policies.causal_lm import hidden_states
from quintet.policies.inference import InferenceDecoder
from quintet.rollout.cache import SideBySide

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Passes", "Work"]


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens to be computed, their places in their sequences, int64 [n], and what they attend to."""

    tokens: Tensor
    positions: Tensor
    layout: Layout


class Passes:
    """A model's body, in the fastest form that it has."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._body = model.base_model
        self._decoder = InferenceDecoder.of(self._body)
        self._compiled_up_to: int | None = None

    def compile(self, most_tokens: int | None) -> None:
        """Compile what layers do besides attention, for up to so many tokens at a time; None for any number."""
        self._compiled_up_to = most_tokens or sys.maxsize
        self._decoder = None
        for module in self._body.modules():
            if type(module).__name__.endswith(("MLP", "RMSNorm")):
                module.compile(dynamic=True)

    def let_go(self) -> None:
        """Keep no memory in which weights lay before they were moved."""
        if self._decoder:
            self._decoder.let_go()

    def __call__(self, works: Sequence[Work]) -> tuple[Tensor, ...]:
        """Last hidden states of each work's tokens, [tokens, hidden], by one pass over all of them."""
        sizes = [work.tokens.shape[0] for work in works]
        layout, tokens, positions = works[0].layout, works[0].tokens, works[0].positions
        if len(works) > 1:
            layout = SideBySide([work.layout for work in works], sizes)
            tokens = torch.cat([work.tokens for work in works])
            positions = torch.cat([work.positions for work in works])
        return torch.split(self._states(tokens, positions, layout), sizes)

    def _states(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        if self._decoder:
            return self._decoder(tokens, positions, layout)
        if self._compiled_up_to is None or len(tokens) <= self._compiled_up_to:
            return hidden_states(self._body, tokens, positions, layout)
        with torch.compiler.set_stance("force_eager"):
            return hidden_states(self._body, tokens, positions, layout)
