"""Commands that a shell itself runs: assignments, tests, `read`, `echo` and the like."""

from __future__ import annotations

import operator
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path

from quintet.config.dialects.scripts.arithmetic import ASSIGNMENT as ARITHMETIC_ASSIGNMENT
from quintet.config.dialects.scripts.command_lists import CommandListReader
from quintet.config.dialects.scripts.conditions import Status, all_of, any_of, negated
from quintet.config.dialects.scripts.shell_variables import MARKER, PROMPTED
from quintet.config.dialects.scripts.shell_words import INTEGER, Word

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
FILE_TESTS: Mapping[str, Callable[[str], bool]] = {"-f": os.path.isfile, "-d": os.path.isdir, "-e": os.path.exists}
COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
SIMPLE_REGULAR_EXPRESSION = re.compile(r"(?:[\w^$.*+?/-]|\[\^?[\w-]+\])+")
"""Pattern after `=~` that Python and a shell understand alike."""
ARITHMETIC_EFFECT = re.compile(r"(?:\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))")
"""Part of an arithmetic expression that sets a variable."""
PREFIX_STEP = re.compile(r"\s*(\+\+|--)\s*([A-Za-z_]\w*)\s*")
INTEGER_LITERAL = re.compile(r"0|-?[1-9]\d{0,17}")
READ_OPTIONS = re.compile(r"-[ers]*(?P<option>[adinNptu])?")
BUILT_INS = frozenset(
    (
        *("[", "[[", "test", "export", "local", "declare", "typeset", "readonly", "cd", "read", "mapfile", "readarray"),
        *("unset", "true", "false", ":", "echo", "printf", "shift", "set", "trap", "wait", "shopt", "command"),
        *("let", "source", ".", "eval"),
    )
)
SILENT_PROGRAMS = frozenset(("mkdir", "rm", "rmdir", "touch", "sleep", "exec", "cp", "mv", "ulimit"))


class BuiltIns:
    """Applies the commands that a shell itself runs to the variables of a reader."""

    def __init__(self, reader: CommandListReader) -> None:
        self.reader, self.variables = reader, reader.variables

    def assign(self, words: Iterable[Word]) -> None:
        """Set variables; words without `=`, as after `export`, are left out."""
        for word in words:
            if matched := ASSIGNMENT.match(word.source):
                name, index, append = matched.groups()
                before = self.variables.values.get(name, ()) if append else ()
                text = "".join(before[:1]) + word.text[matched.end() :]
                expression = word.text[matched.end() :] or "0"
                if name in self.variables.integers and not (INTEGER_LITERAL.fullmatch(expression) and not append):
                    self.assign_arithmetic(f"{name}{append}={expression}", word.source)
                    continue
                values = (text,) if word.items is None else (*before, *word.items)
                if word.items is not None:
                    values = next(filter(self.variables.is_unknown_count, (before, word.items)), values)
                self.variables.assign(name, values, word.line)
                if index:
                    self.variables.forget([name], "is an array with assigned elements: not supported", word.line)

    def assign_arithmetic(self, expression: str, source: str) -> Status:
        """Evaluate `i++`, `i=0`, `i+=2` or an expression without side effects; return whether it is not 0."""
        if "," in expression and not re.search(r"[()]", expression):
            *others, expression = expression.split(",")
            for other in others:
                self.assign_arithmetic(other, source)
        matched = ARITHMETIC_ASSIGNMENT.fullmatch(PREFIX_STEP.sub(r"\2\1", expression))
        if matched is None:
            value = self.reader.evaluate(expression, source)
        else:
            name, sign = matched["name"], matched["operator"] or (matched["step"] or "")[:1]
            operand = matched["value"] if matched["step"] is None else "1"
            value = self.reader.evaluate(f"{name} {sign} ({operand})" if sign else operand, source)
            self.variables.assign(name, (str(value),), self.reader.line)
        if isinstance(value, str):
            effects = {name for names in ARITHMETIC_EFFECT.findall(expression) for name in names if name}
            effects -= {matched["name"]} if matched else set()
            self.variables.forget(effects, "is not integer arithmetic", self.reader.line)
            self.reader.unknown_in_condition = str(self.variables.find_unknown(value))
            return None
        return value != 0

    def run(self, name: str, words: Sequence[Word]) -> Status:
        """Apply one of `BUILT_INS` to its arguments."""
        match name:
            case "[" | "[[" | "test":
                return self._test(words if name == "test" else words[:-1], glob=name == "[[")
            case "read":
                return self._read(words)
            case "command":
                return self._is_command(words)
            case "let":
                return [self.assign_arithmetic(word.text, word.source) for word in words or ()][-1] if words else False
        self._change_state(name, words)
        return name != "false"

    def _change_state(self, name: str, words: Sequence[Word]) -> None:
        """Apply a built-in command that always succeeds."""
        match name:
            case "export" | "local" | "declare" | "typeset" | "readonly":
                self._declare(name, words)
            case "cd":
                directory = Path(self.variables.scalar("PWD") or ".", *(word.text for word in words[-1:]))
                self.variables.assign("PWD", (str(directory),), self.reader.line)
            case "mapfile" | "readarray":
                names = [word.text for word in words if word.text.isidentifier()]
                self.variables.forget(names[-1:] or ["MAPFILE"], PROMPTED, self.reader.line)
            case "unset":
                self.variables.values |= {word.text: () for word in words}
                self.variables.integers -= {word.text for word in words}
            case "echo" | "printf":
                self._print(name, words)
            case "shift":
                count = int(words[0].text) if words and words[0].text.isdecimal() else 1
                self.variables.set_arguments((self.variables.arguments or ())[count:])
            case "set":
                fields = [text for word in words for text in word.arguments]
                self._set_export_all(fields)
                if "--" in fields:
                    self.variables.set_arguments(tuple(fields[fields.index("--") + 1 :]))

    def _set_export_all(self, fields: Sequence[str]) -> None:
        """Apply `set -a` and `set -o allexport`, and the same with `+`."""
        for option, following in zip_longest(fields, fields[1:], fillvalue=""):
            if option == "--":
                return
            if re.fullmatch(r"[-+][a-zA-Z]*a[a-zA-Z]*", option) or (
                option in ("-o", "+o") and following == "allexport"
            ):
                self.variables.exports_all = option[0] == "-"

    def _declare(self, name: str, words: Sequence[Word]) -> None:
        names = [re.split(r"\+?=|\[", word.source)[0] for word in words if not word.source.startswith("-")]
        options = "".join(word.source for word in words if word.source.startswith("-"))
        if name in ("local", "declare", "typeset") and self.variables.local_values:
            for each in names:
                self.variables.local_values[-1].setdefault(each, self.variables.values.get(each))
            assigned = {re.split(r"\+?=|\[", word.source)[0] for word in words if "=" in word.source}
            self.variables.values |= {each: () for each in names if each not in assigned}
        if name != "export" and "i" in options:
            self.variables.integers.update(names)
        self.assign(words)
        if name == "export" or (name != "readonly" and "x" in options):
            self.variables.exported.update(names)

    def _print(self, name: str, words: Sequence[Word]) -> None:
        """Print the words of `echo`, or of `printf` with a format that only has `%s`."""
        fields = [text for word in words for text in word.arguments]
        if name == "printf" and fields[:1] == ["-v"]:
            self.variables.forget(fields[1:2], "is the output of a program, and none is run here", self.reader.line)
        elif name == "echo":
            end = "" if fields[:1] == ["-n"] else "\n"
            has_option = re.match(r"-\w*[eE]", fields[0]) if fields else None
            self.reader.print_text(None if has_option else " ".join(fields[not end :]) + end)
        elif len(fields) == 2 and re.fullmatch(r"[^%\\]*%s[^%\\]*(\\n)?", fields[0]):
            self.reader.print_text(fields[0].replace("\\n", "\n").replace("%s", fields[1]))
        else:
            is_text = len(fields) == 1 and not re.search(r"[%\\]", fields[0])
            self.reader.print_text(fields[0] if is_text else None)

    def _is_command(self, words: Sequence[Word]) -> Status:
        """Return whether a program of the name in `command -v NAME` is on this machine."""
        match [text for word in words for text in word.fields]:
            case ["-v", name] if not MARKER.search(name):
                self.reader.print_text(None)
                return name in BUILT_INS or shutil.which(name) is not None
        return None

    def _read(self, words: Sequence[Word]) -> Status:
        """Read the text after `<<<` into variables, or make them unknown."""
        fields = [text for word in words for text in word.fields]
        names: list[str] = []
        array = False
        while fields:
            field = fields.pop(0)
            option = READ_OPTIONS.fullmatch(field)
            if option is None:
                names.append(field)
            elif option["option"] == "a":
                array = True
            elif option["option"]:
                del fields[:1]
        names = [name for name in names if name.isidentifier()] or ["REPLY"]
        ifs = self.variables.scalar("IFS")
        count = None if array else len(names)
        text = self.reader.here_string
        parts = None if text is None else _split(text, " \t\n" if ifs is None else ifs, count)
        if parts is None:
            self.variables.forget(names, PROMPTED, self.reader.line)
            return None
        values = _known_parts(parts)
        if array:
            unknown = next(filter(MARKER.search, values), None)
            items = tuple(values) if unknown is None else (self.variables.unknown_array(unknown),)
            self.variables.assign(names[0], items, self.reader.line)
        else:
            for name, value in zip_longest(names, values, fillvalue=values[-1] if _has_unknown(values) else ""):
                self.variables.assign(name, (value,), self.reader.line)
        return True

    def _test(self, words: Sequence[Word], *, glob: bool) -> Status:
        """Evaluate the words of `[ … ]`, `[[ … ]]` or `test …`."""
        sources = [word.source for word in words]
        for separator, combine in (("||", any_of), ("&&", all_of)):
            if separator in sources and "(" not in sources:
                position = sources.index(separator)
                return combine([self._test(each, glob=glob) for each in (words[:position], words[position + 1 :])])
        return self._comparison(words, glob=glob)

    def _comparison(self, words: Sequence[Word], *, glob: bool) -> Status:
        """Evaluate the words of a test without `&&` and `||`."""
        if any(word.source == "=~" for word in words):
            self.variables.forget(["BASH_REMATCH"], "can only be evaluated by a shell", self.reader.line)
        # the tilde of `=~` is no home directory
        match [text for word in words for text in (["=~"] if word.source == "=~" else word.fields or [""])]:
            case texts if any(map(MARKER.search, texts)):
                return None
            case ["!", *_]:
                return negated(self._comparison(words[1:], glob=glob))
            case [text]:
                return text != ""
            case ["-z" | "-n" as name, text]:
                return (text == "") is (name == "-z")
            case [name, path] if name in FILE_TESTS:
                directory = self.variables.scalar("PWD") or "."
                is_known = os.path.isabs(path) or not MARKER.search(directory)
                return FILE_TESTS[name](os.path.join(directory, path)) if path and is_known else None if path else False
            case [left, "=" | "==" | "!=" as name, right]:
                return (fnmatchcase(left, right) if glob else left == right) is (name != "!=")
            case [left, "=~", right] if SIMPLE_REGULAR_EXPRESSION.fullmatch(words[-1].source):
                return re.search(right, left) is not None
            case [left, name, right] if name in COMPARISONS and INTEGER.fullmatch(left) and INTEGER.fullmatch(right):
                return COMPARISONS[name](int(left), int(right))
        return None


def _has_unknown(values: Sequence[str]) -> bool:
    return any(map(MARKER.search, values))


def _known_parts(parts: Sequence[str]) -> list[str]:
    """Return the fields of a line with those from the first unknown one on unknown, since it may be several."""
    values: list[str] = []
    for part in parts:
        unknown = MARKER.search("".join([*values[-1:], part]))
        values.append(part if unknown is None else unknown[0])
    return values


def _split(text: str, separators: str, count: int | None) -> list[str] | None:
    """Return the fields of a line for `count` variables, of which the last one gets what is left; all if it is None.

    None for separators that are not supported.
    """
    line = text.split("\n")[0]
    if not separators:
        return [line]
    if not separators.strip(" \t\n"):
        line = line.strip(separators)
        parts = re.split(f"[{separators}]+", line, maxsplit=0 if count is None else count - 1) if count != 1 else [line]
        return parts if parts != [""] else []
    if len(separators) > 1:
        return None
    parts = line.split(separators)
    parts = parts[:-1] if parts[-1] == "" else parts
    return parts if count is None or len(parts) <= count else line.split(separators, count - 1)
