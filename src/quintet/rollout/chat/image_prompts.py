"""Images in the messages of a dialogue: from placeholders in a text to image tokens.

An observation shows its images where its text has `<image>`, in order; images without a placeholder come before the
text, as in VAGEN, verl and RAGEN. Until a message is encoded, an image is a marker in its text with its key and
grid, so that messages remain strings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from quintet.config.native.policy import VisionConfig
from quintet.envs.env import IMAGE
from quintet.policies.vision.image_encoder import is_vision_language
from quintet.policies.vision.image_processing import ImageProcessor
from quintet.policies.vision.image_tokens import image_tokens
from quintet.records import ImageInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LIMITS = ("min_pixels", "max_pixels")
MARK = "\ue000\ue002"
"""Begins and ends a marker; private-use characters, which are removed from texts."""
_MARKER = re.compile(f"({MARK}[0-9:]+{MARK})")


@dataclass(frozen=True, slots=True)
class ImagePrompts:
    """Converts the images of a policy's prompts."""

    processor: ImageProcessor
    before: int
    """Token before an image, `<|vision_start|>`."""
    after: int
    """Token behind an image, `<|vision_end|>`."""

    @classmethod
    def from_model(cls, model: PreTrainedModel, vision: VisionConfig) -> Self | None:
        """Return those of a vision-language model, with the limits in `policy.vision`; None for other models."""
        config: Any = model.config
        if not is_vision_language(config):
            return None
        processor: ImageProcessor = model.base_model.image_processor
        limits = {name: value for name in LIMITS if (value := getattr(vision, name)) is not None}
        return cls(replace(processor, **limits), config.vision_start_token_id, config.vision_end_token_id)

    def process(self, images: Sequence[np.ndarray]) -> tuple[ImageInput, ...]:
        """Return the patches of RGB images `uint8[height, width, 3]`.

        Raises:
            ValueError: an image is too large, or one side is far longer than the other.
        """
        return tuple(map(self.processor.process, images))

    def tokens(self, marker: str) -> tuple[int, ...]:
        """Return the tokens of a marker: the image's, with the tokens before and behind."""
        key, rows, columns = map(int, marker.strip(MARK).split(":"))
        return (self.before, *image_tokens(ImageInput(key, (rows, columns), b"")), self.after)


def image_marker(image: ImageInput) -> str:
    """Return the marker of an image."""
    return f"{MARK}{image.key}:{image.grid[0]}:{image.grid[1]}{MARK}"


def place_images(text: str, images: Sequence[ImageInput]) -> str:
    """Return the text with markers in place of its placeholders."""
    text = text.replace(MARK, "")
    markers = list(map(image_marker, images))
    first, *others = text.split(IMAGE)
    num_placed = min(len(others), len(markers))
    num_before = len(markers) - num_placed
    placed = markers[num_before:] + [IMAGE] * (len(others) - num_placed)
    return "".join(
        [*markers[:num_before], first, *(f"{mark}{rest}" for mark, rest in zip(placed, others, strict=True))]
    )


def split_at_markers(text: str) -> list[str]:
    """Return the parts of a text: its markers, and the texts between them.

    >>> split_at_markers(place_images("a <image> b", [ImageInput(7, (1, 2), b"")]))
    ['a ', '\\ue000\\ue0027:1:2\\ue000\\ue002', ' b']
    """
    return [part for part in _MARKER.split(text) if part] if MARK in text else [text]


def is_marker(text: str) -> bool:
    """Return whether a part of a text is the marker of an image."""
    return text.startswith(MARK)
