"""The commands that a shell script runs, matched without running it.

A condition such as `[ "$MODE" = fast ]` is evaluated. If that is not possible, both branches are followed, and the
variables that they set become unknown. Functions and loops are followed once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from quintet.config.dialects.scripts.expansion import MARKER, Field, Shell
from quintet.config.dialects.scripts.shell_parser import Command, PartKind, Word, parse_commands

PREFIXES = {"!", "time"}
DECLARATIONS = {"export", "local", "declare", "typeset", "readonly"}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
INTEGERS = re.compile(r"-?\d{1,18} -?\d{1,18}")
COMPARISONS = {"-eq": "__eq__", "-ne": "__ne__", "-lt": "__lt__", "-le": "__le__", "-gt": "__gt__", "-ge": "__ge__"}

Truth = bool | None
"""None if it is unknown."""


@dataclass(frozen=True, slots=True)
class ScriptCommand:
    """A command that a script runs, or may run."""

    words: tuple[Field, ...]
    line: int
    comment_lines: tuple[int, ...] = ()
    """Comment lines inside the command, at which a shell would end it."""


@dataclass(slots=True)
class _Block:
    """An `if`, a loop, or a `case` around the current command."""

    kind: str
    line: int
    runs: Truth = True
    """Whether the current branch runs."""
    done: Truth = False
    """Whether an earlier branch ran."""
    condition: Truth = True
    operator: str = "&&"
    """Operator before the next command of the condition."""
    in_condition: bool = True
    reason: str = ""
    """Why the condition is unknown."""
    has_group: bool = False
    """Whether the condition has commands in braces, which are not evaluated."""
    before: dict[str, str | tuple[str, ...] | None] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    """Variables that branches which may run have changed."""


def commands_of(text: str, shell: Shell, first_line: int = 1) -> Iterator[ScriptCommand]:
    """Yield the commands of a script that run or may run, while the variables of `shell` follow the script.

    Raises:
        ConfigError: a quote or a bracket is not closed.
    """
    flow = _ControlFlow(shell)
    for command in parse_commands(text, str(shell.path), first_line):
        yield from flow.follow(command)


class _ControlFlow:
    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.blocks: list[_Block] = []
        self.status: Truth = True
        self.operator = "\n"

    def follow(self, command: Command) -> Iterator[ScriptCommand]:
        words = self._after_keywords(command)
        block = self.blocks[-1] if self.blocks else None
        if block is not None and block.kind == "case" and block.in_condition:
            self._case_pattern(block, command.separator)
        elif block is not None and block.in_condition:
            if words:
                self._add_condition(block, self._test(words), words)
            block.operator = command.separator
        elif words and self._runs() is not False:
            yield from self._simple_command(words, command)
        self.operator = command.separator
        if command.separator == ";;" and block is not None:
            self._leave_branch(block)
            block.in_condition = True

    def _runs(self) -> Truth:
        runs = [block.runs for block in self.blocks]
        if self.operator in ("&&", "||"):
            runs.append(None if self.status is None else self.status is (self.operator == "&&"))
        return False if False in runs else None if None in runs else True

    def _after_keywords(self, command: Command) -> Sequence[Word]:
        """Enter and leave blocks at the keywords that begin a command; return the words after them."""
        words = command.words
        while words and (keyword := words[0].literal) is not None:
            if keyword in ("if", "while", "until", "for", "select", "case", "function"):
                return self._enter(keyword, words[1:], command.line)
            if keyword in ("then", "else", "elif", "do", "fi", "done", "esac"):
                self._turn(keyword)
            elif keyword == "{" and self.blocks and self.blocks[-1].in_condition:
                self.blocks[-1].has_group, self.blocks[-1].reason = True, ", and `{ … }` in conditions is not evaluated"
            elif keyword not in PREFIXES and keyword not in ("{", "}"):
                break
            words = words[1:]
        return words

    def _enter(self, kind: str, words: tuple[Word, ...], line: int) -> Sequence[Word]:
        if kind in ("for", "select"):
            items = self.shell.items(words[2:])
            if words and (name := words[0].literal):
                several = self.shell.unknown(f"${name}", f"changes in the loop at line {line}", line)
                self.shell.assign(name, items[0] if len(items) == 1 else several, line)
            self.blocks.append(_Block("loop", line, in_condition=False))
        elif kind == "case":
            self.blocks.append(_Block("case", line, condition=None, reason=", and `case` is not followed"))
        elif kind != "function":
            self.blocks.append(_Block("if" if kind == "if" else "loop", line))
            return words
        return ()

    def _turn(self, keyword: str) -> None:
        if not self.blocks:
            return
        block = self.blocks[-1]
        if keyword in ("then", "do"):
            condition = None if block.has_group else block.condition
            self._enter_branch(block, condition if block.kind == "if" else True)
            return
        if not block.in_condition:
            self._leave_branch(block)
        if keyword in ("fi", "done", "esac"):
            self._leave(self.blocks.pop())
            return
        block.condition, block.operator, block.in_condition, block.has_group = True, "&&", True, False
        if keyword == "else":
            self._enter_branch(block, True)

    def _enter_branch(self, block: _Block, condition: Truth) -> None:
        block.in_condition = False
        block.before = dict(self.shell.variables)
        if block.done is True or condition is False:
            block.runs = False
        else:
            block.runs = condition if block.done is False else None

    def _leave_branch(self, block: _Block) -> None:
        """Note what a branch changed that may run, and restore the variables."""
        if block.runs is None:
            after = self.shell.variables
            block.changed |= {name for name in {*after, *block.before} if after.get(name) != block.before.get(name)}
            self.shell.variables = dict(block.before)
        if block.kind != "loop" and block.runs is not False:
            block.done = True if block.runs or block.done else None
        block.runs = True

    def _leave(self, block: _Block) -> None:
        for name in block.changed:
            reason = f"depends on the condition at line {block.line}{block.reason}"
            self.shell.variables[name] = self.shell.unknown(f"${name}", reason, block.line)

    def _add_condition(self, block: _Block, result: Truth, words: Sequence[Word]) -> None:
        """Combine the result of one command of a condition with those before it."""
        if result is None:
            unknown = self.shell.find_unknown("".join(map(self.shell.text, words)))
            block.reason = f", where {unknown}" if unknown is not None else block.reason
        if block.operator not in ("&&", "||"):
            block.condition = result
            return
        decisive = block.operator == "||"
        results = (block.condition, result)
        block.condition = decisive if decisive in results else None if None in results else not decisive

    def _case_pattern(self, block: _Block, separator: str) -> None:
        if separator == ")":
            self._enter_branch(block, None)

    def _simple_command(self, words: Sequence[Word], command: Command) -> Iterator[ScriptCommand]:
        """Apply assignments and built-in commands, and yield the command with its expanded words."""
        runs = self._runs()
        rest = list(words)
        while rest and ASSIGNMENT.match(_literal_start(rest[0])):
            rest.pop(0)
        if not rest:
            self._assign(words, runs)
            self.status = True
            return
        name = rest[0].literal
        if name in DECLARATIONS:
            self._assign([word for word in rest[1:] if ASSIGNMENT.match(_literal_start(word))], runs)
            if name == "export":
                self.shell.exported |= {_literal_start(word).partition("=")[0].rstrip("+") for word in rest[1:]}
            return
        if name in ("read", "unset", "mapfile", "readarray", "cd"):
            self._built_in(name, rest[1:], command.line)
        self.status = self._test(rest) if name in ("[", "[[", "test", "true", "false", ":") else True
        if fields := tuple(item for word in rest for item in self.shell.fields(word)):
            yield ScriptCommand(fields, command.line, command.comment_lines)

    def _assign(self, words: Sequence[Word], runs: Truth) -> None:
        for word in words:
            matched = ASSIGNMENT.match(self.shell.text(word))
            if matched is None:
                continue
            name = matched[1]
            value = matched[4] if word.items is None else self.shell.items(word.items)
            if matched[2]:
                value = self.shell.unknown(f"${name}", "is an array with assigned elements: not supported", word.line)
            elif runs is None and self.operator in ("&&", "||"):
                value = self.shell.unknown(f"${name}", "is set on a condition that is not known", word.line)
            self.shell.assign(name, value, word.line, append=matched[3] == "+")

    def _built_in(self, name: str, words: Sequence[Word], line: int) -> None:
        texts = [item.text for word in words for item in self.shell.fields(word)]
        if name == "cd":
            self.shell.assign("PWD", str(Path(self.shell.value("PWD") or ".", *texts[-1:])), line)
            return
        for text in texts:
            if name == "unset":
                self.shell.variables[text] = None
            elif re.fullmatch(r"[A-Za-z_]\w*", text):
                self.shell.assign(text, self.shell.unknown(f"${text}", "is read while the script runs", line), line)

    def _test(self, words: Sequence[Word]) -> Truth:
        """Evaluate `[ … ]`, `[[ … ]]`, `test …`, `true` and `false`; None for other commands."""
        texts = [item.text for word in words for item in self.shell.fields(word) or [Field("", word.line)]]
        if texts[:1] in (["true"], [":"], ["false"]):
            return texts[0] != "false"
        if texts[:1] not in (["["], ["[["], ["test"]):
            return None
        negated = texts[1:2] == ["!"]
        inside = texts[2 if negated else 1 : len(texts) - (texts[0] != "test")]
        result = None if any(map(MARKER.search, inside)) else _evaluate_test(inside, glob=texts[0] == "[[")
        return None if result is None else result is not negated


def _literal_start(word: Word) -> str:
    first = word.parts[0] if word.parts else None
    return first.text if first is not None and first.kind is PartKind.TEXT and not first.quoted else ""


def _evaluate_test(words: list[str], *, glob: bool) -> Truth:
    match words:
        case [text]:
            return text != ""
        case ["-z" | "-n" as operator, text]:
            return (text == "") is (operator == "-z")
        case ["-e" | "-f" | "-d" as operator, name]:
            path = Path(name)
            return {"-e": path.exists, "-f": path.is_file, "-d": path.is_dir}[operator]()
        case [left, "=" | "==" | "!=" as operator, right]:
            return (fnmatchcase(left, right) if glob else left == right) is (operator != "!=")
        case [left, operator, right] if operator in COMPARISONS and INTEGERS.fullmatch(f"{left} {right}"):
            return bool(getattr(int(left), COMPARISONS[operator])(int(right)))
    return None
