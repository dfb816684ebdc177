"""Header of a GGUF file: its settings, and the names of its tensors.

Its format is documented in the repository ggml-org/ggml. Nothing but the header is read, and neither numpy nor
the package `gguf` is imported, so `quintet plan` can use it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", None, None, "<Q", "<q", "<d")
"""Format of the values of each type, by its number; texts and arrays have none."""
TEXT, ARRAY = 8, 9
MAX_HEADER_BYTES = 256 << 20
"""The largest known headers, with the tokens of a large vocabulary, have about 20 MB."""

GGUFValue = int | float | bool | str


class UnreadableGGUFError(Exception):
    """The file is no GGUF file, is cut off, or has a header that is too large."""


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Contents of the header."""

    settings: Mapping[str, GGUFValue]
    """Settings that are one value, such as `llama.block_count`."""
    array_lengths: Mapping[str, int]
    """Number of entries of each setting that is a list, such as `tokenizer.ggml.tokens`."""
    tensors: tuple[str, ...]

    @property
    def architecture(self) -> str:
        return str(self.settings.get("general.architecture"))


def read_gguf_header(file: Path) -> GGUFHeader:
    """Read the header of a GGUF file.

    Raises:
        UnreadableGGUFError: it is none, or damaged.
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        return _HeaderReader(stream).read_header()


class _HeaderReader:
    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._left = MAX_HEADER_BYTES

    def read_header(self) -> GGUFHeader:
        if self._bytes(4) != MAGIC:
            raise UnreadableGGUFError("it does not begin with GGUF")
        if (version := self._number("<I")) not in VERSIONS:
            raise UnreadableGGUFError(f"its version is {version}; known: {', '.join(map(str, VERSIONS))}")
        num_tensors, num_settings = self._number("<Q"), self._number("<Q")
        settings: dict[str, GGUFValue] = {}
        lengths: dict[str, int] = {}
        for _ in range(num_settings):
            key, kind = self._text(), self._number("<I")
            if kind == ARRAY:
                lengths[key] = self._skip_array()
            else:
                settings[key] = self._value(kind)
        return GGUFHeader(settings, lengths, tuple(self._tensor_name() for _ in range(num_tensors)))

    def _bytes(self, count: int) -> bytes:
        self._left -= count
        if self._left < 0:
            raise UnreadableGGUFError(f"its header is larger than {MAX_HEADER_BYTES >> 20} MiB")
        data = self._stream.read(count)
        if len(data) < count:
            raise UnreadableGGUFError("it is cut off")
        return data

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._bytes(struct.calcsize(form)))[0])

    def _text(self) -> str:
        return self._bytes(self._number("<Q")).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> GGUFValue:
        if kind == TEXT:
            return self._text()
        form = _scalar_format(kind)
        value: GGUFValue = struct.unpack(form, self._bytes(struct.calcsize(form)))[0]
        return value

    def _skip_array(self) -> int:
        """Skip the entries of an array and return their number."""
        kind, count = self._number("<I"), self._number("<Q")
        if kind == TEXT:
            for _ in range(count):
                self._bytes(self._number("<Q"))
        else:
            self._bytes(count * struct.calcsize(_scalar_format(kind)))
        return count

    def _tensor_name(self) -> str:
        name = self._text()
        self._bytes(8 * self._number("<I"))  # sizes
        self._bytes(12)  # type and offset
        return name


def _scalar_format(kind: int) -> str:
    form = SCALARS[kind] if kind < len(SCALARS) else None
    if form is None:
        raise UnreadableGGUFError(f"it has values of an unknown type {kind}")
    return form
