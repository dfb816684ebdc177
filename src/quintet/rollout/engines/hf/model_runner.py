"""Forward passes of a model's body over tokens of several sequences."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quintet.policies.attention import AttentionLayout
from quintet.policies.hidden_states import compute_hidden_states, image_hidden_states
from quintet.policies.inference_decoder import InferenceDecoder
from quintet.policies.recurrent_layers import has_recurrent_layers
from quintet.policies.vision.image_encoder import encode_images, is_vision_language, text_decoder
from quintet.policies.vision.image_tokens import decode_image_tokens, mrope_positions
from quintet.records import ImageInput
from quintet.rollout.engines.hf.recurrent_states import RecurrentStates

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """Token ids and their positions in their sequences, int64 [n] each, and the layout of what they attend to. With
    images, positions are [n, 3]."""

    tokens: Tensor
    positions: Tensor
    layout: AttentionLayout


class ModelRunner:
    """Runs a model's body: by `InferenceDecoder` where it supports the architecture, else by its own modules."""

    def __init__(self, model: PreTrainedModel, *, batch_invariant: bool = True) -> None:
        """`batch_invariant` as in `InferenceDecoder`."""
        self._body = text_decoder(model.base_model)
        self.images = ImageFeatures(model.base_model) if is_vision_language(model.config) else None
        """Images of prompts, for vision-language models."""
        self._decoder = InferenceDecoder.from_body(self._body)
        if self._decoder:
            self._decoder.batch_invariant = batch_invariant
        self._max_compiled_tokens: int | None = None
        self._is_recurrent = has_recurrent_layers(self._body)

    def new_states(self) -> RecurrentStates | None:
        """Return empty states of the recurrent layers, None if the model has none."""
        return RecurrentStates() if self._is_recurrent else None

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

    def positions(self, tokens: Sequence[int], start: int, stop: int) -> list[Any]:
        """Return the positions of the tokens from `start` to `stop` of a sequence; with images, three each."""
        if self.images is None:
            return list(range(start, stop))
        return mrope_positions(tokens)[start:stop].tolist()  # type: ignore[no-any-return]

    def __call__(self, forward_input: ForwardInput) -> Tensor:
        """Return the last hidden states of the tokens, [tokens, hidden]."""
        tokens, positions, layout = forward_input.tokens, forward_input.positions, forward_input.layout
        images = self.images.inputs(tokens) if self.images else None
        if images is not None:
            if self._decoder:
                return self._decoder(tokens, positions, layout, images)
            return image_hidden_states(self._body, tokens, positions, layout, *images)
        if self._decoder:
            return self._decoder(tokens, positions, layout)
        if self._max_compiled_tokens is None or len(tokens) <= self._max_compiled_tokens:
            return compute_hidden_states(self._body, tokens, positions, layout)
        with torch.compiler.set_stance("force_eager"):
            return compute_hidden_states(self._body, tokens, positions, layout)


MAX_CACHED_TOKENS = 65536
"""Image tokens whose features are kept for later prompts."""


class ImageFeatures:
    """Images of the prompts that are being prefilled, and a cache of image features."""

    def __init__(self, body: Any) -> None:
        """`body` is the decoder of a vision-language model."""
        self._body = body
        self._images: dict[int, ImageInput] = {}
        self._features: OrderedDict[int, Tensor] = OrderedDict()

    def add(self, images: Iterable[ImageInput]) -> None:
        """Add the images of a prompt, which may be needed until `release`."""
        self._images.update((image.key, image) for image in images)

    def release(self) -> None:
        """Drop the images, since all prompts are computed, and the features that exceed the cache."""
        self._images.clear()
        excess = sum(len(features) for features in self._features.values()) - MAX_CACHED_TOKENS
        while excess > 0:
            excess -= len(self._features.popitem(last=False)[1])

    def clear(self) -> None:
        """Drop all features, because the weights have changed."""
        self._features.clear()

    def inputs(self, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the indices of image tokens [k] among `tokens` [P] and their features [k, hidden]; None without any.
        Images without features are encoded, all together."""
        indices = (tokens < 0).nonzero().squeeze(-1)
        if not len(indices):
            return None
        decoded = decode_image_tokens(tokens[indices].cpu())
        keys, owner = torch.unique(decoded.keys, return_inverse=True)
        grids = self._encode(keys.tolist())
        sizes = grids.prod(1)
        rows = (sizes.cumsum(0) - sizes)[owner] + decoded.rows * grids[owner, 1] + decoded.columns
        features = torch.cat([self._features[key] for key in keys.tolist()])
        return indices, features.index_select(0, rows.to(features.device))

    def _encode(self, keys: Sequence[int]) -> Tensor:
        """Encode the images that have no features yet; return the grids of all, int64 [I, 2]."""
        images = [self._images[key] for key in keys]
        missing = [image for image in images if image.key not in self._features]
        if missing:
            device = next(self._body.parameters()).device
            grids = torch.tensor([image.grid for image in missing])
            sizes = [math.prod(image.grid) for image in missing]
            patches = torch.frombuffer(bytearray().join(image.patches for image in missing), dtype=torch.uint8)
            features = encode_images(self._body, patches.view(sum(sizes), -1).to(device), grids)
            self._features.update(zip((image.key for image in missing), torch.split(features, sizes), strict=True))
        for key in keys:
            self._features.move_to_end(key)
        return torch.tensor([image.grid for image in images])
