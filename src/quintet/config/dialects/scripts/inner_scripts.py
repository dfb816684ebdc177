"""Commands outside a script's own text: files of `source`, words of `eval`, and scripts that it runs in a shell."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from quintet.config.dialects.scripts.conditions import Status
from quintet.config.dialects.scripts.loops import LoopReader
from quintet.config.dialects.scripts.shell_variables import MARKER, Variables, cleaned
from quintet.config.dialects.scripts.shell_words import SCRIPT_ARGUMENTS, Word
from quintet.config.yaml_reader import read_text
from quintet.errors import ConfigError, MachineError

MAX_DEPTH = 12
"""Calls of functions, `$(…)`, `source`, `eval` and scripts inside one another."""
ASSIGNED_NAME = re.compile(r"(?<![\w$.-])([A-Za-z_]\w*)(?:\[[^\]]*\])?\+?=")
UNKNOWN_COMMAND = re.compile(r"(?:^|[;&|\n({])\s*(?:(?:export|declare|typeset|local|readonly)\s+)?\w*\ue000")
"""A command, or the variable that it sets, that is not known."""
STARTS_PYTHON = re.compile(r"\s-m\s|\.py\b")
SHELL = re.compile(r"(?:\S*/)?(?:bash|sh|zsh|dash)")
PREFIXES = ("exec", "nohup", "time", "env", "command")
"""Programs that run the program in their arguments."""
READER_STATE = (
    *("text", "line_breaks", "first_line", "position", "here_documents", "here_string", "redirected", "ended_by"),
    *("skipped", "undecided", "skipped_to", "depth", "start_line", "possible_jumps", "source_depth"),
    "unknown_in_condition",
)
"""Attributes of a reader that another text does not change."""
PROCESS_STATE = (
    *("functions", "local_values", "jump", "jump_line", "levels", "counts_arguments", "source_depth", "in_process"),
    "possible_jumps",
)
"""Attributes of a reader that a script in a process of its own does not change."""
PROCESS_VARIABLES = ("values", "exported", "exports_all", "integers", "arguments", "choices")
"""Attributes of the variables that such a script does not change."""


@dataclass(frozen=True, slots=True)
class ScriptText:
    """Text with commands, and where it stands."""

    text: str
    first_line: int
    path: Path
    line_breaks: list[int]
    skipped_to: dict[tuple[int, tuple[str, ...]] | None, tuple[int, str]] = field(default_factory=dict)


def script_arguments(fields: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the script that a command runs in a shell, and the arguments; None for other commands."""
    rest = list(fields)
    while rest and (rest[0] in PREFIXES or (len(rest) < len(fields) and re.match(r"[A-Za-z_]\w*=", rest[0]))):
        del rest[0]
    is_shell = bool(rest) and SHELL.fullmatch(rest[0]) is not None
    del rest[: int(is_shell)]
    while is_shell and rest and re.fullmatch(r"[-+][A-Za-z]+", rest[0]) and "c" not in rest[0]:
        del rest[: 2 if rest[0].endswith("o") else 1]
    if not rest or rest[0].startswith("-") or not (is_shell or rest[0].endswith((".sh", ".bash"))):
        return None
    if not is_shell and "/" not in rest[0]:
        return None
    # a launcher, such as `bash launch.sh python -m …`, is given the command that it runs
    return None if any(each == "-m" or each.endswith(".py") for each in rest) else (rest[0], rest[1:])


class InnerScriptReader(LoopReader):
    """Follows `source`, `eval` and `bash FILE`."""

    def __init__(self, text: str, variables: Variables, first_line: int) -> None:
        super().__init__(text, variables, first_line)
        self.functions: dict[str, tuple[ScriptText, int]] = {}
        """Text and position of the body of each function."""
        self.depth = self.source_depth = 0
        self.start_line: int | None = None
        """Line of the main script at which another file is read; None in the main script."""
        self.in_process = False
        """Whether the commands are those of a script in a process of its own."""
        self.counts_arguments = False
        """Whether the last condition compares the number of the script's arguments."""

    def built_in(self, name: str, words: Sequence[Word]) -> Status:
        match name:
            case "source" | ".":
                return self._source(words)
            case "eval":
                return self._eval(words)
        return super().built_in(name, words)

    def current_text(self) -> ScriptText:
        """Return the text that is being read."""
        return ScriptText(self.text, self.first_line, self.variables.path, self.line_breaks, self.skipped_to)

    @contextmanager
    def reading(self, text: ScriptText, position: int = 0) -> Iterator[None]:
        """Read another text, and go on with this one afterwards."""
        state = {name: getattr(self, name) for name in READER_STATE}
        path, count, line = self.variables.path, len(self.local_values), self.line
        self.start_line = self.start_line or (line if text.path != path else None)
        self.text, self.first_line, self.line_breaks = text.text, text.first_line, text.line_breaks
        self.skipped_to, self.variables.path, self.position = text.skipped_to, text.path, position
        self.here_documents, self.possible_jumps = [], set()
        self.depth += 1
        try:
            yield
        finally:
            for name, value in state.items():
                setattr(self, name, value)
            self.variables.path = path
            del self.local_values[count:]
            if self.jump:
                self.jump_line = line if text.path != path else self.jump_line

    @contextmanager
    def arguments(self, arguments: tuple[str, ...]) -> Iterator[None]:
        """Set `$1`, `$2`, … for a while."""
        variables = self.variables
        numbers = {name: value for name, value in variables.values.items() if name.isdecimal() or name == "#"}
        outside, variables.arguments = variables.arguments, ()
        self.set_arguments(arguments)
        try:
            yield
        finally:
            self.restore(dict.fromkeys(name for name in variables.values if name.isdecimal()))
            self.restore(numbers)
            variables.arguments = outside

    def restore(self, values: Mapping[str, tuple[str, ...] | None]) -> None:
        """Set variables to earlier values; None unsets them."""
        for name, value in values.items():
            self.variables.values.pop(name, None)
            self.variables.values |= {} if value is None else {name: value}

    def _commands_of(self, text: ScriptText) -> Status:
        """Follow the commands of another text in the same shell."""
        before, printed, redirected = dict(self.variables.values), len(self.output or ()), self.redirected
        with self.reading(text):
            status, jumps = self.read_commands(), self.possible_jumps
        if redirected and self.output is not None:
            del self.output[printed:]
        may_return = "return" in jumps and text.path != self.variables.path
        self.possible_jumps = self.possible_jumps | (jumps - {"return"} if may_return else jumps)
        if may_return:
            self.forget(self._changes(before), f"may be set by {text.path}", self.line)
        return None if may_return else status

    def _source(self, words: Sequence[Word]) -> Status:
        """Follow the commands of a file in the same shell."""
        name, *arguments = [text for word in words for text in word.arguments] or [""]
        script_text = self._script_text(name)
        if isinstance(script_text, str):
            self.variables.add_unread(self.variables.shown(name) or "the file of `source`", script_text, self.line)
            return None
        outside = {"BASH_SOURCE": self.variables.values["BASH_SOURCE"]}
        self.variables.values["BASH_SOURCE"] = (name,)
        self.source_depth += 1
        try:
            if not arguments:
                return self._followed(script_text, name)
            with self.arguments(tuple(arguments)):
                return self._followed(script_text, name)
        finally:
            self.source_depth -= 1
            self.restore(outside)

    def _followed(self, text: ScriptText, name: str) -> Status:
        """Follow a text; if it has a command that is not supported, what it sets is unknown."""
        before, exported, count = dict(self.variables.values), set(self.variables.exported), len(self.commands)
        printed, choices = len(self.output or ()), self.variables.choices
        try:
            status = self._commands_of(text)
        except ConfigError as error:
            if text.path == self.variables.path and STARTS_PYTHON.search(text.text):
                raise  # of `eval`
            self.variables.values, self.variables.exported, self.variables.choices = before, exported, choices
            self.jump = ""
            del self.commands[count:]
            if self.output is not None:
                del self.output[printed:]
            reason = str(error).splitlines()[0]
            self.forget_assigned(text.text, f"may be set by {name}, which cannot be followed ({reason})")
            self.variables.add_unread(name, f"cannot be followed ({reason})", self.line)
            return None
        if self.jump == "return" and text.path != self.variables.path:
            self.jump, status = "", None
        return status

    def forget_assigned(self, text: str, reason: str) -> None:
        """Make the variables unknown that commands assign."""
        self.forget(set(ASSIGNED_NAME.findall(text)), reason, self.line)

    def _eval(self, words: Sequence[Word]) -> Status:
        """Follow the command in the words of `eval`."""
        text = " ".join(field for word in words for field in word.arguments)
        shown = f"`eval {self.variables.shown(text)[:40]}`"
        if UNKNOWN_COMMAND.search(text) or self.depth >= MAX_DEPTH:
            self.forget_assigned(text, f"may be set by {shown}")
            self.variables.add_unread(shown, "has a command that is not known", self.line)
            if not STARTS_PYTHON.search(text) or self.depth >= MAX_DEPTH:
                self.print_text(None)
                return None
        return self._followed(self._as_text(text, self.line, self.variables.path), shown)

    def _as_text(self, text: str, first_line: int, path: Path) -> ScriptText:
        text = cleaned(text, keep_markers=True) if path == self.variables.path else cleaned(text)
        return ScriptText(text, first_line, path, [matched.start() for matched in re.finditer("\n", text)])

    def _script_text(self, name: str) -> ScriptText | str:
        """Return the text of a file that a script names; otherwise why it cannot be read."""
        directory = self.variables.scalar("PWD") or "."
        if MARKER.search(name):
            return "has a name that is not known"
        if MARKER.search(directory) and not os.path.isabs(name):
            return "is in a directory that is not known"
        path = Path(directory, name)
        relative = os.path.relpath(path)
        shown = path if os.path.isabs(name) or relative.startswith("..") else Path(relative)
        if self.depth >= MAX_DEPTH:
            return "is read too deeply inside other files"
        if not os.path.isfile(path):
            return "is no file on this machine"
        try:
            return self._as_text(read_text(path), 1, shown)
        except MachineError as error:
            return f"cannot be read ({str(error).splitlines()[0]})"

    def run_inner_script(self, words: Sequence[Word], prefixed: Iterable[str]) -> None:
        """Follow a script that runs in a process of its own, with the exported and the `prefixed` variables.

        One that cannot be followed is left out.
        """
        inner = script_arguments([text for word in words for text in word.arguments])
        if inner is None or any(word.count_is_unknown for word in words):
            return
        script_text = self._script_text(inner[0])
        if isinstance(script_text, str):
            self.variables.not_followed[self.variables.place(self.line)] = script_text
            return
        count, reason = len(self.commands), ""
        passes_own = any(SCRIPT_ARGUMENTS.search(word.source) for word in words)
        with self._process(inner[0], words, prefixed):
            if inner[1] or not passes_own:
                self.variables.arguments = ()
                self.set_arguments(tuple(inner[1]))
            try:
                self._commands_of(script_text)
            except ConfigError as error:
                del self.commands[count:]
                reason = f"cannot be followed ({str(error).splitlines()[0]})"
        if reason:
            self.variables.not_followed[self.variables.place(self.line)] = reason
        if words[0].source == "exec":
            self.jump, self.jump_line = "exit", self.line

    @contextmanager
    def _process(self, name: str, words: Sequence[Word], prefixed: Iterable[str]) -> Iterator[None]:
        """Begin a process for a script, which gets the variables that are exported."""
        variables = self.variables
        state = {each: getattr(self, each) for each in PROCESS_STATE}
        outside = {each: getattr(variables, each) for each in PROCESS_VARIABLES}
        values = variables.values
        env_words = takewhile(lambda word: "=" in word.text, words[1:] if words[0].source == "env" else ())
        in_env = dict(word.text.split("=", 1) for word in env_words)
        variables.exported = variables.exported | {*prefixed, *in_env}
        passed = variables.exported | variables.inherited
        variables.values = {each: value for each, value in values.items() if each in passed}
        variables.values |= {each: (value,) for each, value in in_env.items()}
        variables.values |= {"0": (name,), "BASH_SOURCE": (name,), "#": ("0",)}
        variables.values |= {"PWD": values["PWD"]} if "PWD" in values else {}
        variables.exports_all, variables.integers = False, set()
        if variables.arguments is not None:
            variables.arguments = ()
        self.functions, self.local_values, self.jump, self.source_depth, self.in_process = {}, [], "", 0, True
        try:
            yield
        finally:
            for attribute, before in outside.items():
                setattr(variables, attribute, before)
            for attribute, before in state.items():
                setattr(self, attribute, before)
