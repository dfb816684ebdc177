"""Expansion of shell words without running anything: parameters, defaults, arithmetic, and commands on paths.

A value that only a shell can know is represented by a marker in the text, which refers to an `UnknownValue`.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quintet.config.dialects.scripts.shell_parser import Part, PartKind, Word, parse_commands, parse_parts

MARKER = re.compile("\ue000(\\d+)\ue001")
MAX_DEPTH = 24
"""Nesting of `${A:-${B:-…}}` and `$(…)`."""
MAX_CHARACTERS, MAX_ITEMS = 1 << 16, 4096
"""Characters of a value, and words of an array."""
PARAMETER = re.compile(r"(?P<name>[A-Za-z_]\w*|\d+|[@*#])(?P<index>\[[^\]]*\])?(?P<rest>.*)", re.DOTALL)
OPERATOR = re.compile(r":?[-=+?]|//?|\^\^|,,")
SHELL_ONLY = {"RANDOM", "SECONDS", "LINENO", "HOSTNAME", "PPID", "EPOCHSECONDS"}
NOT_SET = "is set neither in the script nor in the environment"


@dataclass(frozen=True, slots=True)
class Field:
    """A word after expansion, as a program receives it."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class UnknownValue:
    """A construct whose value the script alone does not determine."""

    construct: str
    """Its text in the script: `$NOW`."""
    reason: str
    line: int

    def __str__(self) -> str:
        return f"{self.construct} {self.reason}"


@dataclass(slots=True)
class Shell:
    """The variables of a script at one point."""

    path: Path
    environment: Mapping[str, str]
    variables: dict[str, str | tuple[str, ...] | None] = field(default_factory=dict)
    """Text, the words of an array, or None for an unset variable."""
    unknown_values: list[UnknownValue] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)
    depth: int = 0

    def unknown(self, construct: str, reason: str, line: int) -> str:
        """Return a marker for an unknown value."""
        self.unknown_values.append(UnknownValue(construct, reason, line))
        return f"\ue000{len(self.unknown_values) - 1}\ue001"

    def find_unknown(self, text: str) -> UnknownValue | None:
        """Return the first unknown value in a text."""
        matched = MARKER.search(text)
        return self.unknown_values[int(matched.group(1))] if matched else None

    def assign(self, name: str, value: str | tuple[str, ...], line: int, *, append: bool = False) -> None:
        """Set a variable, or append to it: `NAME=value`, `NAME+=value`."""
        before = self.variables.get(name)
        if append and isinstance(value, tuple):
            value = (*(before if isinstance(before, tuple) else (before,) if before else ()), *value)
        elif append and isinstance(before, str) and isinstance(value, str):
            value = f"{before}{value}"
        if len(value) > MAX_CHARACTERS or (isinstance(value, tuple) and len(value) > MAX_ITEMS):
            value = self.unknown(f"${name}", "is too long", line)
        self.variables[name] = value

    def text(self, word: Word) -> str:
        """Expand a word without splitting it, as an assignment does."""
        return "".join(text for text, _ in self._expand(word.parts, word.line))

    def fields(self, word: Word) -> list[Field]:
        """Expand a word and split it at unquoted blanks, as for a program."""
        if (items := self._array(word)) is not None:
            quoted = any(part.quoted for part in word.parts)
            texts = items if quoted else [text for item in items for text in item.split()]
            return [Field(text, word.line) for text in texts]
        fields: list[str] = []
        current: str | None = None
        parts = [part for part in word.parts if part.text or part.kind is not PartKind.TEXT]
        for text, splits in self._expand(word.parts, word.line, only_part=len(parts) == 1):
            first, *others = re.split(r"[ \t\n]+", text) if splits else [text]
            current = f"{current or ''}{first}" if first or not splits else current
            for other in others:
                fields += [] if current is None else [current]
                current = other or None
        fields += [] if current is None else [current]
        return [Field(text, word.line) for text in fields]

    def items(self, words: tuple[Word, ...]) -> tuple[str, ...]:
        """Expand the words of an array."""
        return tuple(item.text for word in words for item in self.fields(word))

    def value(self, name: str, index: str | None = None) -> str | None:
        """Return the value of a variable; None if it is not set."""
        if name in ("0", "BASH_SOURCE"):
            return str(self.path)
        if name in ("@", "*", "#"):
            return "0" if name == "#" else ""
        value = self.variables[name] if name in self.variables else self.environment.get(name)
        if not isinstance(value, tuple):
            return value
        position = (index or "[0]")[1:-1]
        if position in ("@", "*"):
            return " ".join(value)
        return value[int(position)] if position.isdigit() and int(position[:6]) < len(value) else None

    def _array(self, word: Word) -> tuple[str, ...] | None:
        """Return the words of `"${NAME[@]}"` or `"$@"`; None for other words."""
        parts = [part for part in word.parts if part.text or part.kind is not PartKind.TEXT]
        is_parameter = len(parts) == 1 and parts[0].kind is PartKind.PARAMETER
        matched = PARAMETER.fullmatch(parts[0].text) if is_parameter else None
        if matched is None:
            return None
        if matched["name"] in ("@", "*"):
            return ()  # arguments of the script; here they are on Quintet's command line
        value = self.variables.get(matched["name"])
        if matched["index"] in ("[@]", "[*]") and not matched["rest"]:
            return value if isinstance(value, tuple) else (value,) if value else ()
        return None

    def _expand(self, parts: tuple[Part, ...], line: int, *, only_part: bool = False) -> Iterator[tuple[str, bool]]:
        """Yield the text of each part, and whether it is split at blanks."""
        before, length = "", 0
        for part in parts:
            text = self._expand_part(part, line, only_part=only_part)
            length += len(text)
            if length > MAX_CHARACTERS:
                yield self.unknown("a word", "is too long", line), False
                return
            if part.text == "~" and not part.quoted and before in ("", "=", ":"):
                text = self.environment.get("HOME", "~")
            # a default in quotes, as in ${X:-"a b"}, stays one word
            yield text, part.kind is not PartKind.TEXT and not part.quoted and '"' not in part.text
            before = part.text[-1:] if part.kind is PartKind.TEXT else "$"

    def _expand_part(self, part: Part, line: int, *, only_part: bool) -> str:
        if part.kind is PartKind.TEXT:
            return part.text
        if self.depth >= MAX_DEPTH:
            return self.unknown(f"${part.text[:20]}…", "is nested too deeply", line)
        self.depth += 1
        try:
            if part.kind is PartKind.PARAMETER:
                return self._parameter(part, line, only_part=only_part)
            return self._arithmetic(part.text, line) if part.kind is PartKind.ARITHMETIC else self._command(part, line)
        finally:
            self.depth -= 1

    def _parameter(self, part: Part, line: int, *, only_part: bool) -> str:
        """Expand `$NAME` or `${NAME…}`. An unset variable is empty if it is the entire word, and unknown otherwise."""
        matched = PARAMETER.fullmatch(part.text)
        operation = OPERATOR.match(matched["rest"]) if matched else None
        if matched is None or (matched["rest"] and operation is None) or matched["name"] in SHELL_ONLY:
            return self.unknown(f"${{{part.text}}}", "can only be evaluated by a shell", line)
        name, value = matched["name"], self.value(matched["name"], matched["index"])
        if operation is not None:
            argument = Part(PartKind.TEXT, matched["rest"][operation.end() :], part.quoted)
            if operation.group()[-1] in "-=+?":
                return self._or_default(name, value, operation.group(), argument, line)
            return self._transform(name, value, operation.group(), argument, line)
        if value is None and not only_part:
            return self.unknown(f"${name}", "is given when the script is called" if name.isdigit() else NOT_SET, line)
        return value or ""

    def _or_default(self, name: str, value: str | None, operation: str, argument: Part, line: int) -> str:
        """Expand `${NAME:-default}`, `${NAME:=default}`, `${NAME:+alternative}` and `${NAME:?message}`."""
        missing = value is None or (operation[0] == ":" and value == "")
        if MARKER.search(value or ""):
            return value or ""
        if operation[-1] == "+":
            return "" if missing else self._argument(argument, line)
        if not missing:
            return value or ""
        if operation[-1] == "?":
            return self.unknown(f"${name}", NOT_SET, line)
        text = self._argument(argument, line)
        if (unknown := self.find_unknown(text)) is not None:
            text = self.unknown(f"${name}", f"is not set in the environment, and its default {unknown}", line)
        if operation[-1] == "=":
            self.variables[name] = text
        return text

    def _transform(self, name: str, value: str | None, operation: str, argument: Part, line: int) -> str:
        """Expand `${NAME/old/new}`, `${NAME//old/new}`, `${NAME,,}` and `${NAME^^}`."""
        if value is None or name in ("@", "*"):
            return "" if name in ("@", "*") else self.unknown(f"${name}", NOT_SET, line)
        text = self._argument(argument, line)
        if MARKER.search(value) or MARKER.search(text):
            return value if MARKER.search(value) else text
        if operation in ("^^", ",,") and not text:
            return value.upper() if operation == "^^" else value.lower()
        old, _, new = text.partition("/")
        if operation[0] != "/" or not old or re.search(r"[*?\[]", old) or len(value) * len(new) > MAX_CHARACTERS:
            return self.unknown(f"${{{name}{operation}{text}}}", "is not supported", line)
        return value.replace(old, new, -1 if operation == "//" else 1)

    def _argument(self, argument: Part, line: int) -> str:
        parts = parse_parts(argument.text, str(self.path), line, quoted=argument.quoted)
        return "".join(text for text, _ in self._expand(parts, line))

    def _arithmetic(self, text: str, line: int) -> str:
        expression = self._argument(Part(PartKind.TEXT, text, quoted=True), line)
        for name in re.findall(r"[A-Za-z_]\w*", expression):
            if MARKER.search(self.value(name) or ""):
                return self.value(name) or ""
        if MARKER.search(expression):
            return expression
        result = evaluate(expression, lambda name: self.value(name) or "0")
        shown = " ".join(text.split())
        return str(result) if result is not None else self.unknown(f"$(({shown}))", "is not integer arithmetic", line)

    def _command(self, part: Part, line: int) -> str:
        """Return the output of commands on paths and of `echo`; the output of others is unknown."""
        commands = list(parse_commands(part.text, str(self.path), line))
        words = [[item.text for word in command.words for item in self.fields(word)] for command in commands]
        output = _output(words, Path(self.value("PWD") or "."))
        if output is None or MARKER.search(output):
            shown = " ".join(part.text.split())
            shown = shown if len(shown) <= 40 else f"{shown[:39]}…"
            return self.unknown(f"$({shown})", "is the output of a program, and none is run here", line)
        return output


def _output(commands: list[list[str]], directory: Path) -> str | None:
    match commands:
        case [["pwd"]]:
            return str(directory)
        case [["cd", "--", path] | ["cd", path], ["pwd", *_]] if not MARKER.search(path):
            return os.path.normpath(directory / path)
        case [["dirname", "--", path] | ["dirname", path]]:
            return os.path.dirname(path) or "."
        case [["basename", "--", path, *suffix] | ["basename", path, *suffix]] if len(suffix) < 2:
            name = os.path.basename(path.rstrip("/"))
            return name.removesuffix(suffix[0]) if suffix and name != suffix[0] else name
        case [["realpath" | "readlink", *_, path]] if not path.startswith("-"):
            return os.path.normpath(directory / path)
        case [["echo", *words]] if not words or not words[0].startswith("-"):
            return " ".join(words)
    return None


def evaluate(text: str, look_up: Callable[[str], str]) -> int | None:
    """Return the value of integer arithmetic (`+ - * / %` and parentheses); None if the text is anything else.

    As in a shell, division truncates towards 0. Values that do not fit 64 bits are refused.
    """
    if len(text) > 999 or text.count("(") > MAX_DEPTH:
        return None
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body, look_up)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: _truncated_quotient(left, right),
    ast.Mod: lambda left, right: left - _truncated_quotient(left, right) * right,
}


def _truncated_quotient(left: int, right: int) -> int:
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


def _evaluate(node: ast.expr, look_up: Callable[[str], str]) -> int:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            pass
        case ast.Name(id=name) if re.fullmatch(r"-?(0|[1-9]\d{0,18})", look_up(name).strip()):
            value = int(look_up(name))
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = _evaluate(operand, look_up) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            value = _OPERATIONS[type(operation)](_evaluate(left, look_up), _evaluate(right, look_up))
        case _:
            raise ValueError(ast.dump(node))
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(value)
    return value
