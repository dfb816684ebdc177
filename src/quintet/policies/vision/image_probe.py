"""A short text with an image, by which a loaded model is compared with transformers' own forward pass."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quintet.policies.vision.image_encoder import PackedImages, placeholder_tokens
from quintet.policies.vision.image_processing import ImageProcessor
from quintet.policies.vision.image_tokens import image_tokens, mrope_positions

TOKENS_BEFORE = 4
"""Text tokens before the image."""


class ImageProbe(NamedTuple):
    """Inputs of a pass, and the same as arguments of transformers."""

    tokens: Tensor
    position_ids: Tensor
    images: PackedImages
    arguments: dict[str, Tensor]


def image_probe(model: Any, text: Tensor) -> ImageProbe:
    """Return a random image within `text`, int64 [n], for a vision-language model."""
    processor: ImageProcessor = model.base_model.image_processor
    side = processor.factor
    pixels = np.random.default_rng(0).integers(0, 256, (2 * side, 3 * side, 3)).astype(np.uint8)
    image = processor.process(pixels)
    text = text.masked_fill(torch.isin(text, torch.tensor(placeholder_tokens(model.config))), 0)
    shown = torch.tensor(image_tokens(image))
    tokens = torch.cat([text[:TOKENS_BEFORE], shown, text[TOKENS_BEFORE:]])
    grid = torch.tensor([image.grid])
    patches = torch.frombuffer(bytearray(image.patches), dtype=torch.uint8).view(math.prod(image.grid), -1)
    rows = torch.arange(len(shown))
    arguments = {
        "input_ids": tokens.masked_fill(tokens < 0, model.config.image_token_id)[None],
        "mm_token_type_ids": (tokens < 0).int()[None],
        "pixel_values": processor.pixel_values(patches),
        "image_grid_thw": torch.cat([torch.ones(1, 1, dtype=torch.long), grid * processor.merge_size], 1),
    }
    positions = torch.from_numpy(mrope_positions(tokens.numpy()))
    return ImageProbe(tokens, positions, PackedImages(patches, grid, rows + TOKENS_BEFORE, rows), arguments)
