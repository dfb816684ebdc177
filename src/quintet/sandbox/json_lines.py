"""JSON messages between processes, one per line."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

BYTES = "base64 of bytes"


def encode(message: Any) -> bytes:
    """Return a message as one line: arrays as lists, bytes as base64, other values unknown to JSON as text."""
    return json.dumps(message, default=as_json, ensure_ascii=True).encode() + b"\n"


def as_json(value: Any) -> Any:
    """Return the closest value that JSON has for one that it cannot express."""
    if isinstance(value, bytes | bytearray):
        return {BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)


def decode(line: bytes) -> Any:
    """Return the message of a line."""
    return json.loads(line, object_hook=_as_bytes)


def _as_bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[BYTES]) if value.keys() == {BYTES} else value


class LineTooLongError(ValueError):
    """A process sends a line that is longer than its reader allows."""


class LineBuffer:
    """Splits a byte stream that arrives in chunks into lines."""

    def __init__(self, max_bytes: int | None = None) -> None:
        """`max_bytes` limits the size of a line that has not ended."""
        self._chunks: list[bytes] = []
        self._max_bytes, self._incomplete_bytes = max_bytes, 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the lines that this chunk completes.

        Raises:
            LineTooLongError: the last line exceeds the limit.
        """
        *complete, rest = chunk.split(b"\n")
        self._incomplete_bytes = len(rest) + (0 if complete else self._incomplete_bytes)
        if self._max_bytes is not None and self._incomplete_bytes > self._max_bytes:
            raise LineTooLongError(f"the worker process sent a line of more than {self._max_bytes >> 20} MiB")
        for line in complete:
            yield b"".join((*self._chunks, line))
            self._chunks.clear()
        if rest:
            self._chunks.append(rest)

    def read(self, stream: socket.socket) -> Iterator[bytes]:
        """Yield the lines of a stream until it ends."""
        while chunk := stream.recv(1 << 16):
            yield from self.feed(chunk)
