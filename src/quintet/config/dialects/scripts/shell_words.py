"""Reader of the words of a shell script, which expands them and runs nothing."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quintet.config.dialects.scripts.arithmetic import evaluate
from quintet.config.dialects.scripts.command_output import command_output
from quintet.config.dialects.scripts.parameter_expansion import changed, part
from quintet.config.dialects.scripts.shell_variables import (
    CALL_ARGUMENT,
    MARKER,
    MAX_LENGTH,
    PROMPTED,
    Variables,
    script_error,
)
from quintet.errors import ConfigError

ITEM_SEPARATOR = "\ue003"
"""Separates the words of an array, also in quotes."""
PROTECTED = str.maketrans(" \t\n", "\ue004\ue005\ue006")
"""Blanks at which a quoted text is not split."""
EMPTY_ITEM = "\ue007"
"""An empty word of an array."""
UNPROTECTED = str.maketrans("\ue003\ue004\ue005\ue006", "  \t\n", EMPTY_ITEM)
SHELL_VARIABLES = ("RANDOM", "SECONDS", "LINENO")
"""Variables that only a shell sets."""
UNSUPPORTED = "can only be evaluated by a shell"

OPERATORS = ("&&", "||", "|&", "|", "&")
REDIRECTION = re.compile(r"(?P<number>\d*)(?P<operator><<<|<<-?|&>>?|>>|>&|<&|>\||[<>](?!\())")
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
ASSIGNED = re.compile(r"\w+\+?=")
SCRIPT_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*][^}]*\}")
PARAMETER = re.compile(r"\$([A-Za-z_]\w*|[0-9#])")
BRACED_PARAMETER = re.compile(
    r"\$\{(?P<prefix>#(?=[\w@*])|!)?(?P<name>[A-Za-z_]\w*|\d+|[#@*])?(?P<index>\[[^\]\[]*\])?"
    r"(?P<operator>:?[-+?]|//?|,,|##?|%%?|:)?"
)
ALL_ITEMS = ("[@]", "[*]")
EMPTY_WORD = re.compile(r"""(?:''|"")+""")
ONLY_PARAMETER = re.compile(r'"?\$\{?(?P<name>\w+)\}?"?')
UNSUPPORTED_EXPANSION = re.compile(r"\$(?:[?$!-]|'[^'\"]*')|`[^`]*`")
INTEGER = re.compile(r"\d{1,18}")


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
        """The word after expansion, split at unquoted blanks as for a program; without empty fields but `""`."""
        if EMPTY_WORD.fullmatch(self.source):
            return [""]
        fields = [] if self.is_unset else re.split(f"[ \t\n{ITEM_SEPARATOR}]+", self.expansion)
        return [field.translate(UNPROTECTED) for field in fields if field]

    @property
    def arguments(self) -> list[str]:
        """The word after expansion, split as for a function or a test: with an empty field for `""`."""
        is_empty = self.expansion == "" and re.search(r"""["']""", self.source) and not re.search("[@]", self.source)
        return [""] if is_empty else self.fields

    @property
    def count_is_unknown(self) -> bool:
        """Whether it may be more or fewer words than after expansion."""
        is_quoted = self.source.startswith('"') and not re.search(r"\[@\]\}|\$@", self.source)
        unknown = MARKER.match(self.expansion)
        return unknown is not None and not is_quoted and (self.source[:1] != '"' or unknown[0] == self.expansion)


class WordReader:
    """Reads and expands words from a position in a script."""

    def __init__(self, text: str, variables: Variables, first_line: int = 1) -> None:
        self.text = text.replace("\r\n", "\n")
        self.variables = variables
        self.first_line = first_line
        self.line_breaks = [matched.start() for matched in re.finditer("\n", self.text)]
        self.position = 0
        self.here_documents: list[str] = []
        self.here_string: str | None = None
        """The text after `<<<` of the last command."""
        self.redirected = False
        """Whether the output of the last command goes elsewhere."""
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
            elif redirection["operator"] == "<<<":
                self.here_string = target
            elif redirection["number"] in ("", "1") and ">" in redirection["operator"]:
                self.redirected = True
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
            operator = self.take("&&", "||") if in_test else ""
            words.append(Word(operator, self.line, operator) if operator else self.read_word())

    def read_word(self) -> Word:
        """Read a word at the position, or a single character that ends words."""
        line, start = self.line, self.position
        if array := self.match(ARRAY_ASSIGNMENT):
            words = [self.read_word() for _ in self.lines_until("(", ")")]
            unknown = next((word.expansion for word in words if word.count_is_unknown), None)
            items = [field for word in words for field in word.arguments]
            return Word(
                array[0], line, "", tuple(items if unknown is None else [self.variables.unknown_array(unknown)])
            )
        expansion = ""
        while self.position == start or not WORD_END.match(self.text, self.position):
            expansion = self._limit(expansion + self._part(quoted=False))
        source = self.text[start : self.position]
        if self._splits_differently(source, expansion):
            expansion = self._unknown(source, "is split at the characters of IFS, which is not supported")
        parameter = ONLY_PARAMETER.fullmatch(source)
        is_unset = parameter is not None and self.variables.scalar(parameter["name"]) is None
        return Word(source, line, expansion, is_unset=is_unset)

    def _splits_differently(self, source: str, expansion: str) -> bool:
        """Return whether a shell splits the expansion of a word elsewhere than at blanks."""
        ifs = self.variables.scalar("IFS") or ""
        if MARKER.search(ifs) or not set(ifs.strip(" \t\n")) & set(expansion) or ASSIGNED.match(source):
            return False
        return "$" in re.sub(r"'[^']*'|\"[^\"]*\"", "", source)

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
            return str(self.evaluate(expression, self.text[start : self.position]))
        if self.take("$(", "<(", ">("):
            return self._substitution(start)
        if (arguments := self._all_arguments(quoted=quoted)) is not None:
            return arguments
        if parameter := self.match(BRACED_PARAMETER):
            return self._braced_parameter(parameter, quoted=quoted)
        if parameter := self.match(PARAMETER):
            return self._value(parameter[1])
        if unsupported := self.match(UNSUPPORTED_EXPANSION):
            return self._unknown(unsupported[0], UNSUPPORTED)
        literal = self.match(QUOTED_LITERAL if quoted else LITERAL)
        return literal[0] if literal else ""

    def _all_arguments(self, *, quoted: bool) -> str | None:
        """Read `$@`: the arguments of a function; those of the script are on Quintet's command line."""
        if self.variables.arguments is None:
            return "" if self.match(SCRIPT_ARGUMENTS) else None
        return _joined(self.variables.arguments, quoted=quoted) if self.take("$@", "$*") else None

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

    def expand(self, text: str) -> str:
        """Expand a text as between double quotes."""
        reader = WordReader(text, self.variables, self.line)
        expansion = ""
        while not reader.at_end:
            expansion = self._limit(expansion + reader._part(quoted=True))
        return expansion.translate(UNPROTECTED)

    def _value(self, name: str, index: str = "0") -> str:
        """Return the value of `$NAME` or `${NAME[index]}`."""
        values = self.variables.values.get(name, ())
        if self.variables.is_unknown_array(name):
            return values[0]
        position = self._position(name, index, len(values))
        if isinstance(position, str):
            return position
        if position < len(values):
            return values[position]
        if name.isdigit() and self.variables.arguments is not None:
            return ""
        return self._unknown(f"${name}", CALL_ARGUMENT if name.isdigit() else self.variables.not_set())

    def _position(self, name: str, index: str, count: int) -> int | str:
        """Return the position that an index of an array names; a marker if it is not known."""
        if index.isdecimal():
            return int(index)
        result = self.evaluate(self.expand(index), f"${{{name}[{index}]}}")
        if isinstance(result, str) and self.variables.choices is not None and count:
            return self.variables.choices.position(result, count)
        return result

    def _braced_parameter(self, parameter: re.Match[str], *, quoted: bool) -> str:
        """Expand `${NAME…}`."""
        is_replacement = (parameter["operator"] or "").startswith("/")
        # an escaped slash is not the one before the replacement
        argument = self._parts_until("}", "${", quoted=quoted or is_replacement)
        shown = self.text[parameter.start() : self.position]
        prefix, name, index, operation = parameter.group("prefix", "name", "index", "operator")
        if name in ("@", "*") or index in ALL_ITEMS:
            return self._items(parameter, argument, shown, quoted=quoted)
        is_quoted = is_replacement and not quoted and "'" in argument
        is_length = prefix == "#" and not operation and not argument
        is_default = operation is not None and operation[-1] in "-+?"
        if (
            name is None
            or (prefix and not is_length)
            or (argument and not operation)
            or (index and is_default)
            or is_quoted
        ):
            return self._unknown(shown, UNSUPPORTED)
        if is_default:
            return self._default(name, str(operation), argument)
        value = self._value(name, index[1:-1] if index else "0")
        if MARKER.search(value):
            return value
        if is_length:
            return str(len(value))
        return self._changed(value, operation, argument, shown) if operation else value

    def _items(self, parameter: re.Match[str], argument: str, shown: str, *, quoted: bool) -> str:
        """Expand `${NAME[@]}`, `${#NAME[@]}`, `${!NAME[@]}`, `${NAME[@]:first:count}`, and the same of `$@`."""
        prefix, name, index, operation = parameter.group("prefix", "name", "index", "operator")
        values = self.variables.values.get(name, ()) if index else self.variables.arguments or ()
        if index and self.variables.is_unknown_array(name):
            return values[0]
        if prefix and not argument and not operation:
            return str(len(values)) if prefix == "#" else _joined(list(map(str, range(len(values)))), quoted=quoted)
        if operation == ":" and not prefix:
            # the first of `${@:0}` is the name of the script
            selected = part(values if index else (self.variables.scalar("0") or "", *values), argument)
        else:
            selected = None if prefix or operation or argument else values
        if selected is None:
            return self._unknown(shown, UNSUPPORTED)
        if quoted and "*" in (name, (index or "")[1:2]):
            separator = " " if (ifs := self.variables.scalar("IFS")) is None else ifs[:1]
            return separator.join(selected).translate(PROTECTED)
        return _joined(selected, quoted=quoted)

    def _default(self, name: str, operation: str, argument: str) -> str:
        """Expand `${NAME:-default}`, `${NAME:+alternative}` or `${NAME:?message}`."""
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
        return self._unknown(f"${name}", self.variables.not_set()) if value is None or is_missing else value

    def _changed(self, value: str, operation: str, argument: str, shown: str) -> str:
        """Expand `${NAME,,}`, `${NAME//old/new}`, `${NAME#pattern}` and the like."""
        if (unknown := MARKER.search(argument)) is not None:
            return unknown[0]
        result = changed(value, operation, argument.translate(UNPROTECTED))
        return self._unknown(shown, UNSUPPORTED) if result is None else result

    def evaluate(self, expression: str, source: str) -> int | str:
        """Evaluate arithmetic with the variables that it names; a marker if the result is not known."""

        def integer(name: re.Match[str]) -> str:
            value = self.variables.scalar(name[0])
            if value is None:
                return "?" if name[0] in SHELL_VARIABLES else self._unknown(f"${name[0]}", self.variables.not_set())
            return value if INTEGER.fullmatch(value) or MARKER.search(value) else "?"

        expression = re.sub(r"[A-Za-z_]\w*", integer, expression.strip())
        if (unknown := MARKER.search(expression)) is not None:
            return unknown[0]
        result = evaluate(expression)
        return self._unknown(" ".join(source.split()), "is not integer arithmetic") if result is None else result

    def _substitution(self, start: int) -> str:
        """Expand `$(…)` to the output of commands on paths and texts; the output of others is unknown."""
        commands: list[list[str]] = []
        operators: list[str] = []
        redirected, here_string, inside = self.redirected, self.here_string, self.position
        for _ in self.lines_until("$(", ")"):
            if self.take("("):
                commands.append([self._substitution(self.position - 2)])
            elif separator := self.take(*OPERATORS, ";;"):
                operators.append(separator)
            else:
                commands.append([field for word in self.read_words() for field in word.fields])
        self.redirected, self.here_string = redirected, here_string
        is_known = not MARKER.search(" ".join(field for command in commands for field in command))
        directory = Path(self.variables.scalar("PWD") or ".")
        if is_known and (output := command_output(commands, operators, directory)) is not None:
            return output
        if self.text[start] == "$" and (output := self.captured_output(inside, commands)) is not None:
            self.redirected, self.here_string = redirected, here_string
            return output
        shown = " ".join(self.text[start + 2 : self.position - 1].split())
        shown = shown if len(shown) <= 40 else f"{shown[:39]}…"
        return self._unknown(f"$({shown})", "is the output of a program, and none is run here")

    def captured_output(self, start: int, commands: Sequence[Sequence[str]]) -> str | None:
        """Return what the commands of the `$(…)` before the position print; None if that is not known."""
        return None


def _joined(items: Sequence[str], *, quoted: bool) -> str:
    return ITEM_SEPARATOR.join(item or (EMPTY_ITEM if quoted else "") for item in items)
