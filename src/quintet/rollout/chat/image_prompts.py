"""Images in the messages of a dialogue: from placeholders in a text to image tokens.

An observation shows its images where its text has `<image>`, in order; images without a placeholder come before the
text, as in VAGEN, verl and RAGEN. Until a message is encoded, an image is a marker in its text with its key and
grid, so that messages remain strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from quintet.config.native.policy import VisionConfig
from quintet.data.row_images import EncodeText
from quintet.envs.env import IMAGE
from quintet.policies.vision.image_encoder import is_vision_language, placeholder_tokens
from quintet.policies.vision.image_processing import ImageProcessor
from quintet.policies.vision.image_tokens import KEY_BITS, image_tokens
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
    placeholders: frozenset[int] = frozenset()
    """Tokens that only images may have in a prompt."""

    @classmethod
    def from_model(cls, model: PreTrainedModel, vision: VisionConfig) -> Self | None:
        """Return those of a vision-language model, with the limits in `policy.vision`; None for other models."""
        if not is_vision_language(model.config):
            return None
        body: Any = model.base_model
        return cls._from_config(model.config, body.image_processor, vision)

    @classmethod
    def from_directory(
        cls, directory: str | Path, vision: VisionConfig, *, trust_remote_code: bool = False
    ) -> Self | None:
        """Return those of the model in a directory, see `from_model`, without loading its weights.

        Raises:
            MachineError: the vision-language model has no image processor.
        """
        from transformers import AutoConfig

        try:
            model: Any = AutoConfig.from_pretrained(
                directory, trust_remote_code=trust_remote_code, local_files_only=True
            )
        except (OSError, ValueError):
            return None
        if not is_vision_language(model):
            return None
        return cls._from_config(model, ImageProcessor.from_directory(directory), vision)

    @classmethod
    def _from_config(cls, config: Any, processor: ImageProcessor, vision: VisionConfig) -> Self:
        limits = {name: value for name in LIMITS if (value := getattr(vision, name)) is not None}
        placeholders = frozenset(placeholder_tokens(config))
        return cls(replace(processor, **limits), config.vision_start_token_id, config.vision_end_token_id, placeholders)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Build them from `settings()`."""
        processor = ImageProcessor(**settings["processor"])
        return cls(processor, settings["before"], settings["after"], frozenset(settings["placeholders"]))

    def settings(self) -> dict[str, Any]:
        """Return JSON data from which `from_settings` builds the same."""
        return {**asdict(self), "placeholders": sorted(self.placeholders)}

    def measure(self, digest: bytes, height: int, width: int) -> ImageInput:
        """Return an image without its patches, identified by a hash, from its size in pixels.

        Raises:
            ValueError: see `ImageProcessor.resized`.
        """
        rows, columns = (side // self.processor.factor for side in self.processor.resized(height, width))
        return ImageInput(int.from_bytes(digest[:8]) >> (64 - KEY_BITS), (rows, columns), b"")

    def place(self, text: str, images: Sequence[ImageInput]) -> str:
        """Return the text with markers in place of its placeholders, see `place_images`."""
        return place_images(text, images)

    def encode_parts(self, text: str, encode: EncodeText) -> Iterator[tuple[tuple[int, ...], bool]]:
        """Yield the tokens of each part of a text with markers, and whether it is an image.

        Raises:
            ValueError: the text spells a token that stands for images.
        """
        for part in split_at_markers(text):
            if is_marker(part):
                yield self.tokens(part), True
                continue
            tokens = tuple(encode(part))
            if not self.placeholders.isdisjoint(tokens):
                raise ValueError("the text spells a token that stands for images, such as <|image_pad|>")
            yield tokens, False

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
