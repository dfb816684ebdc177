"""Features of images by a model's vision encoder, and their place among the embeddings of a token sequence.

The encoder is that of transformers, with its own modules. All images of a pass are encoded together: `ImageLayout`
defines which patches attend to each other, instead of a loop over images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quintet.policies.attention import PaddedRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from quintet.policies.vision.image_processing import ImageProcessor

MODEL_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""`model_type` of the supported vision-language models."""
PLACEHOLDERS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
"""Tokens of a model's configuration that only prompts contain."""


@dataclass(frozen=True, slots=True)
class PackedImages:
    """Distinct images of a pass, and where their tokens are."""

    patches: Tensor
    """uint8 [T, bytes per token], see `ImageInput.patches`; T is the number of tokens of all distinct images."""
    grids: Tensor
    """int64 [I, 2], rows and columns of image tokens."""
    indices: Tensor
    """int64 [k], indices of image tokens in the pass."""
    sources: Tensor
    """int64 [k], their rows in `patches`."""

    def to(self, device: torch.device) -> Self:
        """Return the images on `device`."""
        moved = {name: getattr(self, name).to(device) for name in ("patches", "indices", "sources")}
        return replace(self, **moved)


class ImageLayout:
    """`AttentionLayout` of the patches of several images: those of an image, or of a window of it, attend to each
    other."""

    def __init__(self, images: Tensor, windows: Tensor, full_layers: frozenset[int] | None) -> None:
        """`images` and `windows`, int64 [I] and [W], are numbers of patches; layers other than `full_layers` attend
        within windows, none if it is None."""
        self.max_length = int(images.max())
        self._images, self._full_layers = PaddedRows(images), full_layers
        self._windows = self._images if full_layers is None else PaddedRows(windows)

    def to(self, device: torch.device) -> Self:
        """Move the layout to `device`."""
        self._images, self._windows = self._images.to(device), self._windows.to(device)
        return self

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        is_full = self._full_layers is None or layer in self._full_layers
        rows = self._images if is_full else self._windows
        mask = rows.valid[:, None, None] if rows.ragged else None
        q, k, v = (rows.pad(each) for each in (query, key, value))
        return rows.unpad(F.scaled_dot_product_attention(q, k, v, mask, scale=scale))


def is_vision_language(config: Any) -> bool:
    """Return whether a model's configuration is that of a supported vision-language model."""
    return getattr(config, "model_type", None) in MODEL_TYPES


def placeholder_tokens(config: Any) -> tuple[int, ...]:
    """Return the tokens that mark images and videos in prompts, which a policy never samples."""
    tokens = (getattr(config, name, None) for name in PLACEHOLDERS)
    return tuple(token for token in tokens if token is not None)


def text_decoder(body: nn.Module) -> nn.Module:
    """Return the language model of a vision-language model's body; other bodies are one themselves."""
    return getattr(body, "language_model", body)


def vision_encoder(module: nn.Module) -> nn.Module | None:
    """Return the vision encoder within a policy's or critic's module; None if it has none."""
    bodies: Iterator[Any] = (part for part in module.modules() if hasattr(part, "visual"))
    return next((body.visual for body in bodies), None)


def prepare_vision_encoder(model: PreTrainedModel, processor: ImageProcessor) -> None:
    """Make `encode_images` work on a vision-language model."""
    body: Any = model.model
    body.image_processor = processor
    for index, block in enumerate(body.visual.blocks):
        block.attn.layer_idx = index


def encode_images(body: Any, patches: Tensor, grids: Tensor) -> Tensor:
    """Return the features of images, [T, hidden], from `PackedImages.patches` and `.grids`.

    With features for several layers (deepstack of Qwen3-VL), they are [T, (1 + layers) · hidden].
    """
    visual, processor = body.visual, body.image_processor
    grid_thw = F.pad(grids * processor.merge_size, (1, 0), value=1)
    dtype = next(visual.parameters()).dtype
    pixels = processor.pixel_values(patches).to(dtype)
    attention = _attention_inputs(visual, grid_thw, patches.device)
    out = visual(pixels, grid_thw=grid_thw.to(patches.device), return_dict=True, **attention)
    return torch.cat([out.pooler_output, *(getattr(out, "deepstack_features", None) or ())], -1)


def _attention_inputs(visual: Any, grid_thw: Tensor, device: torch.device) -> dict[str, Any]:
    """Return the layout of a pass, and the arguments by which the encoder's attention sees all patches together."""
    from transformers.vision_utils import get_vision_window_index

    images = grid_thw.prod(1)
    together = torch.tensor([0, int(images.sum())], dtype=torch.int32)
    if not hasattr(visual, "fullatt_block_indexes"):
        return {"layout": ImageLayout(images, images, None).to(device), "cu_seqlens": together}
    order, ends = get_vision_window_index(grid_thw, visual.spatial_merge_size, visual.window_size, visual.patch_size)
    layout = ImageLayout(images, ends.diff().long(), frozenset(visual.fullatt_block_indexes))
    return {
        "layout": layout.to(device),
        "cu_seqlens": together,
        "window_index": order.to(device),
        "cu_window_seqlens": together,
    }


def embed_with_images(decoder: Any, tokens: Tensor, indices: Tensor, features: Tensor) -> Tensor:
    """Return the embeddings [P, hidden] of tokens, in which `features` [k, hidden] replace those at `indices` [k]."""
    embeddings: Tensor = decoder.embed_tokens(tokens.clamp(min=0))
    return embeddings.index_put((indices,), features[:, : embeddings.shape[1]].to(embeddings.dtype))


def deepstack_inputs(tokens: Tensor, features: Tensor, hidden: int) -> dict[str, Any]:
    """Return the arguments of a decoder that adds features of images to the states after its first layers."""
    layers = torch.split(features, hidden, 1)[1:]
    if not layers:
        return {}
    return {"visual_pos_masks": (tokens < 0)[None], "deepstack_visual_embeds": list(layers)}
