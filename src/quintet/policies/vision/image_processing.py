"""Resizing of images and their division into patches, as the Qwen-VL image processors of transformers do it.

Only Pillow and NumPy are needed. Patches are kept as uint8 and without the repetition in time, an eighth of the memory
of the pixel values that the vision encoder reads, to which `pixel_values` converts them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from quintet.config.plan.vision_encoder import image_grid
from quintet.errors import MachineError
from quintet.policies.vision.image_tokens import KEY_BITS, MAX_SIDE
from quintet.records import ImageInput

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation of each channel in the training of CLIP, which are the processors' defaults."""
MAX_CACHED_BYTES = 256 << 20
"""Size of the patches that are kept for the next environment that shows the same image, if all are as large."""


@dataclass(frozen=True)
class ImageProcessor:
    """Settings of a model's image processor."""

    patch_size: int = 14
    """Side of a patch, pixels."""
    merge_size: int = 2
    """Side of an image token, patches."""
    temporal_patch_size: int = 2
    """Number of frames per patch; an image is repeated as often."""
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    @classmethod
    def from_directory(
        cls, directory: str | Path, *, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> Self:
        """Read the settings of a model directory; `min_pixels` and `max_pixels` replace its own.

        Raises:
            MachineError: the directory has no image processor.
        """
        settings = _read_settings(Path(directory))
        size = settings.get("size") or {}
        limits = {
            "min_pixels": min_pixels or size.get("shortest_edge") or settings.get("min_pixels"),
            "max_pixels": max_pixels or size.get("longest_edge") or settings.get("max_pixels"),
        }
        sizes = {name: settings[name] for name in ("patch_size", "merge_size", "temporal_patch_size")}
        sizes |= {name: int(value) for name, value in limits.items() if value}
        sizes |= {name: tuple(settings[f"image_{name}"]) for name in ("mean", "std") if settings.get(f"image_{name}")}
        return cls(**sizes)

    def save(self, directory: Path) -> None:
        """Write the settings as transformers' image processors read them."""
        settings = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": self.patch_size,
            "merge_size": self.merge_size,
            "temporal_patch_size": self.temporal_patch_size,
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            "image_mean": self.mean,
            "image_std": self.std,
        }
        (directory / PROCESSOR_FILES[0]).write_text(json.dumps(settings, indent=2), encoding="utf-8")

    @property
    def factor(self) -> int:
        """Side of an image token, pixels."""
        return self.patch_size * self.merge_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width that are multiples of `factor`, with a number of pixels between `min_pixels` and
        `max_pixels`, and about the same aspect ratio.

        Raises:
            ValueError: one side is more than 200 times as long as the other, or the image has too many tokens.
        """
        factor = self.factor
        rows, columns = image_grid(height, width, factor, self.min_pixels, self.max_pixels, MAX_SIDE)
        return rows * factor, columns * factor

    def process(self, image: np.ndarray) -> ImageInput:
        """Return the patches of RGB `uint8[height, width, 3]`.

        Raises:
            ValueError: see `resized`.
        """
        digest = blake2b(repr(image.shape).encode() + image.tobytes(), digest_size=16).digest()
        processed = self._processed.get(digest)
        if processed is None:
            processed = self._processed[digest] = self._process(image)
            while len(self._processed) > max(1, MAX_CACHED_BYTES // len(processed.patches)):
                del self._processed[next(iter(self._processed))]
        return processed

    @cached_property
    def _processed(self) -> dict[bytes, ImageInput]:
        return {}

    def _process(self, image: np.ndarray) -> ImageInput:
        from PIL import Image

        height, width = self.resized(*image.shape[:2])
        if (height, width) != image.shape[:2]:
            image = np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
        grid = (height // self.factor, width // self.factor)
        patches = self._patches(image, *grid)
        digest = blake2b(repr(grid).encode() + patches, digest_size=8).digest()
        return ImageInput(int.from_bytes(digest) >> (64 - KEY_BITS), grid, patches)

    def _patches(self, image: np.ndarray, rows: int, columns: int) -> bytes:
        """Return uint8 [rows · columns, merge_size² · channels · patch_size²]."""
        merge, patch = self.merge_size, self.patch_size
        split = image.reshape(rows, merge, patch, columns, merge, patch, -1)
        return split.transpose(0, 3, 1, 4, 6, 2, 5).tobytes()

    def resized_image(self, image: ImageInput) -> np.ndarray:
        """Return the image that `patches` show, RGB `uint8[height, width, 3]`."""
        (rows, columns), merge, patch = image.grid, self.merge_size, self.patch_size
        patches = np.frombuffer(image.patches, np.uint8).reshape(rows, columns, merge, merge, -1, patch, patch)
        pixels: np.ndarray = patches.transpose(0, 2, 5, 1, 3, 6, 4)
        return pixels.reshape(rows * self.factor, columns * self.factor, -1)

    def pixel_values(self, patches: Tensor) -> Tensor:
        """Return the input of the vision encoder, float32 [patches, channels · temporal_patch_size · patch_size²]:
        rescaled, normalized, and repeated in time. `patches` is uint8 [image tokens, merge_size² · channels ·
        patch_size²]."""
        channels, area = len(self.mean), self.patch_size**2
        offsets = (torch.arange(channels, device=patches.device) * 256)[:, None]
        values = patches.view(-1, channels, area).long() + offsets
        normalized = self._normalized.to(patches.device)[values]
        return normalized[:, :, None].expand(-1, -1, self.temporal_patch_size, -1).flatten(1)

    @cached_property
    def _normalized(self) -> Tensor:
        """Float32 [channels · 256], the normalized value of each byte, rounded as transformers rounds it."""
        rescaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
        mean, std = (np.array(values, np.float32)[:, None] for values in (self.mean, self.std))
        return torch.from_numpy(((rescaled - mean) / std).ravel())


def _read_settings(directory: Path) -> Mapping[str, Any]:
    for name in PROCESSOR_FILES:
        if (directory / name).is_file():
            settings = json.loads((directory / name).read_text(encoding="utf-8"))
            nested = settings.get("image_processor", settings)
            if isinstance(nested, dict) and "patch_size" in nested:
                return nested
    raise MachineError(
        f"the vision-language model at {directory} has no image processor",
        "add its preprocessor_config.json, as save_pretrained of transformers' image processor writes it",
    )
