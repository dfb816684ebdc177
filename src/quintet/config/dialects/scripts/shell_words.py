"""Reader of the words of a shell script, which expands them and runs nothing.

A value that only a shell can know is represented by a marker in the text, which refers to an `UnknownValue`.
"""

from __future__ import annotations

import ast
import operator
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quintet.config.dialects.scripts.command_output import command_output
from quintet.errors import ConfigError

MARKER = re.compile("\ue000(\\d+)\ue001")
ITEM_SEPARATOR = "\ue003"
"""Separates the words of an array, also in quotes."""
PROTECTED = str.maketrans(" \t\n", "\ue004\ue005\ue006")
"""Blanks at which a quoted text is not split."""
UNPROTECTED = str.maketrans("\ue003\ue004\ue005\ue006", "  \t\n")
MAX_LENGTH = 1 << 16
"""Characters of a word, and words of an array."""
PROMPTED = "is read while the script runs"
"""Of these, `${NAME:-default}` is the default, as after an empty reply."""
CALL_ARGUMENT = "is given where the script or the function is called"
NOT_SET = "is set neither in the script nor in the environment"
SHELL_VARIABLES = ("RANDOM", "SECONDS", "LINENO")
"""Variables that only a shell sets."""
UNSUPPORTED = "can only be evaluated by a shell"

OPERATORS = ("&&", "||", "|&", "|", "&")
REDIRECTION = re.compile(r"\d*(?P<operator><<<|<<-?|&>>?|>>|>&|<&|>\||[<>](?!\())")
BLANKS = re.compile(r"(?:[ \t]|\\\n)*")
BETWEEN_COMMANDS = re.compile(r"(?:[ \t]|;(?!;)|\\\n|#.*)*")
COMMAND_END = re.compile(r"[\n;&|()#]|\Z")
WORD_END = re.compile(r"[ \t\n;&|()]|[<>](?!\()|\Z")
LITERAL = re.compile(r"""[^\s;&|()<>\\'"`$~}]+|.""", re.DOTALL)
QUOTED_LITERAL = re.compile(r"""[^\\"`$()}]+|.""", re.DOTALL)
SINGLE_QUOTED = re.compile(r"'([^']*)'")
ESCAPE = re.compile(r"\\(.?)", re.DOTALL)
TILDE = re.compile(r"(?<![^\s=:(-])~(?![\w+-])")
ARRAY_ASSIGNMENT = re.compile(r"\w+\+?=\(")
SCRIPT_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*][^}]*\}")
PARAMETER = re.compile(r"\$([A-Za-z_]\w*|[0-9#])")
BRACED_PARAMETER = re.compile(
    r"\$\{(?P<name>[A-Za-z_]\w*|\d+|#)?(?P<index>\[(?:[@*]|\d+)\])?(?P<operator>:?[-+?]|//|,,)?"
)
ONLY_PARAMETER = re.compile(r'"?\$\{?(?P<name>\w+)\}?"?')
UNSUPPORTED_EXPANSION = re.compile(r"\$(?:[?$!-]|'[^'\"]*')|`[^`]*`")
INTEGER = re.compile(r"\d{1,18}")


@dataclass(frozen=True, slots=True)
class UnknownValue:
    """A construct whose value the script alone does not determine."""

    construct: str
    """Its text in the script: `$NOW`."""
    reason: str
    line: int

    def __str__(self) -> str:
        return f"{self.construct} {self.reason}"


def script_error(source: str, message: str, hint: str, value: str | None = None) -> ConfigError:
    """Return an error in a script; `source` is its `FILE:LINE`."""
    return ConfigError(f"{source}: {message}", value=value, source=source, hint=hint)


class Variables:
    """The variables of a script at one point."""

    def __init__(
        self, path: Path, environment: Mapping[str, str], unknown_values: list[UnknownValue] | None = None
    ) -> None:
        self.path = path
        self.values: dict[str, tuple[str, ...]] = {name: (value,) for name, value in environment.items()}
        """The words of arrays; other values are arrays of one word, and unset variables of none."""
        self.values |= {"0": (str(path),), "BASH_SOURCE": (str(path),), "#": ("0",)}
        self.exported: set[str] = set()
        self.unknown_values: list[UnknownValue] = []

    def scalar(self, name: str) -> str | None:
        """Return the value of a variable, or the first word of an array; None if it is not set."""
        return next(iter(self.values.get(name, ())), None)

    def assign(self, name: str, values: tuple[str, ...], line: int) -> None:
        """Set a variable."""
        too_long = len(values) > MAX_LENGTH or any(len(value) > MAX_LENGTH for value in values)
        self.values[name] = (self.unknown(f"${name}", "is too long", line),) if too_long else values

    def unknown(self, construct: str, reason: str, line: int) -> str:
        """Return a marker for an unknown value."""
        self.unknown_values.append(UnknownValue(construct, reason, line))
        return f"\ue000{len(self.unknown_values) - 1}\ue001"

    def find_unknown(self, text: str) -> UnknownValue | None:
        """Return the first unknown value in a text."""
        matched = MARKER.search(text)
        return self.unknown_values[int(matched[1])] if matched else None

    def known_exports(self) -> dict[str, str]:
        """Return the exported variables whose values are known."""
        values = {name: self.scalar(name) for name in self.exported}
        return {name: value for name, value in values.items() if value is not None and not MARKER.search(value)}


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command."""

    source: str
    """The word in the script."""
    line: int
    expansion: str
    """The word after expansion, with quoted blanks protected."""
    items: tuple[str, ...] | None = None
    """The words in the parentheses of `NAME=(…)`."""
    is_unset: bool = False
    """Whether it is only a parameter that is not set: no argument for a program."""

    @property
    def text(self) -> str:
        """The word after expansion, as in an assignment."""
        return self.expansion.translate(UNPROTECTED)

    @property
    def fields(self) -> list[str]:
        """The word after expansion, split at unquoted blanks as for a program; without empty fields."""
        fields = [] if self.is_unset else re.split(f"[ \t\n{ITEM_SEPARATOR}]+", self.expansion)
        return [field.translate(UNPROTECTED) for field in fields if field]


class WordReader:
    """Reads and expands words from a position in a script."""

    def __init__(self, text: str, variables: Variables, first_line: int = 1) -> None:
        self.text, self.variables, self.first_line = text.replace("\r\n", "\n"), variables, first_line
        self.line_breaks = [matched.start() for matched in re.finditer("\n", self.text)]
        self.position = 0
        self.here_documents: list[str] = []
        self.ended_by = ""
        """What ended the last list of commands or words, such as `else`."""

    @property
    def line(self) -> int:
        """The line of the position."""
        return self.first_line + bisect_left(self.line_breaks, self.position)

    @property
    def at_end(self) -> bool:
        """Whether the script ends at the position."""
        return self.position == len(self.text)

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

    def _not_closed(self, opening: str, line: int) -> ConfigError:
        return self.error(f"the {opening} that begins here is never closed", "close it", line)

    def skip_lines(self) -> None:
        """Skip blanks, comments, line breaks, and the here-documents after them."""
        self.match(BETWEEN_COMMANDS)
        while self.take("\n"):
            for end in self.here_documents:
                matched = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self.text, self.position)
                self.position = matched.end() if matched else len(self.text)
            self.here_documents.clear()
            self.match(BETWEEN_COMMANDS)

    def lines_until(self, opening: str, *ends: str) -> Iterator[None]:
        """Yield at each command or word up to one of `ends`; without an `opening`, up to the end of the script."""
        line = self.line
        while True:
            self.skip_lines()
            self.ended_by = self.take(*ends)
            if self.ended_by or (self.at_end and not opening):
                return
            if self.at_end:
                raise self._not_closed(opening, line)
            yield

    def skip_redirections(self) -> None:
        """Skip blanks and redirections."""
        self.match(BLANKS)
        while redirection := self.match(REDIRECTION):
            self.match(BLANKS)
            target = "" if WORD_END.match(self.text, self.position) else self.read_word().text
            if redirection["operator"] in ("<<", "<<-"):
                self.here_documents.append(target)
            self.match(BLANKS)

    def read_words(self) -> list[Word]:
        """Read the words of a command, without redirections."""
        words: list[Word] = []
        while True:
            if in_test := bool(words) and words[0].source == "[[" and words[-1].source != "]]":
                self.match(BLANKS)
            else:
                self.skip_redirections()
            if self.at_end or (not in_test and COMMAND_END.match(self.text, self.position)):
                return words
            words.append(self.read_word())

    def read_word(self) -> Word:
        """Read a word at the position, or a single character that ends words."""
        line, start = self.line, self.position
        if array := self.match(ARRAY_ASSIGNMENT):
            items = tuple(field for _ in self.lines_until("(", ")") for field in self.read_word().fields)
            return Word(array[0], line, "", items)
        expansion = ""
        while self.position == start or not WORD_END.match(self.text, self.position):
            expansion = self._limit(expansion + self._part(quoted=False))
        source = self.text[start : self.position]
        parameter = ONLY_PARAMETER.fullmatch(source)
        is_unset = parameter is not None and self.variables.scalar(parameter["name"]) is None
        return Word(source, line, expansion, is_unset=is_unset)

    def _unknown(self, construct: str, reason: str) -> str:
        return self.variables.unknown(construct, reason, self.line)

    def _limit(self, text: str) -> str:
        """Return a text, or its start and a marker if it is too long."""
        return text if len(text) <= MAX_LENGTH else text[:99] + self._unknown("a word", "is too long")

    def _part(self, *, quoted: bool) -> str:
        """Read and expand a literal, a quoted text or an expansion."""
        start = self.position
        if not quoted and (text := self._unquoted_part()) is not None:
            return text
        if self.take('"'):
            return self._parts_until('"', '"', quoted=True).translate(PROTECTED)
        if escape := self.match(ESCAPE):
            backslash = "\\" if quoted and escape[1] not in '$`"\\' else ""
            return "" if escape[1] == "\n" else f"{backslash}{escape[1].translate(PROTECTED)}"
        if self.take("$(("):
            expression = self._parts_until("))", "$((", quoted=True)
            return self._arithmetic(expression, self.text[start : self.position])
        if self.take("$(", "<(", ">("):
            return self._substitution(start)
        if self.match(SCRIPT_ARGUMENTS):
            return ""  # those are on Quintet's command line
        if parameter := self.match(BRACED_PARAMETER):
            return self._braced_parameter(parameter, quoted=quoted)
        if parameter := self.match(PARAMETER):
            return self._value(parameter[1], 0)
        if unsupported := self.match(UNSUPPORTED_EXPANSION):
            return self._unknown(unsupported[0], UNSUPPORTED)
        literal = self.match(QUOTED_LITERAL if quoted else LITERAL)
        return literal[0] if literal else ""

    def _unquoted_part(self) -> str | None:
        """Read what has no meaning between double quotes."""
        if quotes := self.match(SINGLE_QUOTED):
            return quotes[1].translate(PROTECTED)
        if self.text[self.position] == "'":
            raise self._not_closed("'", self.line)
        return (self.variables.scalar("HOME") or "~").translate(PROTECTED) if self.match(TILDE) else None

    def _parts_until(self, closing: str, opening: str, *, quoted: bool) -> str:
        """Read and expand parts up to `closing`; in arithmetic, after the parentheses in it are closed."""
        line = self.line
        text = ""
        parentheses = 0
        while parentheses or not self.take(closing):
            if self.at_end:
                raise self._not_closed(opening, line)
            if closing == "))":
                parentheses += {"(": 1, ")": -1}.get(self.text[self.position], 0)
            text = self._limit(text + self._part(quoted=quoted))
        return text

    def _value(self, name: str, index: int) -> str:
        """Return the value of `$NAME` or `${NAME[index]}`."""
        values = self.variables.values.get(name, ())
        if index < len(values):
            return values[index]
        if values and MARKER.search(values[0]):
            return values[0]
        return self._unknown(f"${name}", CALL_ARGUMENT if name.isdigit() else NOT_SET)

    def _braced_parameter(self, parameter: re.Match[str], *, quoted: bool) -> str:
        """Expand `${NAME…}`."""
        argument = self._parts_until("}", "${", quoted=quoted)
        match parameter.group("name", "index", "operator"):
            case str(name), None, str(operation):
                return self._operation(name, operation, argument)
            case str(name), "[@]" | "[*]", None if not argument:
                return ITEM_SEPARATOR.join(self.variables.values.get(name, ()))
            case str(name), index, None if not argument:
                return self._value(name, int(index[1:-1]) if index else 0)
        return self._unknown(self.text[parameter.start() : self.position], UNSUPPORTED)

    def _operation(self, name: str, operation: str, argument: str) -> str:
        """Expand `${NAME:-default}`, `${NAME:+alternative}`, `${NAME:?message}`, `${NAME//old/new}` or `${NAME,,}`."""
        value = self.variables.scalar(name)
        is_missing = not value if operation.startswith(":") else value is None
        if value is not None and (unknown := self.variables.find_unknown(value)) is not None:
            return argument if unknown.reason == PROMPTED and operation == ":-" else value
        if operation.endswith("+"):
            return "" if is_missing else argument
        if operation.endswith("-") and is_missing:
            unknown = self.variables.find_unknown(argument)
            reason = f"is not set in the environment, and its default {unknown}"
            return argument if unknown is None else self._unknown(f"${name}", reason)
        if value is None or is_missing:
            return self._unknown(f"${name}", NOT_SET)
        if operation == "//":
            return self._replacement(name, value, argument.translate(UNPROTECTED))
        return value.lower() if operation == ",," else value

    def _replacement(self, name: str, value: str, argument: str) -> str:
        """Expand `${NAME//old/new}`."""
        old, _, new = argument.partition("/")
        if not old or re.search(r"[*?\[]", old) or len(value) * len(new) > MAX_LENGTH:
            return self._unknown(f"${{{name}//{argument}}}", UNSUPPORTED)
        return argument if MARKER.search(argument) else value.replace(old, new)

    def _arithmetic(self, expression: str, source: str) -> str:
        """Evaluate `$((expression))` with the variables that it names."""

        def integer(name: re.Match[str]) -> str:
            value = self.variables.scalar(name[0])
            if value is None:
                return "?" if name[0] in SHELL_VARIABLES else self._unknown(f"${name[0]}", NOT_SET)
            return value if INTEGER.fullmatch(value) or MARKER.search(value) else "?"

        expression = re.sub(r"[A-Za-z_]\w*", integer, expression.strip())
        if (unknown := MARKER.search(expression)) is not None:
            return unknown[0]
        try:
            return str(_evaluate(ast.parse(expression, mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return self._unknown(" ".join(source.split()), "is not integer arithmetic")

    def _substitution(self, start: int) -> str:
        """Expand `$(…)` to the output of commands on paths and texts; the output of others is unknown."""
        commands: list[list[str]] = []
        operators: list[str] = []
        for _ in self.lines_until("$(", ")"):
            if self.take("("):
                commands.append([self._substitution(self.position - 2)])
            elif separator := self.take(*OPERATORS, ";;"):
                operators.append(separator)
            else:
                commands.append([field for word in self.read_words() for field in word.fields])
        is_known = not MARKER.search(" ".join(field for command in commands for field in command))
        directory = Path(self.variables.scalar("PWD") or ".")
        if is_known and (output := command_output(commands, operators, directory)) is not None:
            return output
        shown = " ".join(self.text[start + 2 : self.position - 1].split())
        shown = shown if len(shown) <= 40 else f"{shown[:39]}…"
        return self._unknown(f"$({shown})", "is the output of a program, and none is run here")


ARITHMETIC: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}


def _evaluate(node: ast.expr) -> int:
    """Evaluate arithmetic on integers from 0 to 2^63; a shell rounds the quotients of negative ones differently."""
    match node:
        case ast.Constant(value=int(value)):
            pass
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in ARITHMETIC:
            value = ARITHMETIC[type(operation)](_evaluate(left), _evaluate(right))
        case _:
            raise ValueError(ast.dump(node))
    if not 0 <= value < 1 << 63:
        raise ValueError(value)
    return value


def unknown_words_hint(reason: str) -> str:
    """Return what to do about words of a command that are not known for a `reason`."""
    if CALL_ARGUMENT in reason:
        return "write its words out in the script, or give quintet the configuration file and key=value words instead"
    return "write its words out in the script, or set what it depends on: NAME=… quintet …"
