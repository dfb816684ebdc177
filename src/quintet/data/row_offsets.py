"""Byte offsets of the rows of text files, computed in one pass with little memory.

Offsets are int64 [rows + 1]: row i is between offsets i and i + 1.
"""

from __future__ import annotations

import codecs
import csv
import json
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from quintet.errors import ConfigError

BLOCK_BYTES = 1 << 20
"""Bytes per read."""
BYTE_ORDER_MARK = codecs.BOM_UTF8
WHITESPACE = " \t\r\n"
LOOKAHEAD_CHARACTERS = 16
"""A parse error this close to the end of the text read so far may only mean that more text is needed: longer than any
number, escape or keyword of JSON."""


class InvalidRowError(Exception):
    """Raised for a row that cannot be parsed; `offset` in bytes."""

    def __init__(self, offset: int, message: str) -> None:
        super().__init__(message)
        self.offset = offset
        self.message = message

    def as_config_error(self, path: Path, key: str) -> ConfigError:
        """Return the error for the user, with the line number in the file."""
        line = line_number(path, self.offset)
        message = f"{key}: {path}, line {line}: {self.message}"
        return ConfigError(message, key=key, value=str(path), source=f"{path}:{line}", hint="fix or remove that row")


def json_error(offset: int, error: json.JSONDecodeError, first: int = 0) -> InvalidRowError:
    """Return the error of a row that begins at a byte offset of the file and at character `first` of the parsed text. A
    row that is not complete is wrong where its text ends, not in the line after it."""
    end = min(error.pos, len(error.doc.rstrip()))
    column = end - error.doc.rfind("\n", 0, end)
    return InvalidRowError(offset + len(error.doc[first:end].encode()), f"{error.msg}, column {column}")


def line_number(path: Path, offset: int) -> int:
    """Return the 1-based line number of a byte offset."""
    line, remaining = 1, offset
    with path.open("rb") as file:
        while remaining > 0 and (block := file.read(min(BLOCK_BYTES, remaining))):
            line, remaining = line + block.count(b"\n"), remaining - len(block)
    return line


def line_offsets(path: Path) -> array[int]:
    """Return the offsets of a file with one row per line. Blank lines are skipped; they belong to the row before."""
    offsets, position = array("q"), 0
    with path.open("rb") as file:
        for line in file:
            start = position + (len(BYTE_ORDER_MARK) if position == 0 and line.startswith(BYTE_ORDER_MARK) else 0)
            position += len(line)
            if line.removeprefix(BYTE_ORDER_MARK).strip():
                offsets.append(start)
    offsets.append(position)
    return offsets


def csv_offsets(path: Path) -> tuple[list[str], array[int]]:
    """Return the column names in the first row and the offsets of the others; quoted cells may contain newlines.

    Raises:
        InvalidRowError: a row has more or fewer cells than the header, or a quote is not closed.
    """
    csv.field_size_limit(sys.maxsize)
    offsets, position = array("q"), 0

    def lines() -> Iterator[str]:
        nonlocal position
        with path.open("rb") as file:
            for line in file:
                position += len(line)
                yield line.decode("utf-8-sig" if position == len(line) else "utf-8")

    reader, start = csv.reader(lines(), strict=True), 0
    names: list[str] = []
    try:
        for row in reader:
            if row and not names:
                names = row
            elif row and len(row) != len(names):
                raise InvalidRowError(start, f"the row has {len(row)} cells, the header {len(names)} columns")
            elif row:
                offsets.append(start)
            start = position
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidRowError(start, str(error)) from error
    offsets.append(position)
    return names, offsets


def json_offsets(path: Path) -> array[int]:
    """Return the offsets of a file with an array of JSON objects, or with consecutive JSON objects.

    Raises:
        InvalidRowError: the file has another structure.
    """
    with path.open("rb") as file:
        head = file.read(len(BYTE_ORDER_MARK))
        start = len(BYTE_ORDER_MARK) if head == BYTE_ORDER_MARK else 0
        file.seek(start)
        return _JsonObjectScanner(file.read, start).offsets()


class _JsonObjectScanner:
    """Scans JSON objects in a file that is read block by block."""

    def __init__(self, read: Callable[[int], bytes], start: int) -> None:
        self._read = read
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._parse = json.JSONDecoder().raw_decode
        self._text = ""
        self._index = 0
        """Current position in `_text`, in characters."""
        self._byte_offset = start
        """Current position in the file, in bytes."""
        self._at_end = False

    def offsets(self) -> array[int]:
        """Return the offset of each object, and the end of the last."""
        offsets, end = array("q"), self._byte_offset
        in_array = self._peek() == "["
        if in_array:
            self._advance(1)
        while character := self._peek():
            if in_array and character == "]":
                self._advance(1)
                self._check_end()
                break
            if in_array and offsets:
                self._skip_comma(character)
            offsets.append(self._byte_offset)
            self._skip_object()
            end = self._byte_offset
        else:
            if in_array:
                raise InvalidRowError(self._byte_offset, "the file ends inside its array")
        offsets.append(end)
        return offsets

    def _skip_comma(self, character: str) -> None:
        if character != ",":
            raise InvalidRowError(self._byte_offset, f"expected a comma or the end of the array, not {character!r}")
        self._advance(1)
        self._peek()

    def _check_end(self) -> None:
        if self._peek():
            raise InvalidRowError(self._byte_offset, "unexpected text after the end of the array")

    def _skip_object(self) -> None:
        """Skip the object at the current position, reading blocks until it is complete."""
        if self._peek() != "{":
            raise InvalidRowError(self._byte_offset, "a row must be an object, {…}")
        num_bytes = BLOCK_BYTES
        while True:
            try:
                _, stop = self._parse(self._text, self._index)
            except json.JSONDecodeError as error:
                if self._at_end or not self._may_be_incomplete(error):
                    raise json_error(self._byte_offset, error, self._index) from error
                self._read_block(num_bytes)
                num_bytes *= 2
            except RecursionError as error:
                raise InvalidRowError(self._byte_offset, "the row is nested too deeply") from error
            else:
                return self._advance(stop - self._index)

    def _may_be_incomplete(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated string") or error.pos > len(self._text) - LOOKAHEAD_CHARACTERS

    def _advance(self, characters: int) -> None:
        skipped = self._text[self._index : self._index + characters]
        self._byte_offset += len(skipped) if skipped.isascii() else len(skipped.encode())
        self._index += characters

    def _peek(self) -> str:
        """Skip whitespace and return the next character; empty at the end of the file."""
        while True:
            rest = self._text[self._index : self._index + 64]
            self._advance(len(rest) - len(rest.lstrip(WHITESPACE)))
            if self._index < len(self._text):
                if self._text[self._index] not in WHITESPACE:
                    return self._text[self._index]
            elif self._at_end:
                return ""
            else:
                self._read_block(BLOCK_BYTES)

    def _read_block(self, num_bytes: int) -> None:
        block = self._read(num_bytes)
        self._at_end = len(block) < num_bytes
        try:
            text = self._decode(block, self._at_end)
        except UnicodeDecodeError as error:
            raise InvalidRowError(self._byte_offset, f"the file is not valid UTF-8 ({error.reason})") from error
        self._text, self._index = self._text[self._index :] + text, 0
