"""Reader of the text of a shell script: positions, lines, comments, here-documents."""

from __future__ import annotations

import re
from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

from quintet.config.dialects.scripts.variables import Variables, script_error
from quintet.errors import ConfigError

BLANKS = re.compile(r"(?:[ \t]|\\\n)*")
BETWEEN_COMMANDS = re.compile(r"(?:[ \t]|\\\n|#.*)*")
WORD_END = re.compile(r"[ \t\n;&|()]|[<>](?!\()|\Z")
HERE_DOCUMENT_END = re.compile(r"""(?:\\.|'[^']*'|"[^"]*"|[^\s;&|()<>'"\\])+""")
TEXT_STATE = ("text", "line_breaks", "first_line", "position", "here_documents", "skipped_to")
"""Attributes of a reader that belong to its text."""


class TextReader:
    """Reads a text from a position."""

    def __init__(self, text: str, variables: Variables, first_line: int = 1) -> None:
        self.variables = variables
        self.here_documents: list[tuple[str, str]] = []
        """Operators and ends of the here-documents that begin at the next line."""
        self.ended_by = ""
        """What ended the last list of commands or words, such as `else`."""
        self.skipped = 0
        self.skipped_to: dict[tuple[int, tuple[str, ...]] | None, tuple[int, str]] = {}
        """Position after the commands from a position up to the words that end them, and which of the words does."""
        self._set_text(text.replace("\r\n", "\n"), first_line)

    def _set_text(self, text: str, first_line: int) -> None:
        self.text, self.first_line, self.position = text, first_line, 0
        self.line_breaks = [matched.start() for matched in re.finditer("\n", text)]

    @contextmanager
    def inner_text(self, text: str) -> Iterator[None]:
        """Read a part of the text as a text, and go on after it."""
        state = {name: getattr(self, name) for name in TEXT_STATE}
        self._set_text(text, self.line)
        self.here_documents, self.skipped_to = [], {}
        try:
            yield
        finally:
            for name, value in state.items():
                setattr(self, name, value)

    @property
    def line(self) -> int:
        """The line of the position."""
        return self.first_line + bisect_left(self.line_breaks, self.position)

    @property
    def at_end(self) -> bool:
        """Whether the script ends at the position."""
        return self.position >= len(self.text)

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match a pattern at the position and skip it."""
        matched = pattern.match(self.text, self.position)
        self.position = matched.end() if matched else self.position
        return matched

    def take(self, *tokens: str) -> str:
        """Return which of the tokens is at the position and skip it; empty if none is."""
        for token in tokens:
            end = self.position + len(token)
            if self.text.startswith(token, self.position) and (not token.isalpha() or WORD_END.match(self.text, end)):
                self.position = end
                return token
        return ""

    def error(self, message: str, hint: str, line: int) -> ConfigError:
        """Return an error at a line."""
        return script_error(f"{self.variables.path}:{line}", message, hint)

    def not_closed(self, opening: str, line: int) -> ConfigError:
        """Return the error of a quote or a command that has no end."""
        return self.error(f"the {opening} that begins here is never closed", "close it", line)

    def skip_lines(self) -> None:
        """Skip blanks, comments, line breaks, and the here-documents after them."""
        self.match(BETWEEN_COMMANDS)
        while self.take("\n"):
            self._skip_here_documents()
            self.match(BETWEEN_COMMANDS)

    def _skip_here_documents(self) -> None:
        for operator, end in self.here_documents:
            tabs = r"\t*" if operator == "<<-" else ""
            line = re.escape(re.sub(r"""\\(.)|["']""", r"\1", end))
            matched = re.compile(rf"^{tabs}{line}$", re.MULTILINE).search(self.text, self.position)
            body = self.text[self.position : matched.start() if matched else len(self.text)]
            self.position = matched.end() if matched else len(self.text)
            if not re.search(r"""[\\"']""", end) and not self.skipped:
                self.expand(body)
        self.here_documents.clear()

    @abstractmethod
    def expand(self, text: str) -> str:
        """Expand a text as between double quotes."""

    def lines_until(self, opening: str, *ends: str) -> Iterator[None]:
        """Yield at each command or word up to one of `ends`; without an `opening`, up to the end of the script."""
        line = self.line
        while True:
            self.skip_lines()
            self.ended_by = self.take(*ends)
            if self.ended_by or (self.at_end and not opening):
                return
            if self.at_end:
                raise self.not_closed(opening, line)
            yield
