"""The commands that a shell script runs, matched without running it.

The condition of an `if` is evaluated. If that is not possible, both branches are read, and the variables that they set
become unknown, as those that loops, functions and `case` set.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from quintet.config.dialects.scripts.shell_words import (
    BLANKS,
    INTEGER,
    MARKER,
    OPERATORS,
    PROMPTED,
    Variables,
    Word,
    WordReader,
)

COMPOUND = re.compile(r"\((?!\()|(?:if|case|for|while|until|\{|!)(?=[ \t\n])")
UNSUPPORTED_COMMAND = re.compile(r"\(\(|[;&|)]+|(?:select|then|elif|else|fi|done|esac|\})(?![^\s;&|()])")
FUNCTION = re.compile(r"function[ \t]+[^\s()]+(?:[ \t]*\([ \t]*\))?|[\w.:-]+[ \t]*\([ \t]*\)")
LOOP_HEADER = re.compile(r"[ \t]*(?:\(\(.*\)\)|(?P<variable>\w+))")
CASE_PATTERN = re.compile(r"[^)]*\)")
ARITHMETIC_COMMAND = re.compile(r"\(\((?:[^()]|\([^()]*\))*\)\)")
"""`(( … ))`, whose result is not computed."""
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
FILE_TESTS: Mapping[str, Callable[[str], bool]] = {"-f": os.path.isfile, "-d": os.path.isdir, "-e": os.path.exists}
COMPARISONS = {"-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-gt": operator.gt}

Status = bool | None
"""Whether a command succeeds; None if that is unknown."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A word after expansion, as a program receives it."""

    text: str
    line: int


ScriptCommand = tuple[Argument, ...]
"""A program that a script runs, or may run, with its arguments."""


def read_commands(text: str, variables: Variables, first_line: int = 1) -> list[ScriptCommand]:
    """Return the commands of a script that run or may run, while `variables` follow the script.

    Raises:
        ConfigError: a quote or a bracket is not closed, or a command is not supported.
    """
    reader = _CommandReader(text, variables, first_line)
    try:
        reader.read_commands()
    except RecursionError:
        raise reader.error("the words are nested too deeply", "write them out", reader.line) from None
    return reader.commands


def _matches_pattern(text: str, pattern: str) -> Status:
    """Whether a text matches the pattern of a branch, such as `gpu|cuda)`; None if only a shell can tell."""
    choices = [choice.strip() for choice in pattern.strip().removeprefix("(").removesuffix(")").split("|")]
    if any(re.search(r"[$`\\]", choice) for choice in choices):
        return None
    return any(fnmatchcase(text, re.sub("[\"']", "", choice)) for choice in choices)


class _CommandReader(WordReader):
    def __init__(self, text: str, variables: Variables, first_line: int) -> None:
        super().__init__(text, variables, first_line)
        self.commands: list[ScriptCommand] = []
        self.unknown_in_condition = ""

    def read_commands(self, opening: str = "", *ends: str) -> Status:
        """Read commands up to one of `ends`, or to the end of the script if there is no `opening`."""
        status: Status = True
        separator = ""
        for _ in self.lines_until(opening, *ends):
            status = self._command_after(separator, status)
            self.match(BLANKS)
            separator = self.take(*OPERATORS)
        return status

    def _command_after(self, separator: str, status: Status) -> Status:
        """Read the command after a separator; after `&&` and `||`, the status before decides whether it runs."""
        if separator not in ("&&", "||"):
            return self._command()
        skipped_at = separator == "||"
        runs = None if status is None else status is not skipped_at
        line = self.line
        result, changed = self._branch(runs, self._command)
        self._forget(changed, "is set on a condition that is not known", line)
        if runs is None:
            return result if result is skipped_at else None
        return result if runs else status

    def _branch(self, runs: Status, read: Callable[[], Status]) -> tuple[Status, set[str]]:
        """Read commands and undo what they do unless they run; also return the variables that they may change."""
        variables = self.variables
        before, exported, commands = dict(variables.values), set(variables.exported), len(self.commands)
        status = read()
        if runs:
            return status, set()
        after, variables.values = variables.values, before
        if runs is None:
            return status, {name for name in {*after, *before} if after.get(name) != before.get(name)}
        variables.exported = exported
        del self.commands[commands:]
        return status, set()

    def _forget(self, names: Iterable[str], reason: str, line: int) -> None:
        for name in names:
            self.variables.values[name] = (self.variables.unknown(f"${name}", reason, line),)

    def _command(self) -> Status:
        line = self.line
        if self.match(ARITHMETIC_COMMAND):
            return None
        if unsupported := self.match(UNSUPPORTED_COMMAND):
            raise self.error(f"`{unsupported[0]}` is not supported here", "write the commands without it", line)
        if self.match(FUNCTION):
            self.skip_lines()
            self._follow_unknown("function", self._command, line)
            return True
        keyword = self.match(COMPOUND)
        status: Status = True
        match keyword[0] if keyword else "":
            case "!":
                self.match(BLANKS)
                status = self._command()
                return None if status is None else not status
            case "{" | "(" as opening:
                status = self.read_commands(opening, "}" if opening == "{" else ")")
            case "if":
                self._if(line)
            case "case":
                self._case(line)
            case "for" | "while" | "until" as opening:
                self._follow_unknown(opening, partial(self._loop, opening, line), line)
            case _:
                return self._simple_command()
        self.skip_redirections()
        return status

    def _if(self, line: int) -> None:
        reason = ""
        changed: set[str] = set()
        ran: Status = False
        self.ended_by = ""
        while self.ended_by != "fi":
            self.unknown_in_condition = ""
            condition = True if self.ended_by == "else" else self.read_commands("if", "then")
            if self.unknown_in_condition:
                reason = f", where {self.unknown_in_condition}"
            runs = False if ran or condition is False else None if None in (ran, condition) else True
            _, changed_here = self._branch(runs, partial(self.read_commands, "if", "elif", "else", "fi"))
            changed |= changed_here
            ran = ran if runs is False else runs
        self._forget(changed, f"depends on the condition at line {line}{reason}", line)

    def _follow_unknown(self, keyword: str, read: Callable[[], Status], line: int) -> None:
        """Read a loop, a function or a `case`: whether it runs is unknown."""
        _, changed = self._branch(None, read)
        self._forget(changed, f"depends on the `{keyword}` at line {line}, which is not followed", line)

    def _loop(self, keyword: str, line: int) -> Status:
        if keyword == "for":
            header = self.match(LOOP_HEADER)
            self._forget(filter(None, header.groups() if header else ()), f"changes in the loop at line {line}", line)
            self.read_words()
        self.read_commands(keyword, "do")
        return self.read_commands(keyword, "done")

    def _case(self, line: int) -> None:
        """Follow the first branch whose pattern matches; if that is unknown, read all that may be the first."""
        self.match(BLANKS)
        word = self.read_word()
        unknown = self.variables.find_unknown(word.text)
        self.skip_lines()
        self.take("in")
        changed: set[str] = set()
        ran: Status = False
        for _ in self.lines_until("case", "esac"):
            pattern = self.match(CASE_PATTERN)
            matches = None if unknown or pattern is None else _matches_pattern(word.text, pattern[0])
            runs = False if ran or matches is False else None if None in (ran, matches) else True
            _, changed_here = self._branch(runs, partial(self.read_commands, "case", ";;", "esac"))
            changed |= changed_here
            ran = ran if runs is False else runs
            if self.ended_by == "esac":
                break
        reason = f", where {unknown}" if unknown else ""
        self._forget(changed, f"depends on the `case` at line {line}{reason}", line)

    def _simple_command(self) -> Status:
        """Read assignments, or a program with its arguments, for which assignments before it do not count."""
        before = dict(self.variables.values)
        self.skip_redirections()
        while ASSIGNMENT.match(self.text, self.position):
            self._assign([self.read_word()])
            self.skip_redirections()
        self.variables.values, after = before, self.variables.values
        words = self.read_words()
        if not words:
            self.variables.values = after
            return True
        status = self._built_in(words[0].source, words[1:])
        if status is None:
            arguments = tuple(Argument(text, word.line) for word in words for text in word.fields)
            self.commands += [arguments] if arguments else []
            unknown = self.variables.find_unknown("".join(word.text for word in words))
            self.unknown_in_condition = str(unknown or self.unknown_in_condition)
        return status

    def _assign(self, words: Iterable[Word]) -> None:
        """Set variables; words without `=`, as after `export`, are left out."""
        for word in words:
            if matched := ASSIGNMENT.match(word.source):
                name, index, append = matched.groups()
                before = self.variables.values.get(name, ()) if append else ()
                text = "".join(before[:1]) + word.text[matched.end() :]
                values = (text,) if word.items is None else (*before, *word.items)
                self.variables.assign(name, values, word.line)
                if index:
                    self._forget([name], "is an array with assigned elements: not supported", word.line)

    def _built_in(self, name: str, words: Sequence[Word]) -> Status:
        """Apply a command that the shell itself runs; None for others."""
        match name:
            case "[" | "[[" | "test":
                return self._test(words if name == "test" else words[:-1], glob=name == "[[")
            case "export" | "local" | "declare" | "readonly":
                self._assign(words)
                if name == "export":
                    self.variables.exported |= {re.split(r"\+?=", word.source)[0] for word in words}
            case "cd":
                directory = Path(self.variables.scalar("PWD") or ".", *(word.text for word in words[-1:]))
                self.variables.assign("PWD", (str(directory),), self.line)
            case "read":
                self._forget((word.text for word in words if word.text.isidentifier()), PROMPTED, self.line)
            case "unset":
                self.variables.values |= {word.text: () for word in words}
            case "true" | "false" | ":":
                return name != "false"
            case _:
                return None
        return True

    def _test(self, words: Sequence[Word], *, glob: bool) -> Status:
        """Evaluate the words of `[ … ]`, `[[ … ]]` or `test …`."""
        match [text for word in words for text in word.fields or [""]]:
            case texts if any(map(MARKER.search, texts)):
                return None
            case ["!", *_]:
                status = self._test(words[1:], glob=glob)
                return None if status is None else not status
            case [text]:
                return text != ""
            case ["-z" | "-n" as name, text]:
                return (text == "") is (name == "-z")
            case [name, path] if name in FILE_TESTS:
                return FILE_TESTS[name](path)
            case [left, "=" | "==" | "!=" as name, right]:
                return (fnmatchcase(left, right) if glob else left == right) is (name != "!=")
            case [left, name, right] if name in COMPARISONS and INTEGER.fullmatch(left) and INTEGER.fullmatch(right):
                return bool(COMPARISONS[name](int(left), int(right)))
        return None
