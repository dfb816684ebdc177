"""Parser of the shell subset that run scripts use: commands, their words, and the parts of words.

It expands nothing: `$X` stays a part of its word for `expansion`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from quintet.errors import ConfigError

SEPARATORS = ("&&", "||", ";;", "|&", "|", "&", ";", "(", ")", "\n")
REDIRECTIONS = ("<<<", "<<-", "&>>", "<<", ">>", ">&", "<&", "&>", ">", "<")
BLANK, META = " \t", " \t\n;&|()<>"
LITERAL = re.compile(r"""[^\s;&|()<>\\'"`$~=:]+[=:]?""")
QUOTED_LITERAL = re.compile(r"""[^\\"`$]+""")
PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
CLOSING = {"${": "}", "$(": ")", "(": ")", '"': '"'}
OVERRIDE_LINE = re.compile(r"""[ \t]+[+~]{0,2}[\w./@-]+=|[+~]{0,2}\w+(\.\w+)+=|[ \t]*(#|"?\$\{?@)""")
"""Start of a line that continues a command after a comment line."""


class PartKind(StrEnum):
    """Kind of a part of a word."""

    TEXT = "text"
    PARAMETER = "parameter"
    ARITHMETIC = "arithmetic"
    COMMAND = "command"


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a word: literal text, or the inside of `${…}`, `$((…))` or `$(…)`."""

    kind: PartKind
    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command."""

    parts: tuple[Part, ...]
    line: int
    items: tuple[Word, ...] | None = None
    """The words in the parentheses of `NAME=(…)`."""

    @property
    def literal(self) -> str | None:
        """Its text if nothing in it is quoted or expanded."""
        if all(part.kind is PartKind.TEXT and not part.quoted for part in self.parts) and self.items is None:
            return "".join(part.text for part in self.parts)
        return None


@dataclass(frozen=True, slots=True)
class Command:
    """Words up to a separator such as `&&`, `|` or a line break."""

    words: tuple[Word, ...]
    line: int
    separator: str
    comment_lines: tuple[int, ...] = ()
    """Comment lines inside the command, at which a shell would end it."""


def parse_commands(text: str, name: str, first_line: int = 1) -> Iterator[Command]:
    """Yield the commands of a script in order, without comments, redirections and here-documents.

    Raises:
        ConfigError: a quote or a bracket is not closed.
    """
    parser = _Parser(text.replace("\r\n", "\n"), name, first_line)
    while not parser.at_end:
        if (command := parser.command()) is not None:
            yield command


def parse_parts(text: str, name: str, line: int, *, quoted: bool) -> tuple[Part, ...]:
    """Return the parts of a text in which blanks do not end a word, such as the default of `${X:-default}`."""
    parser = _Parser(text, name, line)
    parts: list[Part] = []
    while not parser.at_end:
        parser.part(parts, quoted=quoted)
    return tuple(parts)


class _Parser:
    def __init__(self, text: str, name: str, first_line: int) -> None:
        self.text, self.name, self.position = text, name, 0
        self.counted, self.current_line = 0, first_line
        self.heredocs: list[str] = []

    @property
    def at_end(self) -> bool:
        return self.position >= len(self.text)

    def line(self) -> int:
        """Return the line of the position, counted from where it was last asked for."""
        self.current_line += self.text.count("\n", self.counted, self.position)
        self.counted = self.position
        return self.current_line

    def command(self) -> Command | None:
        words: list[Word] = []
        comments: list[int] = []
        continued = False
        while True:
            continued = self._skip_blanks() or continued
            separator = self._starting(SEPARATORS) if not self.text.startswith("((", self.position) else None
            redirection = self._starting(REDIRECTIONS)
            if self.at_end or (separator and not redirection):
                return self._end(words, separator or "\n", comments)
            if redirection is not None:
                self._redirection(redirection)
            elif self.text[self.position] == "#":
                continued = self._comment(comments, inside=continued and bool(words))
                continue
            elif self.text.startswith("((", self.position):
                self.position = self._closing(self.position + 1, "(") + 1
            else:
                words.append(self._word())
                if re.match(r"\d+[<>]", f"{words[-1].literal}{self.text[self.position : self.position + 1]}"):
                    words.pop()  # the 2 of `2>&1`
            continued = False

    def _end(self, words: list[Word], separator: str, comments: list[int]) -> Command | None:
        self.position += len(separator)
        if separator == "\n":
            self._skip_heredocs()
        if not words and separator in ("\n", ";"):
            return None
        return Command(tuple(words), words[0].line if words else self.line(), separator, tuple(comments))

    def _starting(self, operators: tuple[str, ...]) -> str | None:
        return next((operator for operator in operators if self.text.startswith(operator, self.position)), None)

    def _skip_blanks(self) -> bool:
        """Skip blanks; return whether a backslash joined two lines."""
        continued = False
        while not self.at_end:
            if self.text[self.position] in BLANK:
                self.position += 1
            elif self.text.startswith("\\\n", self.position):
                self.position, continued = self.position + 2, True
            else:
                break
        return continued

    def _redirection(self, operator: str) -> None:
        self.position += len(operator)
        self._skip_blanks()
        if self.at_end or self.text[self.position] == "\n":
            return
        target = self._word()
        if operator in ("<<", "<<-"):
            self.heredocs.append("".join(part.text for part in target.parts))

    def _skip_heredocs(self) -> None:
        for end in self.heredocs:
            matched = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self.text, self.position)
            self.position = matched.end() + 1 if matched else len(self.text)
        self.heredocs.clear()

    def _comment(self, comments: list[int], *, inside: bool) -> bool:
        """Skip a comment; return whether the next line continues the command.

        A comment line between the lines of a command ends it for a shell. If overrides follow, they are read as well,
        since their author meant them to count.
        """
        line = self.line()
        end = self.text.find("\n", self.position)
        self.position = len(self.text) if end < 0 else end
        if not inside or not OVERRIDE_LINE.match(self.text, self.position + 1):
            return False
        comments.append(line)
        self.position += 1
        return True

    def _word(self) -> Word:
        line, start = self.line(), self.position
        parts: list[Part] = []
        while not self.at_end and (self.text[self.position] not in META or self.position == start):
            self.part(parts, quoted=False)
            if self.text.startswith("(", self.position) and re.fullmatch(r"\w+\+?=", self.text[start : self.position]):
                return Word(tuple(parts), line, self._items())
        return Word(tuple(parts), line)

    def _items(self) -> tuple[Word, ...]:
        """Parse the words of an array in parentheses, which line breaks and comments separate, too."""
        self._closing(self.position + 1, "(")  # refuses an array that is not closed
        self.position += 1
        items: list[Word] = []
        while self._skip_blanks() or not self.text.startswith(")", self.position):
            if self.text.startswith("#", self.position):
                self._comment([], inside=False)
            elif self.text.startswith("\n", self.position):
                self.position += 1
            else:
                items.append(self._word())
        self.position += 1
        return tuple(items)

    def part(self, parts: list[Part], *, quoted: bool) -> None:
        """Append the next part of a word to `parts`; a double-quoted text has several."""
        character = self.text[self.position]
        if character == "\\":
            self._escape(parts, quoted=quoted)
        elif character == "'" and not quoted:
            parts.append(Part(PartKind.TEXT, self._up_to(character), quoted=True))
        elif character == '"':
            self._double_quotes(parts)
        elif character == "`":
            parts.append(Part(PartKind.COMMAND, self._up_to(character), quoted))
        elif character == "$":
            parts.append(self._expansion(quoted=quoted))
        else:
            matched = (QUOTED_LITERAL if quoted else LITERAL).match(self.text, self.position)
            end = matched.end() if matched else self.position + 1
            parts.append(Part(PartKind.TEXT, self.text[self.position : end], quoted))
            self.position = end

    def _escape(self, parts: list[Part], *, quoted: bool) -> None:
        character = self.text[self.position + 1 : self.position + 2]
        self.position += 2
        if character != "\n":
            backslash = "\\" if quoted and character not in '$`"\\' else ""
            parts.append(Part(PartKind.TEXT, f"{backslash}{character}", quoted=True))

    def _up_to(self, quote: str) -> str:
        line, start = self.line(), self.position + 1
        end = self.text.find(quote, start)
        if end < 0:
            raise self._not_closed(quote, line)
        self.position = end + 1
        return self.text[start:end]

    def _double_quotes(self, parts: list[Part]) -> None:
        line = self.line()
        self.position += 1
        parts.append(Part(PartKind.TEXT, "", quoted=True))
        while not self.at_end:
            if self.text[self.position] == '"':
                self.position += 1
                return
            self.part(parts, quoted=True)
        raise self._not_closed('"', line)

    def _expansion(self, *, quoted: bool) -> Part:
        """Parse `$X`, `${X…}`, `$((…))`, `$(…)`, or a literal dollar."""
        if self.text.startswith("$((", self.position):
            return Part(PartKind.ARITHMETIC, self._inside("$(")[1:-1], quoted)
        if self.text.startswith("$(", self.position):
            return Part(PartKind.COMMAND, self._inside("$("), quoted)
        if self.text.startswith("${", self.position):
            return Part(PartKind.PARAMETER, self._inside("${"), quoted)
        matched = PARAMETER.match(self.text, self.position + 1)
        self.position = matched.end() if matched else self.position + 1
        return Part(PartKind.PARAMETER, matched.group(), quoted) if matched else Part(PartKind.TEXT, "$", quoted)

    def _inside(self, bracket: str) -> str:
        start = self.position + 2
        end = self._closing(start, bracket)
        self.position = end + 1
        return self.text[start:end]

    def _closing(self, position: int, bracket: str) -> int:
        """Return where the bracket closes whose inside begins at `position`, past quotes and brackets in it."""
        line, expected = self.line(), [CLOSING[bracket]]
        while position < len(self.text):
            character, inner = self.text[position], expected[-1]
            if character == inner:
                expected.pop()
                if not expected:
                    return position
            elif character == "\\":
                position += 1
            elif character == "'" and '"' not in expected:
                position = max(self.text.find("'", position + 1), position)
            elif self.text[position : position + 2] in ("${", "$("):
                expected.append(CLOSING[self.text[position : position + 2]])
                position += 1
            elif character == '"' or (character == "(" and inner == ")"):
                expected.append(CLOSING[character])
            position += 1
        raise self._not_closed(bracket, line)

    def _not_closed(self, mark: str, line: int) -> ConfigError:
        source = f"{self.name}:{line}"
        return ConfigError(f"{source}: the {mark} that begins here is never closed", source=source, hint="close it")
