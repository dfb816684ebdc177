"""PNG files of RGB images."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np

from quintet.errors import MachineError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
SIZE_START, HEADER_END = 16, 33
"""Position of width and height, and end of the header."""
COMPRESSION_LEVEL = 1
"""Rendered scenes are as small as with higher levels, in a third of the time."""
MAX_PIXELS = 4096 * 4096
"""Larger images are refused before they are decompressed."""


def encode_png(image: np.ndarray) -> bytes:
    """Return an RGB image, uint8 [height, width, 3], as a PNG file."""
    height, width, _ = image.shape
    rows = np.zeros((height, width * 3 + 1), np.uint8)  # each row begins with its filter: none
    rows[:, 1:] = image.reshape(height, width * 3)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(rows.tobytes(), COMPRESSION_LEVEL)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def decode_png(data: bytes) -> np.ndarray:
    """Return the image of a PNG file of any color type, uint8 [height, width, 3].

    Raises:
        ValueError: it is no PNG file, is damaged, or has more than `MAX_PIXELS`.
        MachineError: Pillow is not installed.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MachineError("images of environments require Pillow", 'pip install "quintet[service]"') from error
    if data[:8] != SIGNATURE or len(data) < HEADER_END:
        raise ValueError("no PNG file")
    width, height = struct.unpack_from(">II", data, SIZE_START)
    if width * height > MAX_PIXELS:
        raise ValueError(f"an image of {width}×{height} pixels; at maximum {MAX_PIXELS}")
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            return np.array(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError, zlib.error) as error:
        raise ValueError(f"no valid PNG file: {error}") from error
