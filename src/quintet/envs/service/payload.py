"""Bodies of requests and responses of an environment service: JSON, or msgpack, which holds images without base64.

An image is `{"png": file}`, another array `{"dtype": …, "shape": […], "data": …}`; bytes are base64 in JSON.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from quintet.envs.service.png import decode_png, encode_png
from quintet.errors import MachineError
from quintet.sandbox.json_lines import as_json

Format = Literal["json", "msgpack"]
JSON: Final = "json"
MSGPACK: Final = "msgpack"
CONTENT_TYPES: Final[Mapping[Format, str]] = {JSON: "application/json", MSGPACK: "application/msgpack"}
DTYPES = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "float16", "float32", "float64"})
MAX_DIMENSIONS, MAX_SIZE = 32, 1 << 31
MAX_RESPONSE_PIXELS = 1 << 28
"""Pixels of all images of a response; a small file can have many."""
ARRAY_FIELDS = {"dtype", "shape", "data"}


def encode_payload(message: Any, form: Format) -> bytes:
    """Return a message as bytes; values that the format cannot express become text.

    Raises:
        MachineError: msgpack is not installed.
    """
    if form == JSON:
        return _ENCODER.encode(message).encode()
    packed: bytes = _msgpack().packb(message, default=_to_msgpack)
    return packed


def decode_payload(data: bytes, form: Format) -> Any:
    """Return the message of a body.

    Raises:
        ValueError: the body is damaged.
        MachineError: msgpack is not installed.
    """
    try:
        return json.loads(data) if form == JSON else _msgpack().unpackb(data, strict_map_key=True)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"no valid {form}: {error}") from error


def join_results(items: Sequence[bytes], form: Format) -> bytes:
    """Return the body `{"results": [item, …]}` of encoded items."""
    if form == JSON:
        return b'{"results":[%s]}' % b",".join(items)
    packer = _msgpack().Packer()
    head: bytes = packer.pack_map_header(1) + packer.pack("results") + packer.pack_array_header(len(items))
    return head + b"".join(items)


def _msgpack() -> Any:
    try:
        import msgpack
    except ImportError as error:
        raise MachineError("bodies in msgpack require the package msgpack", 'pip install "quintet[service]"') from error
    return msgpack


def image_message(image: np.ndarray) -> dict[str, Any]:
    """Return an RGB image, uint8 [height, width, 3], as a PNG file."""
    return {"png": encode_png(image)}


def image_from_message(message: Any) -> np.ndarray:
    """Return the image of `image_message`.

    Raises:
        KeyError, TypeError, ValueError: it has another form, or see `decode_png`.
    """
    return decode_png(_bytes(message["png"]))


def limited_image_decoder() -> Callable[[Any], np.ndarray]:
    """Return `image_from_message` for the images of one response, which refuses more than `MAX_RESPONSE_PIXELS`."""
    num_pixels = 0

    def decode(message: Any) -> np.ndarray:
        nonlocal num_pixels
        image = image_from_message(message)
        num_pixels += image.shape[0] * image.shape[1]
        if num_pixels > MAX_RESPONSE_PIXELS:
            raise ValueError(f"images of more than {MAX_RESPONSE_PIXELS} pixels in one response")
        return image

    return decode


def _bytes(value: Any) -> bytes:
    """Return bytes, which are base64 in JSON.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{type(value).__name__} instead of base64")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"no valid base64: {error}") from error


def value_from_message(value: Any) -> Any:
    """Return an action with its arrays and images.

    Raises:
        KeyError, TypeError, ValueError: an array or image is damaged.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return [value_from_message(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"png"}:
        return image_from_message(value)
    if value.keys() == ARRAY_FIELDS:
        return _array_from_message(value)
    return {key: value_from_message(item) for key, item in value.items()}


def _array_from_message(message: Mapping[str, Any]) -> np.ndarray:
    dtype = message["dtype"]
    shape = message["shape"]
    data = _bytes(message["data"])
    # the product of thousands of huge numbers would take minutes
    is_shape = len(shape) <= MAX_DIMENSIONS and all(isinstance(size, int) and 0 <= size < MAX_SIZE for size in shape)
    if dtype not in DTYPES or not is_shape:
        raise ValueError(f"an array of {dtype!r:.40} with shape {shape!r:.40}")
    if math.prod(shape) * np.dtype(dtype).itemsize != len(data):
        raise ValueError(f"an array of {dtype} {shape} with {len(data)} bytes")
    return np.frombuffer(data, dtype).reshape(shape)


def _array_message(array: np.ndarray) -> dict[str, Any]:
    if array.dtype == np.uint8 and array.ndim == 3 and array.shape[2] == 3:
        return image_message(array)
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": array.tobytes()}


def _to_json(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return _to_msgpack(value)


def _to_msgpack(value: Any) -> Any:
    if isinstance(value, np.ndarray) and str(value.dtype) in DTYPES:
        return _array_message(value)
    return as_json(value)


_ENCODER = json.JSONEncoder(default=_to_json, ensure_ascii=False, separators=(",", ":"))
