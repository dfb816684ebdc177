"""Features of the images in prompts, computed once per image and version of the weights."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from quintet.policies.vision.image_encoder import encode_images
from quintet.policies.vision.image_tokens import decode_image_tokens
from quintet.records import ImageInput

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
