"""Parameter expansion: `$NAME`, `${NAME:-default}`, `${NAME#pattern}`, `${NAME[@]}` and the like."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, TypeVar

from quintet.config.dialects.scripts.arithmetic import UnknownOperand
from quintet.config.dialects.scripts.conditions import Status
from quintet.config.dialects.scripts.patterns import (
    EMPTY_ITEM,
    ITEM_SEPARATOR,
    REPLACEMENT,
    expression_of,
    is_quick,
    unprotected,
)
from quintet.config.dialects.scripts.variables import (
    CALL_ARGUMENT,
    MARKER,
    PROMPTED,
    SET_BY_BASH,
    SparseArray,
    Variables,
    subscripts_of,
)

Value = TypeVar("Value", str, tuple[str, ...])

BRACED_PARAMETER = re.compile(
    r"\$\{(?P<prefix>#(?=[\w@*])|!)?(?P<name>[A-Za-z_]\w*|\d+|[#@*?$!-])?(?P<index>\[(?:[^\]\[]|\[[^\]\[]*\])*\])?"
    r"(?P<operator>:?[-+?=]|//?|,,?|\^\^?|##?|%%?|@|:)?"
)
ALL_ITEMS = ("[@]", "[*]")
UNSUPPORTED = "can only be evaluated by a shell"


class ExpandingReader(Protocol):
    """Reader of words, as the expansion of a parameter needs it."""

    text: str
    position: int
    variables: Variables
    status: Status
    """Status of the last command."""
    skipped: int
    """Above 0 in text that bash does not expand."""
    assumptions: list[str]

    @property
    def line(self) -> int:
        """Line of the position in the script."""

    def end(self, reason: str) -> None:
        """End the script for a reason."""

    def tilde(self) -> str:
        """Read a tilde at the position."""

    def parts_until(self, closing: str, opening: str, *, quoted: bool, separator: str = "") -> str:
        """Read and expand the text until a token."""

    def expand(self, text: str) -> str:
        """Expand another text."""

    def evaluate(self, expression: str, source: str) -> int | str:
        """Evaluate an arithmetic expression."""


class ParameterExpansion:
    """Expands parameters for a reader."""

    def __init__(self, reader: ExpandingReader) -> None:
        self.reader, self.variables = reader, reader.variables

    def operand(self, name: str) -> str:
        """Return the value of a variable in arithmetic.

        Raises:
            UnknownOperand: it is not known.
        """
        value = self.value(name)
        if MARKER.search(value):
            raise UnknownOperand(value)
        return value

    def set_operand(self, name: str, value: int) -> None:
        """Set a variable in arithmetic."""
        self.variables.assign(name, (str(value),), self.reader.line)

    def value_of(self, name: str, *, quoted: bool) -> str:
        """Expand `$NAME`, `$1`, `$@` and the like."""
        return self._all_arguments(name, quoted=quoted) if name in ("@", "*") else self.value(name)

    def value(self, name: str) -> str:
        """Return the value of `$NAME`."""
        if name == "?" and self.reader.status is not None:
            return "0" if self.reader.status else self._unknown("$?", "is the status of a command that fails")
        if name in ("?", "$", "!", "-"):
            return self._unknown(f"${name}", UNSUPPORTED)
        if name.isdecimal() and name != "0":
            return self._argument(name)
        values = self.variables.get(name)
        if values is None:
            return self._not_set(name)
        if name not in self.variables.values and name in SET_BY_BASH:
            return self._unknown(f"${name}", "is set by bash itself")
        if self.variables.is_unknown_count(values):
            return self.variables.unknown_scalar(values[0])
        value = self.variables.scalar(name)
        return self._ends_script(f"${name}") if value is None else value

    def _argument(self, name: str) -> str:
        arguments = self.variables.arguments
        if arguments is None and name not in self.variables.values:
            return self._unknown(f"${name}", CALL_ARGUMENT)
        if arguments is not None and self.variables.is_unknown_count(arguments):
            return self.variables.unknown_scalar(arguments[0])
        value = self.variables.scalar(name)
        return self._ends_script(f"${name}") if value is None else value

    def _not_set(self, name: str) -> str:
        self._ends_script(f"${name}")
        return self.variables.unknown(f"${name}", self.variables.not_set(), self.reader.line, variable=name)

    def _ends_script(self, shown: str) -> str:
        """Return the value of a parameter that is not set, and end the script if `set -u` refuses it."""
        if "u" in self.variables.options:
            self.reader.end(f"{shown} is not set, and `set -u` ends the script")
        return ""

    def _unknown(self, construct: str, reason: str) -> str:
        return self.variables.unknown(construct, reason, self.reader.line)

    def _all_arguments(self, sign: str, *, quoted: bool) -> str:
        return self._joined(self.variables.arguments or (), is_text=sign == "*" and quoted, quoted=quoted)

    def _joined(self, items: Sequence[str], *, is_text: bool, quoted: bool) -> str:
        """Return words as one text, or as an expansion that is split between them also in quotes."""
        if not is_text:
            return ITEM_SEPARATOR.join(item or (EMPTY_ITEM if quoted else "") for item in items)
        values = self.variables.get("IFS")
        return (values[0][:1] if values else " ").join(items)

    def items_of(self, name: str) -> dict[str, str]:
        """Return the words of an array by their subscripts."""
        values = self.variables.get(name) or ()
        return dict(zip(subscripts_of(values), values, strict=True))

    def subscript(self, name: str, text: str, *, is_associative: bool) -> str:
        """Return the subscript of an element; a marker if it is not known."""
        if is_associative:
            return self.reader.expand(re.sub(r"""\A(["'])(.*)\1\Z""", r"\2", text, flags=re.DOTALL))
        value = self.reader.evaluate(self.reader.expand(text.strip("\"'")), f"{name}[{text}]")
        if isinstance(value, str) or value >= 0:
            return str(value)
        last = max((int(key) for key in self.items_of(name)), default=-1)
        return str(last + 1 + value)

    def expanded(self, parameter: re.Match[str], *, quoted: bool) -> str:
        """Expand `${NAME…}`, of which `parameter` is the part before its argument."""
        reader = self.reader
        prefix, name, index, operation = parameter.group("prefix", "name", "index", "operator")
        is_pattern = operation is not None and operation[0] in "/#%"
        is_array = name in ("@", "*") or index in ALL_ITEMS
        if operation is not None and operation[-1] in "-+?=" and name is not None and not is_array and not prefix:
            return self._default(parameter, quoted=quoted)
        separator = "/" if operation in ("/", "//") else ""
        argument = reader.parts_until("}", "${", quoted=quoted and not is_pattern, separator=separator)
        shown = reader.text[parameter.start() : reader.position]
        if name is None or (argument and not operation) or operation == "@" or (prefix and operation and not is_array):
            return self._unknown(shown, UNSUPPORTED)
        if is_array:
            return self._items(parameter, argument, shown, quoted=quoted)
        if prefix == "!":
            return self._indirect(name, index, shown)
        value = self._element(name, index) if index else self.value(name)
        if MARKER.search(value):
            return self.variables.depending(shown, value, reader.line) if operation or prefix else value
        if prefix == "#":
            return str(len(value))
        result = self._changed(value, operation, argument) if operation else value
        return self._unknown(shown, UNSUPPORTED) if result is None else result

    def _indirect(self, name: str, index: str | None, shown: str) -> str:
        target = self.value(name)
        if index or MARKER.search(target) or not re.fullmatch(r"[A-Za-z_]\w*|\d+", target):
            return target if MARKER.search(target) else self._unknown(shown, UNSUPPORTED)
        return self.value(target)

    def _element(self, name: str, index: str) -> str:
        """Return the value of `${NAME[index]}`."""
        values = self.variables.get(name)
        if values is not None and self.variables.is_unknown_count(values):
            return self.variables.unknown_scalar(values[0])
        key = self.subscript(name, index[1:-1], is_associative=self.variables.has(name, "A"))
        items = self.items_of(name)
        if MARKER.search(key):
            choices = self.variables.choices
            if choices is None or not items or isinstance(values, SparseArray):
                return key
            key = str(choices.position(key, len(items)))
        if values is None:
            return self._not_set(name)
        return items[key] if key in items else self._ends_script(f"${name}{index}")

    def _items(self, parameter: re.Match[str], argument: str, shown: str, *, quoted: bool) -> str:
        """Expand `${NAME[@]}`, `${#NAME[@]}`, `${!NAME[@]}`, `${NAME[@]:first:count}`, and the same of `$@`."""
        prefix, name, index, operation = parameter.group("prefix", "name", "index", "operator")
        values = (self.variables.get(name) or ()) if index else self.variables.arguments or ()
        if self.variables.is_unknown_count(values):
            return values[0] if prefix != "#" else self.variables.unknown_scalar(values[0])
        if prefix == "#" and index and self.variables.get(name) is None:
            self._ends_script(f"${name}")
        is_text = quoted and "*" in (name, (index or "")[1:2])
        if prefix:
            if argument or operation or (prefix == "!" and not index):
                return self._unknown(shown, UNSUPPORTED)
            return (
                str(len(values))
                if prefix == "#"
                else self._joined(subscripts_of(values), is_text=is_text, quoted=quoted)
            )
        selected: Sequence[str] | None = values
        if operation == ":":
            # the first of `${@:0}` is the name of the script
            selected = values if index else (self.variables.scalar("0") or "", *values)
            is_sparse = isinstance(values, SparseArray)
            selected = None if is_sparse else self._part(tuple(selected), unprotected(argument), is_array=True)
        elif operation is not None and operation[-1] not in "-+?=":
            changed = [self._changed(value, operation, argument) for value in values]
            selected = [each for each in changed if each is not None]
            selected = selected if len(selected) == len(values) and not any(map(MARKER.search, values)) else None
        elif operation is not None:
            selected = [] if operation[-1] == "+" and not values else None
            if operation[-1] == "+" and values and (len(values) > 1 or values[0]):
                return argument
            selected = values if operation[-1] == "-" and values and all(values) else selected
        return (
            self._unknown(shown, UNSUPPORTED)
            if selected is None
            else self._joined(selected, is_text=is_text, quoted=quoted)
        )

    def _default(self, parameter: re.Match[str], *, quoted: bool) -> str:
        """Expand `${NAME:-default}`, `${NAME:=default}`, `${NAME:+alternative}` or `${NAME:?message}`."""
        reader, variables = self.reader, self.variables
        name, index, operation = parameter.group("name", "index", "operator")
        value = self._value_or_none(name, index)
        unknown = None if value is None else variables.find_unknown(value)
        is_missing = not value if operation.startswith(":") else value is None
        is_used = is_missing is not (operation[-1] == "+") or unknown is not None
        reader.skipped += not is_used
        argument = "" if quoted else reader.tilde()
        argument += reader.parts_until("}", "${", quoted=quoted)
        reader.skipped -= not is_used
        if unknown is not None and value is not None:
            if operation[-1] == "?" and not reader.skipped:
                reader.assumptions.append(f"{name} is set, which line {reader.line} asks for")
            prompted = unknown.reason == PROMPTED and operation == ":-"
            return argument if prompted else variables.unknown_scalar(value)
        if not is_used or reader.skipped:
            return "" if operation[-1] == "+" else value or ""
        if operation[-1] == "?":
            state = "empty or not set" if operation[0] == ":" else "not set"
            reader.end(f"${name} is {state}, and `${{{name}{operation}…}}` ends the script")
            return variables.unknown(f"${name}", variables.not_set(), reader.line, variable=name)
        default = variables.find_unknown(argument)
        if default is not None and operation[-1] != "+":
            reason = f"is not set in the environment, and its default {default}"
            argument = variables.unknown(f"${name}", reason, reader.line, variable=default.variable)
        if operation[-1] == "=":
            variables.assign(name, (unprotected(argument),), reader.line)
        return argument

    def _value_or_none(self, name: str, index: str | None) -> str | None:
        """Return the value of a parameter or an element; None if it is not set."""
        variables = self.variables
        if index:
            key = self.subscript(name, index[1:-1], is_associative=variables.has(name, "A"))
            values = variables.get(name) or ()
            unknown = next((each for each in (*values[:1], key) if MARKER.search(each)), None)
            return unknown if unknown is not None else self.items_of(name).get(key)
        if name == "#":
            return variables.values["#"][0]
        if name in "?$!-" or (name.isdecimal() and name != "0"):
            is_missing = name.isdecimal() and name not in variables.values
            is_known = variables.arguments is None or not variables.is_unknown_count(variables.arguments)
            return None if is_missing and is_known else self.value(name)
        return variables.scalar(name)

    def _changed(self, value: str, operation: str, argument: str) -> str | None:
        """Expand `${NAME,,}`, `${NAME//old/new}`, `${NAME#pattern}` and the like; None if it is not supported."""
        if (unknown := MARKER.search(argument)) is not None:
            return unknown[0]
        match operation:
            case ",," | "," | "^^" | "^":
                first = value[:1] if len(operation) == 1 else value
                changed = first.lower() if operation[0] == "," else first.upper()
                return changed + value[len(first) :] if not argument and value.isascii() else None
            case ":":
                return self._part(value, unprotected(argument), is_array=False)
            case "/" | "//":
                return _replaced(value, operation, argument)
        return _without(value, operation, argument)

    def _part(self, value: Value, argument: str, *, is_array: bool) -> Value | None:
        """Return the part of a text or an array that `first` or `first:count` selects."""
        if argument.count("?") or MARKER.search(argument) or not argument.strip():
            return None
        first_text, colon, count_text = argument.partition(":")
        first = self.reader.evaluate(first_text, first_text)
        count = self.reader.evaluate(count_text, count_text) if colon else len(value)
        if isinstance(first, str) or isinstance(count, str):
            return None
        length = len(value)
        start = first if first >= 0 else length + first
        end = length + count if count < 0 else start + count
        if is_array and (first < 0 or count < 0):
            return None
        return value[:0] if start < 0 or start > length else value[start:end] if end >= start else None


def _replaced(value: str, operation: str, argument: str) -> str | None:
    old, _, new = argument.partition(REPLACEMENT)
    anchor = old[:1] if old[:1] in "#%" and len(operation) == 1 else ""
    expression = expression_of(old[len(anchor) :])
    if expression is None or not is_quick(expression, value, searched=True) or "&" in new or "\\" in new or not old:
        return None
    if anchor:
        expression = rf"\A(?:{expression})" if anchor == "#" else rf"(?:{expression})\Z"
    if re.match(expression, "", re.DOTALL) and not anchor:
        return None
    if len(value) * len(new) > 1 << 16 or (anchor == "%" and ".*" in expression):
        return None
    return re.sub(expression, lambda _: unprotected(new), value, count=0 if operation == "//" else 1, flags=re.DOTALL)


def _without(value: str, operation: str, pattern: str) -> str | None:
    """Return a value without its shortest or, if the sign is doubled, longest prefix or suffix that matches."""
    expression = expression_of(pattern)
    if expression is None or not is_quick(expression, value, searched=True):
        return None
    matcher = re.compile(expression, re.DOTALL)
    lengths: Sequence[int] = range(len(value) + 1)
    for length in lengths if len(operation) == 1 else lengths[::-1]:
        end = len(value) - length
        if operation[0] == "#" and matcher.fullmatch(value, 0, length):
            return value[length:]
        if operation[0] == "%" and matcher.fullmatch(value, end):
            return value[:end]
    return value
