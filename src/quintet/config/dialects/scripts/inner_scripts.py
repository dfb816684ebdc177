"""Commands outside a script's own text: files of `source`, words of `eval`, and scripts that it runs in a shell."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

from quintet.config.dialects.scripts.command_lists import CommandListReader
from quintet.config.dialects.scripts.conditions import Status
from quintet.config.dialects.scripts.simple_commands import ScriptText
from quintet.config.dialects.scripts.variables import ALL_NAMES, DIRECTORY, MARKER, cleaned
from quintet.config.dialects.scripts.word_reader import Word
from quintet.config.yaml_reader import read_text
from quintet.errors import ConfigError, MachineError

MAX_DEPTH = 12
"""Calls of functions, `$(…)`, `source`, `eval` and scripts inside one another."""
NAME = re.compile(r"[A-Za-z_]\w*")
SCRIPT_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*][^}]*\}")
ENVIRONMENT_TOOL = re.compile(r"\s*\ue000\d+\ue001\s*")
SETS_ENVIRONMENT = re.compile(
    r"\$\([^)]*\b(?:conda|mamba|micromamba|pyenv|direnv|ssh-agent|dircolors|brew|modulecmd)\b"
)
"""Command whose output only sets variables of tools."""
UNKNOWN_COMMAND = re.compile(r"(?:^|[;&|\n({])\s*(?:(?:export|declare|typeset|local|readonly)\s+)?\w*\ue000")
"""A command, or the variable that it sets, that is not known."""
STARTS_PYTHON = re.compile(r"\s-m\s|\.py\b")
SHELL = re.compile(r"(?:\S*/)?(?:bash|sh|zsh|dash)")
PREFIXES = ("exec", "nohup", "time", "env", "command")
"""Programs that run the program in their arguments."""
READER_STATE = (
    *("text", "line_breaks", "first_line", "position", "here_documents", "stdin", "redirected", "ended_by"),
    *("skipped", "undecided", "skipped_to", "depth", "start_line", "possible_jumps", "source_depth"),
    *("unknown_in_condition", "compound_depth", "condition"),
)
"""Attributes of a reader that another text does not change."""
PROCESS_STATE = (
    *("jump", "jump_line", "jump_reason", "levels", "counts_arguments", "source_depth", "in_process"),
    *("possible_jumps", "tested", "loop_depth", "compound_depth", "status"),
)
"""Attributes of a reader that a script in a process of its own does not change."""
PROCESS_VARIABLES = ("values", "attributes", "exported", "options", "functions", "arguments", "choices", "local_values")
"""Attributes of the variables that such a script does not change."""


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


class InnerScripts:
    """Follows the `source`, `eval` and `bash FILE` that a reader comes to."""

    def __init__(self, reader: CommandListReader) -> None:
        self.reader, self.variables = reader, reader.variables

    def current_text(self) -> ScriptText:
        """Return the text that is being read."""
        reader = self.reader
        return ScriptText(reader.text, reader.first_line, self.variables.path, reader.line_breaks, reader.skipped_to)

    @contextmanager
    def reading(self, text: ScriptText, position: int = 0) -> Iterator[None]:
        """Read another text, and go on with this one afterwards."""
        reader, variables = self.reader, self.variables
        state = {name: getattr(reader, name) for name in READER_STATE}
        path = variables.path
        count = len(variables.local_values)
        line = reader.line
        reader.start_line = reader.start_line or (line if text.path != path else None)
        reader.text, reader.first_line, reader.line_breaks = text.text, text.first_line, text.line_breaks
        reader.skipped_to = text.skipped_to
        variables.path = text.path
        reader.position = position
        reader.here_documents, reader.possible_jumps = [], set()
        reader.depth += 1
        try:
            yield
        finally:
            for name, value in state.items():
                setattr(reader, name, value)
            variables.path = path
            del variables.local_values[count:]
            if reader.jump:
                reader.jump_line = line if text.path != path else reader.jump_line

    @contextmanager
    def arguments(self, arguments: tuple[str, ...]) -> Iterator[None]:
        """Set `$1`, `$2`, … for a while."""
        variables = self.variables
        numbers = {name: value for name, value in variables.values.items() if name.isdecimal() or name == "#"}
        outside, variables.arguments = variables.arguments, ()
        self.variables.set_arguments(arguments)
        try:
            yield
        finally:
            self.variables.restore(dict.fromkeys(name for name in variables.values if name.isdecimal()))
            self.variables.restore(numbers)
            variables.arguments = outside

    def _commands_of(self, text: ScriptText) -> Status:
        """Follow the commands of another text in the same shell."""
        before = dict(self.variables.values)
        printed = len(self.reader.output)
        redirected = self.reader.redirected
        with self.reading(text):
            status, jumps = self.reader.read_commands(), self.reader.possible_jumps
        if redirected:
            del self.reader.output[printed:]
        may_return = "return" in jumps and text.path != self.variables.path
        self.reader.possible_jumps = self.reader.possible_jumps | (jumps - {"return"} if may_return else jumps)
        if may_return:
            self.variables.forget(self.variables.changes(before), f"may be set by {text.path}", self.reader.line)
        return None if may_return else status

    def source(self, words: Sequence[Word]) -> Status:
        """Follow the commands of a file in the same shell."""
        name, *arguments = [text for word in words for text in word.fields] or [""]
        script_text = self._script_text(name)
        if isinstance(script_text, str):
            shown = self.variables.shown(name) or "the file of `source`"
            self.variables.add_unread(shown, script_text, self.reader.line)
            return None
        outside = {"BASH_SOURCE": self.variables.values["BASH_SOURCE"]}
        self.variables.values["BASH_SOURCE"] = (name,)
        self.reader.source_depth += 1
        try:
            if not arguments:
                return self._followed(script_text, name)
            with self.arguments(tuple(arguments)):
                return self._followed(script_text, name)
        finally:
            self.reader.source_depth -= 1
            self.variables.restore(outside)

    def _followed(self, text: ScriptText, name: str) -> Status:
        """Follow a text; if it has a command that is not supported, what it may set is unknown."""
        reader, state, count = self.reader, self.variables.state(), len(self.reader.commands)
        printed, choices = len(reader.output), self.variables.choices
        try:
            status = self._commands_of(text)
        except ConfigError as error:
            if text.path == self.variables.path and STARTS_PYTHON.search(text.text):
                raise  # of `eval`
            self.variables.reset(state)
            self.variables.choices, reader.jump = choices, ""
            del reader.commands[count:]
            del reader.output[printed:]
            reason = str(error).splitlines()[0]
            self.forget_named(text.text, f"may be set by {name}, which cannot be followed ({reason})")
            self.variables.add_unread(name, f"cannot be followed ({reason})", reader.line)
            return None
        if reader.jump == "return" and text.path != self.variables.path:
            reader.jump, status = "", reader.exit_status
        return status

    def forget_named(self, text: str, reason: str) -> None:
        """Make the variables unknown that a text names, or all if it may set others."""
        names = set(NAME.findall(text))
        indirect = {"eval", "source", "declare", "typeset", "local"} & names or re.search(r"(?m)^\s*\.\s", text)
        self.variables.forget(names | ({ALL_NAMES} if indirect else set()), reason, self.reader.line)

    def eval(self, words: Sequence[Word]) -> Status:
        """Follow the command in the words of `eval`."""
        text = " ".join(field for word in words for field in word.fields)
        shown = f"`eval {self.variables.shown(text)[:40]}`"
        if UNKNOWN_COMMAND.search(text) or self.reader.depth >= MAX_DEPTH:
            is_tool = ENVIRONMENT_TOOL.fullmatch(text) and SETS_ENVIRONMENT.match(self.variables.shown(text).strip())
            names = set(NAME.findall(text)) if is_tool else {ALL_NAMES}
            self.variables.forget(names, f"may be set by {shown}", self.reader.line)
            self.variables.add_unread(shown, "has a command that is not known", self.reader.line)
            if not STARTS_PYTHON.search(text) or self.reader.depth >= MAX_DEPTH:
                self.reader.print_text(None)
                return None
        return self._followed(self._as_text(text, self.reader.line, self.variables.path), shown)

    def _as_text(self, text: str, first_line: int, path: Path) -> ScriptText:
        text = cleaned(text, keep_markers=True) if path == self.variables.path else cleaned(text)
        return ScriptText(text, first_line, path, [matched.start() for matched in re.finditer("\n", text)])

    def _script_text(self, name: str) -> ScriptText | str:
        """Return the text of a file that a script names; otherwise why it cannot be read."""
        directory = self.variables.scalar(DIRECTORY) or "."
        if MARKER.search(name):
            return "has a name that is not known"
        if MARKER.search(directory) and not os.path.isabs(name):
            return "is in a directory that is not known"
        path = Path(directory, name)
        relative = os.path.relpath(path)
        shown = path if os.path.isabs(name) or relative.startswith("..") else Path(relative)
        if self.reader.depth >= MAX_DEPTH:
            return "is read too deeply inside other files"
        if not os.path.isfile(path):
            return "is no file on this machine"
        if _is_linked_out(path, self.variables.script.parent):
            return "is elsewhere, by a link out of the script's directory"
        try:
            return self._as_text(read_text(path), 1, shown)
        except MachineError as error:
            return f"cannot be read ({str(error).splitlines()[0]})"

    def run(self, words: Sequence[Word], prefixed: Iterable[str]) -> bool:
        """Follow a script that runs in a process of its own, with the exported and the `prefixed` variables.

        One that cannot be followed is left out; the result is False for commands that run no script.
        """
        inner = script_arguments([text for word in words for text in word.fields])
        if inner is None or any(word.count_is_unknown for word in words):
            return False
        script_text = self._script_text(inner[0])
        if isinstance(script_text, str):
            self.variables.not_followed[self.variables.place(self.reader.line)] = script_text
            return False
        count, reason = len(self.reader.commands), ""
        passes_arguments = any(SCRIPT_ARGUMENTS.search(word.source) for word in words)
        with self._process(inner[0], words, prefixed):
            if inner[1] or not passes_arguments:
                self.variables.arguments = ()
                self.variables.set_arguments(tuple(inner[1]))
            try:
                self._commands_of(script_text)
            except ConfigError as error:
                del self.reader.commands[count:]
                reason = f"cannot be followed ({str(error).splitlines()[0]})"
        if reason:
            self.variables.not_followed[self.variables.place(self.reader.line)] = reason
        return True

    @contextmanager
    def _process(self, name: str, words: Sequence[Word], prefixed: Iterable[str]) -> Iterator[None]:
        """Begin a process for a script, which gets the variables that are exported."""
        variables, reader = self.variables, self.reader
        state = {each: getattr(reader, each) for each in PROCESS_STATE}
        outside = {each: getattr(variables, each) for each in PROCESS_VARIABLES}
        values = variables.values
        env_words = takewhile(lambda word: "=" in word.text, words[1:] if words[0].text == "env" else ())
        in_env = dict(word.text.split("=", 1) for word in env_words)
        variables.exported = variables.exported | {*prefixed, *in_env}
        passed = variables.exported | variables.inherited
        variables.values = {each: value for each, value in values.items() if each in passed}
        variables.values |= {each: (value,) for each, value in in_env.items()}
        variables.values |= {"0": (name,), "BASH_SOURCE": (name,), "#": ("0",)}
        variables.values |= {each: values[each] for each in ("PWD", DIRECTORY) if each in values}
        variables.attributes, variables.options, variables.functions = {}, set(), {}
        if variables.arguments is not None:
            variables.arguments = ()
        variables.local_values = []
        reader.jump, reader.status = "", True
        reader.source_depth, reader.tested, reader.loop_depth, reader.compound_depth = 0, 0, 0, 0
        reader.in_process = True
        try:
            yield
        finally:
            for attribute, before in outside.items():
                setattr(variables, attribute, before)
            for attribute, before in state.items():
                setattr(reader, attribute, before)


def _is_linked_out(path: Path, directory: Path) -> bool:
    """Return whether a path below a directory leads out of it by a link."""
    below = Path(os.path.abspath(path)).is_relative_to(os.path.abspath(directory))
    return below and not path.resolve().is_relative_to(directory.resolve())
