"""Images of cameras as inputs of vision towers."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

CROPPED_AREA = 0.9
"""Share of the area that a center crop keeps, as in the evaluation of OpenVLA-OFT."""


def prepare_images(images: np.ndarray, height: int, width: int, *, center_crop: bool) -> Tensor:
    """Return images, uint8 [B, cameras, H, W, 3], cropped and resized to uint8 [B, cameras, 3, height, width].

    Resizing is bicubic with antialiasing, and rounds, as torchvision's of uint8 tensors.
    """
    batch, cameras = images.shape[:2]
    pixels = torch.from_numpy(np.ascontiguousarray(images)).flatten(0, 1).permute(0, 3, 1, 2)
    if center_crop:
        pixels = _center_crop(pixels)
    if pixels.shape[-2:] != (height, width):
        resized = F.interpolate(pixels.float(), (height, width), mode="bicubic", antialias=True)
        pixels = resized.round().clamp(0, 255).to(torch.uint8)
    return pixels.reshape(batch, cameras, 3, height, width)


def _center_crop(pixels: Tensor) -> Tensor:
    height, width = (round(size * CROPPED_AREA**0.5) for size in pixels.shape[-2:])
    top, left = (pixels.shape[-2] - height) // 2, (pixels.shape[-1] - width) // 2
    return pixels[..., top : top + height, left : left + width]
