"""TFRecord files: `length uint64 | CRC of the length uint32 | data | CRC of the data uint32`, little-endian."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final

from quintet.data.robot_demonstrations.dataset import InvalidDatasetError

_MASK_DELTA: Final = 0xA282EAD8
_HEADER: Final = struct.Struct("<QI")
_CRC: Final = struct.Struct("<I")
MAX_RECORD_BYTES: Final = 2**31 - 1
"""Largest size of a Protobuf message."""


class TfrecordFile:
    """Records of a file, which is memory-mapped."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            InvalidDatasetError: the file is truncated, or the length of a record is invalid.
            OSError: the file cannot be opened.
        """
        self.path = path
        with path.open("rb") as file:
            self._size = path.stat().st_size
            self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._size else b"")
        self.offsets = self._find_records()

    def __len__(self) -> int:
        return len(self.offsets)

    def data(self, number: int, *, verify: bool = True) -> memoryview:
        """Return the data of a record.

        Raises:
            InvalidDatasetError: `verify` is set and the data do not match their CRC.
        """
        offset = self.offsets[number]
        start = offset + _HEADER.size
        stop = start + _HEADER.unpack_from(self._data, offset)[0]
        data = self._data[start:stop]
        if verify and masked_crc32c(data) != _CRC.unpack_from(self._data, stop)[0]:
            raise InvalidDatasetError("the data of the record do not match their checksum", self.location(number))
        return data

    def location(self, number: int) -> str:
        """Return where a record is, for messages."""
        return f"record {number} at byte {self.offsets[number]:,}"

    def _find_records(self) -> list[int]:
        offsets: list[int] = []
        offset = 0
        while offset < self._size:
            location = f"record {len(offsets)} at byte {offset:,}"
            if self._size - offset < _HEADER.size + _CRC.size:
                raise InvalidDatasetError("the file ends inside the record", location)
            length, crc = _HEADER.unpack_from(self._data, offset)
            if masked_crc32c(self._data[offset : offset + 8]) != crc:
                raise InvalidDatasetError("the length of the record does not match its checksum", location)
            stop = offset + _HEADER.size + length + _CRC.size
            if length > MAX_RECORD_BYTES:
                raise InvalidDatasetError(f"the record has {length:,} bytes, more than {MAX_RECORD_BYTES:,}", location)
            if stop > self._size:
                raise InvalidDatasetError(f"the file ends inside the record of {length:,} bytes", location)
            offsets.append(offset)
            offset = stop
        return offsets


def masked_crc32c(data: bytes | memoryview) -> int:
    """Return the CRC-32C (Castagnoli) of data as TFRecord files store it: rotated, plus a constant."""
    import google_crc32c

    crc: int = google_crc32c.value(bytes(data))
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF
