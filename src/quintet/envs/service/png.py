"""PNG files of RGB images."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import numpy as np
from PIL import Image, UnidentifiedImageError

SIGNATURE = b"\x89PNG\r\n\x1a\n"
SIZE, CHUNK = struct.Struct(">II"), struct.Struct(">I4s")
"""Width and height; length and name of a chunk."""
CRC_BYTES = 4
SIZE_START, HEADER_END = 16, 33
"""Position of width and height, and end of the header."""
DATA_START = HEADER_END + CHUNK.size
RGB = bytes((8, 2, 0, 0, 0))
"""Bits per channel, color type, and methods of compression, filters and interlacing, of the images written here."""
COMPRESSION_LEVEL = 1
"""Rendered scenes are as small as with higher levels, in a third of the time."""
MAX_PIXELS = 4096 * 4096
"""Larger images are refused before they are decompressed."""


def encode_png(image: np.ndarray) -> bytes:
    """Return an RGB image, uint8 [height, width, 3], as a PNG file."""
    height, width, _ = image.shape
    rows = np.zeros((height, width * 3 + 1), np.uint8)  # each row begins with its filter: none
    rows[:, 1:] = image.reshape(height, width * 3)
    header = SIZE.pack(width, height) + RGB
    data = zlib.compress(rows.tobytes(), COMPRESSION_LEVEL)
    return SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def png_data_url(file: bytes) -> str:
    """Return a PNG file as a `data:` URL."""
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def _chunk(name: bytes, data: bytes) -> bytes:
    return CHUNK.pack(len(data), name) + data + zlib.crc32(name + data).to_bytes(CRC_BYTES)


def decode_png(data: bytes) -> np.ndarray:
    """Return the image of a PNG file of any color type, uint8 [height, width, 3].

    Raises:
        ValueError: it is no PNG file, is damaged, or has more than `MAX_PIXELS`.
    """
    if data[:8] != SIGNATURE or len(data) < DATA_START:
        raise ValueError("no PNG file")
    width, height = SIZE.unpack_from(data, SIZE_START)
    if not 0 < width * height <= MAX_PIXELS:
        raise ValueError(f"an image of {width}×{height} pixels; at maximum {MAX_PIXELS}")
    unfiltered = _decode_unfiltered(data, width, height)
    return _decode_by_pillow(data) if unfiltered is None else unfiltered


def _decode_unfiltered(data: bytes, width: int, height: int) -> np.ndarray | None:
    """Return the image of a file of `encode_png`, None for files with other filters, color types or chunks."""
    num_bytes, kind = CHUNK.unpack_from(data, HEADER_END)
    content = data[DATA_START : DATA_START + num_bytes]
    if data[SIZE_START + SIZE.size : HEADER_END - CRC_BYTES] != RGB or kind != b"IDAT" or len(content) < num_bytes:
        return None
    end = data[DATA_START + num_bytes : DATA_START + num_bytes + CRC_BYTES + CHUNK.size]
    row_bytes = width * 3 + 1
    if end[CRC_BYTES + 4 :] != b"IEND" or end[:CRC_BYTES] != zlib.crc32(b"IDAT" + content).to_bytes(CRC_BYTES):
        return None
    unpacker = zlib.decompressobj()
    try:
        rows = unpacker.decompress(content, height * row_bytes)
    except zlib.error as error:
        raise ValueError(f"no valid PNG file: {error}") from error
    if len(rows) < height * row_bytes:
        return None
    pixels = np.frombuffer(rows, np.uint8).reshape(height, row_bytes)
    return None if pixels[:, 0].any() else np.ascontiguousarray(pixels[:, 1:]).reshape(height, width, 3)


def _decode_by_pillow(data: bytes) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            return np.array(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError, zlib.error) as error:
        raise ValueError(f"no valid PNG file: {error}") from error
