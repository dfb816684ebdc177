"""The grammar of shell scripts, as far as run scripts use it: commands, their words, and what the words are made of.

Nothing is run, and nothing is looked up: `$X` stays a part of its word, for `shell_values` to fill in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from quintet.errors import ConfigError

__all__ = ["Command", "Kind", "Part", "Word", "commands", "parts_of"]

OPERATORS = (
    *("<<<", "<<-", "&>>", ";;&"),
    *("<<", ">>", ">&", "<&", ">|", "<>", "&>", "&&", "||", "|&", ";;", ";&"),
    *(">", "<", "|", "&", ";", "(", ")", "\n"),
)
"""The longest first."""
ENDS = {";;&", "&&", "||", "|&", ";;", ";&", "|", "&", ";", "(", ")", "\n"}
"""Those that end a command; the others are redirections, and the word after them is no word of the command."""
BLANK, META = " \t", " \t\n;&|()<>"
PLAIN = re.compile(r"""[^\s;&|()<>\\'"`$~=:]+[=:]?""")
PLAIN_QUOTED = re.compile(r"""[^\\"`$]+""")
CLOSING = {"${": "}", "$(": ")", "(": ")", '"': '"'}
OVERRIDE_LINE = re.compile(r"""[ \t]+[+~]{0,2}[\w./@-]+=|[+~]{0,2}\w+(\.\w+)+=|[ \t]*(#|"?\$\{?@)""")
"""How a line goes on with the overrides of the command before a comment."""


class Kind(StrEnum):
    """What a part of a word is."""

    TEXT = "text"
    VARIABLE = "variable"
    ARITHMETIC = "arithmetic"
    COMMAND = "command"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word: text as it stands, or the inside of `${…}`, `$((…))` or `$(…)`."""

    kind: Kind
    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command, with the line that it begins in."""

    parts: tuple[Part, ...]
    line: int
    items: tuple[Word, ...] | None = None
    """Of `NAME=(…)`, the words in the brackets."""

    @property
    def plain(self) -> str | None:
        """Its text where nothing in it is quoted or filled in."""
        if all(part.kind is Kind.TEXT and not part.quoted for part in self.parts) and self.items is None:
            return "".join(part.text for part in self.parts)
        return None


@dataclass(frozen=True, slots=True)
class Command:
    """Words up to the operator that ends them."""

    words: tuple[Word, ...]
    line: int
    end: str
    """`&&`, `|`, a line break …"""
    comments: tuple[int, ...] = ()
    """Lines of comments between its lines, at which a shell would end it."""


def commands(text: str, name: str, first_line: int = 1) -> Iterator[Command]:
    """Every command of a script called `name`, in order, without its comments, redirections and here-documents.

    Raises:
        ConfigError: a quote or a bracket is never closed.
    """
    reader = _Reader(text.replace("\r\n", "\n"), name, first_line)
    while not reader.at_end:
        if (command := reader.command()) is not None:
            yield command


def parts_of(text: str, name: str, line: int, *, quoted: bool) -> tuple[Part, ...]:
    """What a text is made of that stands where blanks don't end a word: the `…` of `${X:-…}`."""
    reader = _Reader(text, name, line)
    parts: list[Part] = []
    while not reader.at_end:
        reader.piece(parts, quoted=quoted)
    return tuple(parts)


class _Reader:
    def __init__(self, text: str, name: str, first_line: int) -> None:
        self.text, self.name, self.first_line = text, name, first_line
        self.place = 0
        self.counted, self.lines = 0, 0
        self.heredocs: list[str] = []
        self.goes_on = False

    @property
    def at_end(self) -> bool:
        return self.place >= len(self.text)

    def line(self) -> int:
        """Of the place where it is; counted on from the last time it was asked."""
        self.lines += self.text.count("\n", self.counted, self.place)
        self.counted = self.place
        return self.first_line + self.lines

    def command(self) -> Command | None:
        words: list[Word] = []
        comments: list[int] = []
        while True:
            continued = self._skip_blank() or self.goes_on
            self.goes_on = False
            operator = self._operator()
            if self.at_end or operator in ENDS:
                return self._ended(words, operator or "\n", comments)
            if operator is not None:
                self._redirection(operator)
            elif self.text[self.place] == "#":
                self._comment(comments if continued and words else None)
            elif self.text.startswith("((", self.place):
                self._bracketed()
            else:
                words.append(self._word())
                if re.match(r"\d+[<>]", f"{words[-1].plain}{self.text[self.place : self.place + 1]}"):
                    words.pop()

    def _ended(self, words: list[Word], end: str, comments: list[int]) -> Command | None:
        self.place += len(end)
        if end == "\n":
            self._skip_heredocs()
        if not words and end in ("\n", ";"):
            return None
        return Command(tuple(words), words[0].line if words else self.line(), end, tuple(comments))

    def _skip_blank(self) -> bool:
        """Whether a backslash joined a line to the one before."""
        continued = False
        while not self.at_end:
            if self.text[self.place] in BLANK:
                self.place += 1
            elif self.text.startswith("\\\n", self.place):
                self.place, continued = self.place + 2, True
            else:
                break
        return continued

    def _operator(self) -> str | None:
        found = next((one for one in OPERATORS if self.text.startswith(one, self.place)), None)
        if found in ("<", ">") and self.text.startswith("(", self.place + 1):
            return None  # `<(…)` is a word
        return None if found == "(" and self.text.startswith("((", self.place) else found

    def _redirection(self, operator: str) -> None:
        self.place += len(operator)
        self._skip_blank()
        if self.at_end or self.text[self.place] == "\n":
            return
        target = self._word()
        if operator in ("<<", "<<-"):
            self.heredocs.append("".join(part.text for part in target.parts))

    def _skip_heredocs(self) -> None:
        for end in self.heredocs:
            found = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self.text, self.place)
            self.place = found.end() + 1 if found else len(self.text)
        self.heredocs.clear()

    def _comment(self, inside: list[int] | None) -> None:
        """Pass a comment. Between the lines of a command it ends that for a shell; people who leave it there
        mean the lines that follow as well."""
        line = self.line()
        self.place = self._until("\n")
        if inside is not None and OVERRIDE_LINE.match(self.text, self.place + 1):
            inside.append(line)
            self.place, self.goes_on = self.place + 1, True

    def _until(self, end: str) -> int:
        found = self.text.find(end, self.place)
        return len(self.text) if found < 0 else found

    def _bracketed(self) -> None:
        """Pass `((…))`."""
        self.place = self._closed(self.place + 1, "(") + 1

    def _word(self) -> Word:
        line = self.line()
        parts: list[Part] = []
        start = self.place
        while not self.at_end and (self.text[self.place] not in META or self.place == start):
            self.piece(parts, quoted=False)
            if self.text.startswith("(", self.place) and re.fullmatch(r"\w+\+?=", self.text[start : self.place]):
                return Word(tuple(parts), line, self._items())
        return Word(tuple(parts), line)

    def _items(self) -> tuple[Word, ...]:
        """The words of `(…)`, which line breaks and comments part like blanks."""
        start, begun = self.line(), self.place
        self._closed(begun + 1, "(")
        self.place += 1
        items: list[Word] = []
        while not self.at_end:
            self._skip_blank()
            if self.text.startswith(")", self.place):
                self.place += 1
                return tuple(items)
            if self.text.startswith("#", self.place):
                self.place = self._until("\n")
            elif self.text.startswith("\n", self.place):
                self.place += 1
            elif not self.at_end:
                items.append(self._word())
        raise self._never_closed("(", start)

    def piece(self, parts: list[Part], *, quoted: bool) -> None:
        """Read one piece of a word onto `parts`."""
        letter = self.text[self.place]
        if letter == "\\":
            self._escaped(parts, quoted=quoted)
        elif letter == "'" and not quoted:
            parts.append(Part(Kind.TEXT, self._to_quote("'"), quoted=True))
        elif letter == '"':
            self._double_quoted(parts)
        elif letter == "`":
            parts.append(Part(Kind.COMMAND, self._to_quote("`"), quoted))
        elif letter == "$" or (letter in "<>" and self.text.startswith("(", self.place + 1)):
            self._filled_in(parts, quoted=quoted)
        else:
            found = (PLAIN_QUOTED if quoted else PLAIN).match(self.text, self.place)
            end = found.end() if found else self.place + 1
            parts.append(Part(Kind.TEXT, self.text[self.place : end], quoted))
            self.place = end

    def _escaped(self, parts: list[Part], *, quoted: bool) -> None:
        letter = self.text[self.place + 1 : self.place + 2]
        self.place += 2
        if letter == "\n":
            return
        kept = "\\" if quoted and letter not in '$`"\\' else ""
        parts.append(Part(Kind.TEXT, f"{kept}{letter}", quoted=True))

    def _to_quote(self, quote: str) -> str:
        line, start = self.line(), self.place + 1
        end = self.text.find(quote, start)
        if end < 0:
            raise self._never_closed(quote, line)
        self.place = end + 1
        return self.text[start:end]

    def _double_quoted(self, parts: list[Part]) -> None:
        line = self.line()
        self.place += 1
        parts.append(Part(Kind.TEXT, "", quoted=True))
        while not self.at_end:
            if self.text[self.place] == '"':
                self.place += 1
                return
            self.piece(parts, quoted=True)
        raise self._never_closed('"', line)

    def _filled_in(self, parts: list[Part], *, quoted: bool) -> None:
        """`$X`, `${X…}`, `$((…))`, `$(…)`, `$'…'`, `<(…)`, or a dollar that stands for itself."""
        rest = self.text[self.place + 1 : self.place + 2]
        if self.text.startswith("$((", self.place):
            inside, kind = self._inside(2, "$(")[1:-1], Kind.ARITHMETIC
        elif rest == "(":
            inside, kind = self._inside(2, "$("), Kind.COMMAND
        elif rest == "{":
            inside, kind = self._inside(2, "${"), Kind.VARIABLE
        elif rest == "'" and not quoted:
            self.place += 1
            inside, kind, quoted = self._to_quote("'").replace("\\n", "\n").replace("\\t", "\t"), Kind.TEXT, True
        elif found := re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]").match(self.text, self.place + 1):
            self.place = found.end()
            inside, kind = found.group(), Kind.VARIABLE
        else:
            self.place += 1
            inside, kind = "$", Kind.TEXT
        parts.append(Part(kind, inside, quoted))

    def _inside(self, length: int, bracket: str) -> str:
        start = self.place + length
        end = self._closed(start, bracket)
        self.place = end + 1
        return self.text[start:end]

    def _closed(self, place: int, bracket: str) -> int:
        """Where the bracket closes whose inside begins at `place`; quotes and brackets in it are passed."""
        line, open_ones = self.line(), [CLOSING[bracket]]
        while place < len(self.text):
            letter, inner = self.text[place], open_ones[-1]
            if letter == inner:
                open_ones.pop()
                if not open_ones:
                    return place
            elif letter == "\\":
                place += 1
            elif letter == "'" and inner != '"' and '"' not in open_ones:
                place = max(self.text.find("'", place + 1), place)
            elif self.text[place : place + 2] in ("${", "$("):
                open_ones.append(CLOSING[self.text[place : place + 2]])
                place += 1
            elif letter == '"' or (letter == "(" and inner == ")"):
                open_ones.append(CLOSING[letter])
            place += 1
        raise self._never_closed(bracket, line)

    def _never_closed(self, mark: str, line: int) -> ConfigError:
        source = f"{self.name}:{line}"
        return ConfigError(f"{source}: the {mark} that begins here is never closed", source=source, hint="close it")
