"""Messages between processes: one JSON value a line."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["Lines", "decoded", "encoded"]

BYTES = "base64 of bytes"


def encoded(message: Any) -> bytes:
    """A line. Arrays become lists, bytes stay bytes, and what JSON doesn't know becomes its text."""
    return json.dumps(message, default=_as_json, ensure_ascii=True).encode() + b"\n"


def _as_json(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return {BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)


def decoded(line: bytes) -> Any:
    """What a line says."""
    return json.loads(line, object_hook=_as_bytes)


def _as_bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[BYTES]) if value.keys() == {BYTES} else value


class Lines:
    """Lines that arrive in pieces."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The lines that this piece completes."""
        *complete, rest = piece.split(b"\n")
        for line in complete:
            yield b"".join((*self._pieces, line))
            self._pieces.clear()
        if rest:
            self._pieces.append(rest)

    def read(self, stream: socket.socket) -> Iterator[bytes]:
        """Lines of a stream, until it ends."""
        while piece := stream.recv(1 << 16):
            yield from self.feed(piece)
