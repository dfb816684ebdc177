"""What the words of a shell script come to: variables, defaults, arithmetic. Nothing is run.

What only a shell could tell stays open: a mark in the text stands for it, and says why when somebody asks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from quintet.config.dialects.scripts.shell import Kind, Part, Word, commands, parts_of

__all__ = ["Field", "Open", "Shell", "evaluate"]

MARK = re.compile("\ue000(\\d+)\ue001")
HELD = {ord(" "): 0xE002, ord("\t"): 0xE003, ord("\n"): 0xE004}
"""Blanks that stand in quotes within `${X:-"…"}`, where others part words."""
DEEPEST = 24
"""`${A:-${B:-…}}` and `$($(…))` inside each other."""
LONGEST, MOST_ITEMS = 1 << 16, 4096
"""Letters of a value, and words of an array."""
BODY = re.compile(r"(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?P<index>\[[^\]]*\])?(?P<rest>.*)", re.DOTALL)
OPERATION = re.compile(r":?[-=+?]|##?|%%?|//?|\^\^?|,,?|:", re.DOTALL)
SHELL_ONLY = {"RANDOM", "SECONDS", "LINENO", "HOSTNAME", "?", "$", "!", "-", "PPID", "EPOCHSECONDS"}


@dataclass(frozen=True, slots=True)
class Field:
    """A word as a program is given it."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Open:
    """Something in a word that reading the script can't tell."""

    what: str
    """As it stands in the script: `$NOW`."""
    why: str
    line: int

    def __str__(self) -> str:
        return f"{self.what} {self.why}"


@dataclass(slots=True)
class Shell:
    """The variables of a script on the way through it."""

    path: Path
    environment: Mapping[str, str]
    variables: dict[str, str | tuple[str, ...] | None] = field(default_factory=dict)
    """Text, the words of an array, or None for one that was taken away."""
    left_open: list[Open] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)
    """Variables that programs are given as well."""
    depth: int = 0

    def mark(self, what: str, why: str, line: int) -> str:
        """A text that stands for something unknown."""
        self.left_open.append(Open(what, why, line))
        return f"\ue000{len(self.left_open) - 1}\ue001"

    def open_in(self, text: str) -> Open | None:
        """The first thing in a text that isn't known."""
        found = MARK.search(text)
        return self.left_open[int(found.group(1))] if found else None

    def assign(self, name: str, value: str | tuple[str, ...], line: int, *, more: bool) -> None:
        """`NAME=value`, or `NAME+=value`."""
        before = self.variables.get(name)
        if more and isinstance(value, tuple):
            value = (*(before if isinstance(before, tuple) else (before,) if before else ()), *value)
        elif more and isinstance(before, str) and isinstance(value, str):
            value = f"{before}{value}"
        if len(value) > LONGEST or (isinstance(value, tuple) and len(value) > MOST_ITEMS):
            value = self.mark(f"${name}", "is too long to be anybody's configuration", line)
        self.variables[name] = value

    def text(self, word: Word) -> str:
        """A word as one text, as an assignment takes it."""
        return _let_go("".join(text for text, _ in self._pieces(word.parts, word.line, whole=False)))

    def fields(self, word: Word) -> list[Field]:
        """A word as programs are given it: filled in, and split at blanks where it isn't quoted."""
        if (items := self._all_items(word)) is not None:
            quoted = any(part.quoted for part in word.parts)
            split = items if quoted else [text for item in items for text in item.split()]
            return [Field(text, word.line) for text in split]
        fields: list[str] = []
        current: str | None = None
        whole = sum(part.kind is not Kind.TEXT or part.text != "" for part in word.parts) == 1
        for text, splits in self._pieces(word.parts, word.line, whole=whole):
            if not splits:
                current = f"{current or ''}{text}"
                continue
            first, *others = re.split(r"[ \t\n]+", text)
            current = f"{current or ''}{first}" if first else current
            for other in others:
                fields += [] if current is None else [current]
                current = other or None
        fields += [] if current is None else [current]
        return [Field(_let_go(text), word.line) for text in fields]

    def items(self, words: tuple[Word, ...]) -> tuple[str, ...]:
        """The words of an array."""
        return tuple(one.text for word in words for one in self.fields(word))

    def _all_items(self, word: Word) -> tuple[str, ...] | None:
        """The words that `"${NAME[@]}"` or `"$@"` stands for."""
        parts = [part for part in word.parts if part.text or part.kind is not Kind.TEXT]
        found = BODY.fullmatch(parts[0].text) if len(parts) == 1 and parts[0].kind is Kind.VARIABLE else None
        if found is None:
            return None
        if found["name"] in ("@", "*"):
            return ()  # the words that the script was called with: here they stand on the command line
        value = self.variables.get(found["name"])
        if found["index"] in ("[@]", "[*]") and not found["rest"]:
            return value if isinstance(value, tuple) else (value,) if value else ()
        return None

    def _pieces(self, parts: tuple[Part, ...], line: int, *, whole: bool) -> Iterator[tuple[str, bool]]:
        """Each part's text, and whether blanks in it part words."""
        before, length = "", 0
        for part in parts:
            text = self._part(part, line, whole=whole)
            length += len(text)
            if length > LONGEST:
                yield self.mark("a word", "is too long to be anybody's configuration", line), False
                return
            if part.text == "~" and not part.quoted and before in ("", "=", ":"):
                text = self.environment.get("HOME", "~")
            yield text, part.kind is not Kind.TEXT and not part.quoted
            before = part.text[-1:] if part.kind is Kind.TEXT else "$"

    def _part(self, part: Part, line: int, *, whole: bool) -> str:
        if part.kind is Kind.TEXT:
            return part.text
        if self.depth >= DEEPEST:
            return self.mark(f"${part.text[:20]}…", "is nested too deeply to be read", line)
        self.depth += 1
        try:
            if part.kind is Kind.VARIABLE:
                return self._variable(part, line, whole=whole)
            return self._arithmetic(part.text, line) if part.kind is Kind.ARITHMETIC else self._command(part.text, line)
        finally:
            self.depth -= 1

    def _variable(self, part: Part, line: int, *, whole: bool) -> str:
        """The value of `$NAME` or `${NAME…}`. One that is set nowhere is empty where it is a whole word, else open."""
        found = BODY.fullmatch(part.text)
        operation = OPERATION.match(found["rest"]) if found else None
        if found is None or (found["rest"] and operation is None) or found["name"] in SHELL_ONLY:
            return self.mark(f"${{{part.text}}}", "is something that only a shell knows", line)
        name, value = found["name"], self.value(found["name"], found["index"])
        if operation is not None:
            argument = Part(Kind.TEXT, found["rest"][operation.end() :], part.quoted)
            return self._operated(name, value, operation.group(), argument, line)
        if value is None and not whole:
            why = "is set neither in the script nor in the environment"
            why = "is given when the script is called" if name.isdigit() else why
            return self.mark(f"${name}", why, line)
        return value or ""

    def value(self, name: str, index: str | None = None) -> str | None:
        """What a variable holds; None where it is set nowhere."""
        value: str | tuple[str, ...] | None
        if name in ("0", "BASH_SOURCE"):
            return str(self.path)
        if name in ("@", "*", "#"):
            return "0" if name == "#" else ""
        value = self.variables[name] if name in self.variables else self.environment.get(name)
        if isinstance(value, tuple):
            place = (index or "[0]")[1:-1]
            return " ".join(value) if place in ("@", "*") else _item(value, place)
        return value

    def _operated(self, name: str, value: str | None, operation: str, argument: Part, line: int) -> str:
        """`${NAME:-default}` and its like. What follows from something open is open itself."""
        if operation in ("-", ":-", "=", ":=", "?", ":?", "+", ":+"):
            return self._or_else(name, value, operation, argument, line)
        if value is None or name in ("@", "*"):
            return "" if name in ("@", "*") else self.mark(f"${name}", "is set nowhere", line)
        if MARK.search(value):
            return value
        text = _let_go(self._argument(argument, line))
        if MARK.search(text):
            return text
        changed = _changed(value, operation, text)
        return changed if changed is not None else self.mark(f"${{{name}{operation}{text}}}", "isn't understood", line)

    def _or_else(self, name: str, value: str | None, operation: str, argument: Part, line: int) -> str:
        missing = value is None or (operation[0] == ":" and value == "")
        if MARK.search(value or ""):
            return value or ""
        if operation[-1] == "+":
            return "" if missing else self._argument(argument, line)
        if not missing:
            return value or ""
        if operation[-1] == "?":
            return self.mark(f"${name}", "is set neither in the script nor in the environment", line)
        text = self._argument(argument, line)
        if (unknown := self.open_in(text)) is not None:
            text = self.mark(f"${name}", f"isn't set in the environment, and its default {unknown}", line)
        if operation[-1] == "=":
            self.variables[name] = _let_go(text)
        return text

    def _argument(self, argument: Part, line: int) -> str:
        parts = parts_of(argument.text, str(self.path), line, quoted=argument.quoted)
        texts = [text for text, _ in self._pieces(parts, line, whole=False)]
        return "".join(
            text.translate(HELD) if part.quoted and not argument.quoted else text
            for part, text in zip(parts, texts, strict=False)
        )

    def _arithmetic(self, text: str, line: int) -> str:
        filled = _let_go(self._argument(Part(Kind.TEXT, text, quoted=True), line))
        if MARK.search(filled):
            return filled

        def look_up(name: str) -> str:
            return self.value(name) or "0"

        for name in re.findall(r"[A-Za-z_]\w*", filled):
            if MARK.search(look_up(name)):
                return look_up(name)
        result = evaluate(filled, look_up)
        shown = " ".join(text.split())
        return self.mark(f"$(({shown}))", "isn't whole-number arithmetic", line) if result is None else str(result)

    def _command(self, text: str, line: int) -> str:
        """What commands say whose answer is known without running them: `dirname`, `basename`, `cd … && pwd`."""
        found = list(commands(text, str(self.path), line))
        given = [[one.text for word in command.words for one in self.fields(word)] for command in found]
        here = self.value("PWD") or "."
        answer = _answered(given, Path(here))
        shown = " ".join(text.split())
        shown = shown if len(shown) <= 40 else f"{shown[:39]}…"
        if answer is None or MARK.search(answer):
            return self.mark(f"$({shown})", "is what a program says, and none is run here", line)
        return answer


def _let_go(text: str) -> str:
    return text.translate({held: blank for blank, held in HELD.items()})


def _item(items: tuple[str, ...], index: str) -> str | None:
    return items[int(index)] if index.isdigit() and int(index[:6]) < len(items) else None


def _changed(value: str, operation: str, text: str) -> str | None:
    """`${NAME%pattern}`, `${NAME/old/new}`, `${NAME,,}`, `${NAME:from:length}`."""
    if operation in ("#", "##", "%", "%%"):
        return _without(value, operation, text)
    if operation in ("/", "//"):
        old, _, new = text.partition("/")
        plain = old and not re.search(r"[*?\[]", old) and len(value) * max(len(new), 1) <= LONGEST
        return value.replace(old, new, -1 if operation == "//" else 1) if plain else None
    if operation[0] in "^,":
        change: Callable[[str], str] = str.upper if operation[0] == "^" else str.lower
        return None if text else change(value) if len(operation) == 2 else change(value[:1]) + value[1:]
    numbers = re.fullmatch(r"\s*(\d{1,6})(?::(\d{1,6}))?", text)
    if numbers is None:
        return None
    begin = int(numbers[1])
    return value[begin : begin + int(numbers[2])] if numbers[2] else value[begin:]


def _without(value: str, operation: str, pattern: str) -> str | None:
    """Without the shortest or longest beginning or end that fits the pattern."""
    if len(value) > 4096 or len(pattern) > 256 or pattern.count("*") > 4:
        return None
    lengths = range(len(value) + 1)
    for length in lengths if len(operation) == 1 else reversed(lengths):
        cut = value[:length] if operation[0] == "#" else value[len(value) - length :]
        if fnmatchcase(cut, pattern):
            return value[length:] if operation[0] == "#" else value[: len(value) - length]
    return value


def _answered(given: list[list[str]], here: Path) -> str | None:
    """What commands print that only speak of paths, or change a text on its way through a pipe."""
    if len(given) > 1 and given[0][:1] == ["echo"]:
        text: str | None = " ".join(given[0][1:])
        for words in given[1:]:
            text = None if text is None or MARK.search(text) else _filtered(text, words)
        return text
    match given:
        case [["pwd"]]:
            return str(here)
        case [["cd", "--", folder] | ["cd", folder], ["pwd", *_]] if not MARK.search(folder):
            return os.path.normpath(here / folder)
        case [["dirname", "--", path] | ["dirname", path]]:
            return os.path.dirname(path) or "."
        case [["basename", "--", path, *suffix] | ["basename", path, *suffix]] if len(suffix) < 2:
            name = os.path.basename(path.rstrip("/"))
            return name.removesuffix(suffix[0]) if suffix and name != suffix[0] else name
        case [["realpath" | "readlink", *_, path]] if not path.startswith("-"):
            return os.path.normpath(here / path)
        case [["echo", *words]] if not words or not words[0].startswith("-"):
            return " ".join(words)
    return None


def _filtered(text: str, words: list[str]) -> str | None:
    """What `rev`, `cut` and `tr` make of a text."""
    match words:
        case ["rev"]:
            return text[::-1]
        case ["tr", old, new] if len(old) == len(new) == 1:
            return text.replace(old, new)
        case ["cut", *options]:
            found = re.fullmatch(r"-d(.)-f(\d{1,4})(-?)(\d{0,4})", "".join(options))
            if found is None or (found[4] and not found[3]):
                return None
            parts, first = text.split(found[1]), int(found[2])
            last = (int(found[4]) if found[4] else len(parts)) if found[3] else first
            return found[1].join(parts[max(first - 1, 0) : last])
    return None


def evaluate(text: str, look_up: Callable[[str], str]) -> int | None:
    """Whole-number arithmetic as shells do it: + - * / % and brackets; division cuts towards 0. None where the
    text is anything else, or a number doesn't fit 64 bits."""
    tokens = re.findall(r"\d+|[A-Za-z_]\w*|[-+*/%()]|\S", text)
    if len(tokens) > 999 or text.count("(") > DEEPEST:
        return None
    try:
        value = _sum(tokens, look_up)
    except (ValueError, ZeroDivisionError, IndexError):
        return None
    return value if not tokens else None


def _sum(tokens: list[str], look_up: Callable[[str], str]) -> int:
    """Takes what it reads off the front of `tokens`."""
    value = _product(tokens, look_up)
    while tokens and tokens[0] in "+-":
        sign = 1 if tokens.pop(0) == "+" else -1
        value = _fits(value + sign * _product(tokens, look_up))
    return value


def _product(tokens: list[str], look_up: Callable[[str], str]) -> int:
    value = _factor(tokens, look_up)
    while tokens and tokens[0] in "*/%":
        operator, other = tokens.pop(0), _factor(tokens, look_up)
        quotient = 0 if operator == "*" else abs(value) // abs(other) * (1 if (value < 0) == (other < 0) else -1)
        value = _fits({"*": value * other, "/": quotient}.get(operator, value - quotient * other))
    return value


def _factor(tokens: list[str], look_up: Callable[[str], str]) -> int:
    signs = 0
    while tokens[0] in "+-":
        signs += tokens.pop(0) == "-"
    word = tokens.pop(0)
    if word == "(":
        value = _sum(tokens, look_up)
        if tokens.pop(0) != ")":
            raise ValueError(word)
    else:
        digits = word if word[0].isdigit() else look_up(word).strip()
        if not re.fullmatch(r"-?(0|[1-9]\d{0,18})", digits):
            raise ValueError(digits)
        value = int(digits)
    return -value if signs % 2 else value


def _fits(value: int) -> int:
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(value)
    return value
