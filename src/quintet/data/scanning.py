"""Where each row of a text file begins, found in one pass with little memory.

Each function gives byte offsets, int64 [rows + 1]: row i lies between offsets i and i + 1.
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

__all__ = ["BrokenRow", "csv_offsets", "json_offsets", "line_number", "line_offsets"]

BLOCK = 1 << 20
"""Bytes read at a time."""
MARK = codecs.BOM_UTF8
SPACE = " \t\r\n"
UNSURE = 16
"""Characters before the end of what was read in which a fault may only mean that the rest isn't there yet:
more than the longest number, escape or word of JSON takes."""


class BrokenRow(Exception):
    """A row that can't be read; `offset` in bytes."""

    def __init__(self, offset: int, message: str) -> None:
        super().__init__(message)
        self.offset = offset
        self.message = message

    def told(self, path: Path, key: str) -> ConfigError:
        """The same for the user, with the file's line."""
        line = line_number(path, self.offset)
        told = f"{key}: {path}, line {line}: {self.message}"
        return ConfigError(told, key=key, value=str(path), source=f"{path}:{line}", hint="mend or remove that row")


def line_number(path: Path, offset: int) -> int:
    """The line, counted from 1, in which a byte lies."""
    line, left = 1, offset
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(BLOCK, left))):
            line, left = line + block.count(b"\n"), left - len(block)
    return line


def line_offsets(path: Path) -> array[int]:
    """Of a file with a row on each line; blank lines hold none. A row's bytes may end with blank lines."""
    offsets, at = array("q"), 0
    with path.open("rb") as file:
        for line in file:
            start = at + (len(MARK) if at == 0 and line.startswith(MARK) else 0)
            at += len(line)
            if line.removeprefix(MARK).strip():
                offsets.append(start)
    offsets.append(at)
    return offsets


def csv_offsets(path: Path) -> tuple[list[str], array[int]]:
    """The names in the first row, and where the others lie; a quoted cell may hold line ends.

    Raises:
        BrokenRow: a row has more or fewer cells than the first, or a quote isn't closed.
    """
    csv.field_size_limit(sys.maxsize)
    offsets, at = array("q"), 0

    def lines() -> Iterator[str]:
        nonlocal at
        with path.open("rb") as file:
            for line in file:
                at += len(line)
                yield line.decode("utf-8-sig" if at == len(line) else "utf-8")

    reader, start = csv.reader(lines(), strict=True), 0
    names: list[str] = []
    try:
        for row in reader:
            if row and not names:
                names = row
            elif row and len(row) != len(names):
                raise BrokenRow(start, f"{len(row)} cells where the first row names {len(names)} columns")
            elif row:
                offsets.append(start)
            start = at
    except (csv.Error, UnicodeDecodeError) as error:
        raise BrokenRow(start, str(error)) from error
    offsets.append(at)
    return names, offsets


def json_offsets(path: Path) -> array[int]:
    """Of a file with an array of objects, or with objects one after another.

    Raises:
        BrokenRow: it isn't that.
    """
    with path.open("rb") as file:
        head = file.read(len(MARK))
        start = len(MARK) if head == MARK else 0
        file.seek(start)
        return _Objects(file.read, start).offsets()


class _Objects:
    """Steps over JSON objects in text that is read block by block."""

    def __init__(self, read: Callable[[int], bytes], start: int) -> None:
        self._read = read
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._parse = json.JSONDecoder().raw_decode
        self._text = ""
        self._place = 0
        """In `_text`, characters."""
        self._byte = start
        """The same place in the file."""
        self._ended = False

    def offsets(self) -> array[int]:
        """Where each begins, and where the last ends."""
        offsets, end = array("q"), self._byte
        in_array = self._next_sign() == "["
        if in_array:
            self._step(1)
        while sign := self._next_sign():
            if in_array and sign == "]":
                self._step(1)
                self._nothing_more()
                break
            if in_array and offsets:
                self._comma(sign)
            offsets.append(self._byte)
            self._object()
            end = self._byte
        else:
            if in_array:
                raise BrokenRow(self._byte, "the file ends within its array")
        offsets.append(end)
        return offsets

    def _comma(self, sign: str) -> None:
        if sign != ",":
            raise BrokenRow(self._byte, f"{sign!r} where a comma or the end of the array should be")
        self._step(1)
        self._next_sign()

    def _nothing_more(self) -> None:
        if self._next_sign():
            raise BrokenRow(self._byte, "something follows the end of the array")

    def _object(self) -> None:
        """Step over the object that begins here, reading on until it is whole."""
        if self._next_sign() != "{":
            raise BrokenRow(self._byte, "a row must be an object, {…}")
        wanted = BLOCK
        while True:
            try:
                _, stop = self._parse(self._text, self._place)
            except json.JSONDecodeError as error:
                if self._ended or not self._may_go_on(error):
                    raise BrokenRow(self._byte, error.msg) from error
                self._more(wanted)
                wanted *= 2
            except RecursionError as error:
                raise BrokenRow(self._byte, "it is nested too deeply") from error
            else:
                return self._step(stop - self._place)

    def _may_go_on(self, error: json.JSONDecodeError) -> bool:
        return error.msg.startswith("Unterminated string") or error.pos > len(self._text) - UNSURE

    def _step(self, characters: int) -> None:
        stepped = self._text[self._place : self._place + characters]
        self._byte += len(stepped) if stepped.isascii() else len(stepped.encode())
        self._place += characters

    def _next_sign(self) -> str:
        """The next character that isn't white space, stepped up to; empty at the end of the file."""
        while True:
            rest = self._text[self._place : self._place + 64]
            self._step(len(rest) - len(rest.lstrip(SPACE)))
            if self._place < len(self._text):
                if self._text[self._place] not in SPACE:
                    return self._text[self._place]
            elif self._ended:
                return ""
            else:
                self._more(BLOCK)

    def _more(self, wanted: int) -> None:
        block = self._read(wanted)
        self._ended = len(block) < wanted
        try:
            text = self._decode(block, self._ended)
        except UnicodeDecodeError as error:
            raise BrokenRow(self._byte, f"it isn't UTF-8 ({error.reason})") from error
        self._text, self._place = self._text[self._place :] + text, 0
