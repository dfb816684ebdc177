"""Images of requests: files in data URLs, decoded under limits. Nothing is fetched."""

from __future__ import annotations

import base64
import io
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quintet.data.row_images import rgb_pixels
from quintet.policies.vision.image_processing import ImageProcessor
from quintet.records import ImageInput
from quintet.rollout.chat.image_prompts import image_marker
from quintet.runtime.http_service.request_error import RequestError
from quintet.runtime.serving.body_parts import ImagePart, Message

FORMATS: Mapping[str, str] = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
"""Pillow's format of each supported media type."""
MODES = frozenset({"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"})
"""Pillow's modes with at most 8 bits per channel; deeper ones would be clipped."""
MAX_IMAGES = 128
"""Maximum number of images per request."""
MAX_IMAGE_PIXELS, MAX_REQUEST_PIXELS = 1 << 24, 1 << 25
"""Maximum size of an image, and of all images of a request together, as their headers declare it."""
LOW_DETAIL_PIXELS = 512 * 512
"""Maximum size of an image with `"detail": "low"`, as at OpenAI."""
_DECODING = threading.Lock()
"""Held while an image is decoded, so that only one needs memory for its pixels."""


@dataclass(frozen=True, slots=True)
class RequestImages:
    """Images of a request in the order of its messages; equal images have the same marker."""

    markers: tuple[str, ...] = ()
    """Markers of the images in the text of the prompt."""
    inputs: tuple[ImageInput, ...] = ()
    """Distinct images."""


@dataclass(frozen=True, slots=True)
class _ImageFile:
    """A file whose header has been read."""

    param: str
    """Path of its URL in the body."""
    image: Any
    """Pillow's image, which reads its pixels when they are used."""
    is_low_detail: bool

    def error(self, reason: str) -> RequestError:
        return _error(self.param, reason)


def read_images(messages: Sequence[Message], processor: ImageProcessor | None, max_tokens: int) -> RequestImages:
    """Decode the images of messages. `processor` is None if the model reads none; the images must have fewer than
    `max_tokens` tokens together, which is checked before any is decoded.

    Raises:
        RequestError: the model reads no images, or an image is not accepted.
    """
    parts = list(_image_parts(messages))
    if not parts:
        return RequestImages()
    if processor is None:
        raise _error(parts[0][0], "the model reads no images")
    if len(parts) > MAX_IMAGES:
        raise RequestError(
            f"messages: {len(parts)} images, the maximum is {MAX_IMAGES}", code="too_many_images", param="messages"
        )
    files = [_open(param, part) for param, part in parts]
    _check_sizes(files)
    # a processor of its own keeps no images after the request
    processor = replace(processor)
    low_detail = replace(processor, max_pixels=min(processor.max_pixels, LOW_DETAIL_PIXELS))
    processors = [low_detail if file.is_low_detail else processor for file in files]
    _check_tokens(files, processors, max_tokens)
    images = [image_processor.process(_decode(file)) for file, image_processor in zip(files, processors, strict=True)]
    return RequestImages(tuple(map(image_marker, images)), tuple({image.key: image for image in images}.values()))


def _image_parts(messages: Sequence[Message]) -> Iterator[tuple[str, ImagePart]]:
    for number, message in enumerate(messages):
        for index, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart):
                yield f"messages.{number}.content.{index}.image_url.url", part


def _open(param: str, part: ImagePart) -> _ImageFile:
    """Read the header of an image file."""
    from PIL import Image

    media_type, data = _split_data_url(param, part.image_url.url)
    try:
        image = Image.open(io.BytesIO(data), formats=(FORMATS[media_type],))
    except Image.DecompressionBombError:
        raise _error(param, f"the image has more than {MAX_IMAGE_PIXELS} pixels") from None
    except Exception as error:  # noqa: BLE001 - Pillow raises errors of many types for damaged files
        raise _error(param, f"no {media_type} file, or a damaged one: {_reason(error)}") from None
    return _ImageFile(param, image, part.image_url.detail == "low")


def _split_data_url(param: str, url: str) -> tuple[str, bytes]:
    """Return the media type and the bytes of a data URL."""
    scheme = url.partition(":")[0][:20].lower()
    if scheme != "data":
        raise _error(param, f"a URL of scheme {scheme!r}: nothing is fetched; send data:image/png;base64,…")
    head, comma, encoded = url[len("data:") :].partition(",")
    media_type, *options = head.lower().split(";")
    if not comma or media_type not in FORMATS or options[-1:] != ["base64"]:
        raise _error(param, f"data:{head[:60]}: use data:…;base64,… of {', '.join(FORMATS)}")
    try:
        return media_type, base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise _error(param, f"the data are not base64: {error}") from None


def _check_sizes(files: Sequence[_ImageFile]) -> None:
    total = 0
    for file in files:
        width, height = file.image.size
        if width * height > MAX_IMAGE_PIXELS:
            raise file.error(f"the image has {width}×{height} pixels, the maximum is {MAX_IMAGE_PIXELS}")
        total += width * height
    if total > MAX_REQUEST_PIXELS:
        message = f"messages: the images have {total} pixels together, the maximum is {MAX_REQUEST_PIXELS}"
        raise RequestError(message, code="invalid_image", param="messages")


def _check_tokens(files: Sequence[_ImageFile], processors: Sequence[ImageProcessor], max_tokens: int) -> None:
    num_tokens = 0
    for file, processor in zip(files, processors, strict=True):
        width, height = file.image.size
        try:
            num_tokens += math.prod(processor.resized(height, width)) // processor.factor**2
        except ValueError as error:
            raise file.error(str(error)) from None
    if num_tokens >= max_tokens:
        message = f"messages: images of {num_tokens} tokens leave no room in a context of {max_tokens}"
        raise RequestError(message, code="context_length_exceeded", param="messages")


def _decode(file: _ImageFile) -> np.ndarray:
    """Return the first frame, RGB `uint8[height, width, 3]`."""
    if file.image.mode not in MODES:
        raise file.error(f"images of mode {file.image.mode} are not supported: use 8 bits per channel")
    with _DECODING:
        try:
            with file.image:
                return rgb_pixels(file.image)
        except Exception as error:  # noqa: BLE001 - Pillow raises errors of many types for damaged files
            raise file.error(f"the file is damaged: {_reason(error)}") from None


def _error(param: str, reason: str) -> RequestError:
    return RequestError(f"{param}: {reason}", code="invalid_image", param=param)


def _reason(error: Exception) -> str:
    # Pillow shows addresses of objects
    return f"{type(error).__name__}" if " at 0x" in str(error) else f"{type(error).__name__}: {error}"
