"""Streams of a terminal that show the control characters of printed text instead of sending them.

Commands print text of models, data, records and configurations. A terminal would obey sequences in such text: set its
title, write to the clipboard, or answer as if the user had typed.
"""

from __future__ import annotations

import io
import re
import sys
from typing import TextIO, cast

_CONTROL = re.compile(
    r"""
    \x1b(?!\[[0-9;]*[ABCDGHJKm]|\[\?25[hl])     # styles, movements and erasures of rich's tables and progress bars pass
    | [\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]
    """,
    re.VERBOSE,
)


def visible(text: str) -> str:
    """Return `text` with its control characters as `\\x1b`, save line ends, tabs, and the sequences of rich."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class TerminalStream:
    """A text stream to a terminal, which writes what `visible` returns."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text`, and return the number of its characters."""
        self._stream.write(visible(text))
        return len(text)


def replace_unencodable_characters() -> None:
    """Write `?` to stdout and stderr for characters outside their encoding, in locales other than UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")


def show_control_characters() -> None:
    """Replace stdout and stderr by streams that show control characters, where they are terminals."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream.isatty():
            setattr(sys, name, cast("TextIO", TerminalStream(stream)))
