"""How many rows data files have, counted without reading what is in them."""

from __future__ import annotations

import csv
import json
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["count_rows"]

MOST = 256 << 20
"""Bytes of text files that are read through; of a Parquet file only the end is read."""
MAGIC = b"PAR1"


def count_rows(files: Iterable[str]) -> int | None:
    """Rows of all files together; None where one isn't here or is of another kind, or they are too large."""
    try:
        paths = [Path(os.path.expanduser(file)) for file in files]
        if sum(path.stat().st_size for path in paths if path.suffix.lower() != ".parquet") > MOST:
            return None
        rows = [_count(path) for path in paths]
    except (OSError, ValueError, IndexError, RecursionError, csv.Error):
        return None
    return None if None in rows else sum(filter(None, rows))


def _count(path: Path) -> int | None:
    counters = {".parquet": _parquet, ".jsonl": _lines, ".json": _json, ".csv": _csv}
    counter = counters.get(path.suffix.lower())
    rows = None if counter is None else counter(path)
    return rows if rows is None or rows >= 0 else None


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if not line.isspace())


def _json(path: Path) -> int | None:
    """A list of rows; some write JSON Lines under this name."""
    with path.open(encoding="utf-8") as file:
        if file.read(64).lstrip()[:1] != "[":
            return _lines(path)
        file.seek(0)
        return len(json.load(file))


def _csv(path: Path) -> int:
    with path.open(encoding="utf-8", newline="") as file:
        return max(0, sum(1 for row in csv.reader(file) if row) - 1)


def _parquet(path: Path) -> int | None:
    """From the file's footer, whose third field is the number of rows (parquet.thrift, FileMetaData)."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if len(data) < 12 or data[-4:] != MAGIC:
            return None
        length = int.from_bytes(data[-8:-4], "little")
        return _Compact(data[max(0, len(data) - 8 - length) : -8]).integer_of_struct(3)


class _Compact:
    """As much of Thrift's compact protocol as it takes to step over fields."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def integer_of_struct(self, wanted: int) -> int | None:
        """The integer field of that number in the struct that begins here; None where there is none."""
        number = 0
        while kind := self._data[self._at]:
            self._at += 1
            number = number + (kind >> 4) if kind >> 4 else self._integer()
            if number == wanted and kind & 15 in (4, 5, 6):
                return self._integer()
            self._skip(kind & 15)
        return None

    def _varint(self) -> int:
        result = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            result |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return result

    def _integer(self) -> int:
        raw = self._varint()
        return (raw >> 1) ^ -(raw & 1)

    def _skip(self, kind: int, *, element: bool = False) -> None:
        """Step over a value; a truth value needs a byte only as an element of a list."""
        if kind in (1, 2):
            self._at += element
        elif kind == 3:
            self._at += 1
        elif kind in (4, 5, 6):
            self._varint()
        elif kind == 7:
            self._at += 8
        elif kind == 8:
            length = self._varint()
            self._at += length
        elif kind in (9, 10):
            self._skip_list()
        elif kind == 12:
            self._skip_struct()
        else:
            raise ValueError(f"no value of kind {kind}")

    def _skip_list(self) -> None:
        head = self._data[self._at]
        self._at += 1
        for _ in range(self._varint() if head >> 4 == 15 else head >> 4):
            if self._at >= len(self._data):
                raise ValueError("the list goes on beyond the end")
            self._skip(head & 15, element=True)

    def _skip_struct(self) -> None:
        while kind := self._data[self._at]:
            self._at += 1
            if not kind >> 4:
                self._integer()
            self._skip(kind & 15)
        self._at += 1
