"""Forward passes of a model's body over tokens of several sequences, with one attention layout per part."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quintet.policies.attention import AttentionLayout
from quintet.policies.hidden_states import compute_hidden_states
from quintet.policies.inference_decoder import InferenceDecoder
from quintet.rollout.engines.hf.attention_layouts import ConcatenatedLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """Token ids and their positions in their sequences, int64 [n] each, and the layout of what they attend to."""

    tokens: Tensor
    positions: Tensor
    layout: AttentionLayout


class ModelRunner:
    """Runs a model's body: by `InferenceDecoder` where it supports the architecture, else by its own modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._body = model.base_model
        self._decoder = InferenceDecoder.from_body(self._body)
        self._max_compiled_tokens: int | None = None

    def compile(self, max_tokens: int | None) -> None:
        """Compile MLPs and norms for passes of up to `max_tokens` tokens; None for any number."""
        self._max_compiled_tokens = max_tokens or sys.maxsize
        self._decoder = None
        for module in self._body.modules():
            if type(module).__name__.endswith(("MLP", "RMSNorm")):
                module.compile(dynamic=True)

    def release_weights(self) -> None:
        """Drop references to the weights' memory after the model was moved to another device."""
        if self._decoder:
            self._decoder.release_memory()

    def __call__(self, inputs: Sequence[ForwardInput]) -> tuple[Tensor, ...]:
        """Return the last hidden states of each input, [tokens, hidden], from one forward pass over all of them."""
        sizes = [each.tokens.shape[0] for each in inputs]
        layout, tokens, positions = inputs[0].layout, inputs[0].tokens, inputs[0].positions
        if len(inputs) > 1:
            layout = ConcatenatedLayout([each.layout for each in inputs], sizes)
            tokens = torch.cat([each.tokens for each in inputs])
            positions = torch.cat([each.positions for each in inputs])
        return torch.split(self._hidden_states(tokens, positions, layout), sizes)

    def _hidden_states(self, tokens: Tensor, positions: Tensor, layout: AttentionLayout) -> Tensor:
        if self._decoder:
            return self._decoder(tokens, positions, layout)
        if self._max_compiled_tokens is None or len(tokens) <= self._max_compiled_tokens:
            return compute_hidden_states(self._body, tokens, positions, layout)
        with torch.compiler.set_stance("force_eager"):
            return compute_hidden_states(self._body, tokens, positions, layout)
