"""Images of data rows: where they are, their size by the header, and their pixels when a prompt is used.

A row has its images in one column: a list, or a single image. An image is a mapping with `bytes` or `path`, as the
feature `Image` of Hugging Face's datasets stores it, the bytes of a file, a path, base64, or a `data:` URI. Nothing is
downloaded, and a path does not lead out of the directory of the data file.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from quintet.envs.env import IMAGE
from quintet.errors import ConfigError
from quintet.records import ImageInput

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

KEY: Final = "data.image_key"
FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that are read; Pillow would start another program for some of the others."""
MAX_FILE_PIXELS: Final = 89_478_485
"""Pixels of a file above which decoding would take a quarter of a gigabyte; Pillow warns about the same number."""
EXIF_ORIENTATION: Final = 0x0112
MIN_BASE64_LENGTH: Final = 64
"""Length of the shortest text that is read as base64 rather than as a path."""
BASE64: Final = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
DATA_URI: Final = "data:"
FILE_URI: Final = "file://"
EXPECTED: Final = 'an image is {"bytes": …}, {"path": "…"}, a path, base64 or a data: URI'

Message = Mapping[str, Any]
EncodeText = Callable[[str], Sequence[int]]


class PromptImages(Protocol):
    """Converts the images of a policy's prompts, see `quintet.rollout.chat.image_prompts`."""

    def settings(self) -> dict[str, Any]:
        """Return JSON data from which `from_settings` of the class builds the same converter."""

    def measure(self, digest: bytes, height: int, width: int) -> ImageInput:
        """Return an image without its patches, identified by a hash, from its size in pixels.

        Raises:
            ValueError: it is too large, or one side is far longer than the other.
        """

    def process(self, images: Sequence[np.ndarray]) -> tuple[ImageInput, ...]:
        """Return the patches of RGB images `uint8[height, width, 3]`."""

    def place(self, text: str, images: Sequence[ImageInput]) -> str:
        """Return a text with markers of the images in place of its placeholders."""

    def encode_parts(self, text: str, encode: EncodeText) -> Iterator[tuple[tuple[int, ...], bool]]:
        """Yield the tokens of each part of a text with markers, and whether it is an image.

        Raises:
            ValueError: the text spells a token that stands for images.
        """


@dataclass(frozen=True, slots=True)
class RowImage:
    """An image of a row that has not been read."""

    content: bytes | Path
    """The bytes of its file, or the file."""
    column: str
    row_name: str
    """File and row, for messages."""
    index: int
    """Its number in the row."""

    def measure(self, images: PromptImages) -> ImageInput:
        """Return the image without patches, from the header of its file.

        Raises:
            ConfigError: the file does not exist or has no readable header, or the image is too large.
        """
        with self._opened() as image:
            width, height = upright_size(image)
            return images.measure(self._digest, height, width)

    def load(self, images: PromptImages) -> ImageInput:
        """Return the image with its patches.

        Raises:
            ConfigError: see `measure`; or the image cannot be decoded.
        """
        with self._opened() as image:
            width, height = upright_size(image)
            measured = images.measure(self._digest, height, width)
            (processed,) = images.process([rgb_pixels(image)])
            return replace(processed, key=measured.key)

    @property
    def _digest(self) -> bytes:
        content = self.content if isinstance(self.content, bytes) else str(self.content).encode()
        return blake2b(content, digest_size=16).digest()

    @contextmanager
    def _opened(self) -> Iterator[Image]:
        from PIL import Image

        if isinstance(self.content, Path) and not self.content.is_file():
            raise self.read_error(f"there is no file {self.content}", "correct the path, which starts at the data file")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)
                source = self.content if isinstance(self.content, Path) else BytesIO(self.content)
                with Image.open(source, formats=FORMATS) as image:
                    if image.width * image.height > MAX_FILE_PIXELS:
                        raise ValueError(f"{image.width} × {image.height} pixels, more than {MAX_FILE_PIXELS:,}")
                    yield image
        except Exception as error:  # Pillow raises errors of many types for damaged files
            hint = f"replace the image, or remove the row; formats: {', '.join(FORMATS)}"
            raise self.read_error(f"cannot be read: {error}", hint) from error

    def read_error(self, problem: str, hint: str) -> ConfigError:
        """Return an error that names the image."""
        return image_error(self.column, self.row_name, f"image {self.index} {problem}", hint)


def image_error(column: str, row_name: str, problem: str, hint: str) -> ConfigError:
    """Return an error about the images of a row."""
    message = f"{KEY} = {column}: {row_name}: {problem}"
    return ConfigError(message, key=KEY, value=column, source=row_name, hint=hint)


def row_images(cells: Sequence[object], column: str, row_name: str, directory: Path) -> tuple[RowImage, ...]:
    """Return the images of a row, in order; paths are relative to `directory`.

    Raises:
        ConfigError: one of them is no image, or a path leads out of the directory.
    """
    images = []
    for index, value in enumerate(cells):
        try:
            images.append(RowImage(_content(value, directory), column, row_name, index))
        except _InvalidImageError as error:
            problem, hint = error.args
            raise image_error(column, row_name, f"image {index} {problem}", hint) from error
    return tuple(images)


class _InvalidImageError(Exception):
    """An image is in none of the known forms; the arguments are the problem and what to do about it."""


def _content(value: object, directory: Path) -> bytes | Path:
    """
    Raises:
        _InvalidImageError: the value is no image, or a path leads out of the directory.
    """
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if not isinstance(value, str):
        raise _InvalidImageError(f"is {type(value).__name__}", EXPECTED)
    if value.startswith(DATA_URI):
        head, _, encoded = value.partition(",")
        if not head.endswith(";base64"):
            raise _InvalidImageError(f"begins with {head:.40}", "write it as data:image/png;base64,…")
        return _from_base64(encoded)
    if len(value) >= MIN_BASE64_LENGTH and BASE64.fullmatch(value):
        return _from_base64(value)
    return _path(value.removeprefix(FILE_URI), directory)


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise _InvalidImageError(f"is not valid base64: {error}", "encode the image file again") from error


def _path(text: str, directory: Path) -> Path:
    """Return the file of a path, which may be relative. Symbolic links are followed wherever they lead."""
    if "://" in text:
        raise _InvalidImageError(
            f"is the URL {text:.100}, which is not downloaded", "store the image beside the data file"
        )
    root = os.path.abspath(directory)
    path = os.path.normpath(os.path.join(root, text))
    if "\0" in text or os.path.commonpath([root, path]) != root:
        raise _InvalidImageError(f"is {text[:100]!r}, outside {root}", f"move the images into {root}")
    return Path(path)


def upright_size(image: Image) -> tuple[int, int]:
    """Return the width and height of an image as its EXIF orientation shows it, without decoding it."""
    width, height = image.size
    is_rotated = _has_exif(image) and image.getexif().get(EXIF_ORIENTATION) in (5, 6, 7, 8)
    return (height, width) if is_rotated else (width, height)


def _has_exif(image: Image) -> bool:
    """Return whether the header may have EXIF data. Behind the pixels of a PNG file it is ignored: Pillow would decode
    the file to look there."""
    return image.format != "PNG" or "exif" in image.info


def rgb_pixels(image: Image) -> np.ndarray:
    """Return the pixels of an image upright, `uint8[height, width, 3]`; transparent ones are white, as in verl and
    vLLM."""
    import numpy as np
    from PIL import Image, ImageOps

    upright = ImageOps.exif_transpose(image) if _has_exif(image) else image
    if upright.has_transparency_data:
        foreground, upright = upright.convert("RGBA"), Image.new("RGB", upright.size, "white")
        upright.paste(foreground, mask=foreground.getchannel("A"))
    return np.asarray(upright.convert("RGB"))


def with_placeholders(messages: Sequence[Message], num_images: int) -> tuple[Message, ...] | None:
    """Return the messages with one placeholder for each image, None if there are too few or too many. Images of
    messages without placeholders come before the text of the first message of the user."""
    num_placeholders = sum(str(message.get("content")).count(IMAGE) for message in messages)
    if num_placeholders == num_images:
        return tuple(messages)
    first = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if num_placeholders or first is None:
        return None
    shown = {**messages[first], "content": f"{IMAGE * num_images}{messages[first].get('content') or ''}"}
    return (*messages[:first], shown, *messages[first + 1 :])


def place_in_messages(
    messages: Sequence[Message], measured: Sequence[ImageInput], images: PromptImages
) -> list[dict[str, Any]]:
    """Return the messages with markers of their images, one for each placeholder if there are images at all."""
    remaining = list(measured)
    placed = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            count = content.count(IMAGE) if measured else 0
            shown, remaining = remaining[:count], remaining[count:]
            message = {**message, "content": images.place(content, shown)}
        placed.append(dict(message))
    return placed


def keeps_images(tokens: Sequence[int], kept_positions: Sequence[int]) -> bool:
    """Return whether the tokens at `kept_positions` include all image tokens, which are negative, and those around each
    image."""
    positions = set(kept_positions)
    last = len(tokens) - 1
    return all(
        position in positions
        for index, token in enumerate(tokens)
        if token < 0
        for position in (max(index - 1, 0), index, min(index + 1, last))
    )
