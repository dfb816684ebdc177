"""The commands that a shell script runs, followed without running any.

Loops over known words are unrolled, functions are followed where they are called, and the conditions of `if`, `case`
and `while` are evaluated. Where that is not possible, all branches are read, and the variables that they set become
unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial

from quintet.config.dialects.scripts.built_ins import ASSIGNMENT, BUILT_INS, SILENT_PROGRAMS, BuiltIns
from quintet.config.dialects.scripts.command_lists import CommandListReader
from quintet.config.dialects.scripts.commands import Argument, ScriptCommand, ScriptCommands
from quintet.config.dialects.scripts.conditions import Status, any_of, negated, runs_after
from quintet.config.dialects.scripts.inner_scripts import MAX_DEPTH, InnerScripts
from quintet.config.dialects.scripts.loops import Loops
from quintet.config.dialects.scripts.shell_variables import MARKER, Variables
from quintet.config.dialects.scripts.shell_words import BLANKS, Word
from quintet.errors import ConfigError

COMPOUND = re.compile(r"\((?!\()|(?:if|case|for|while|until|\{|!)(?=[ \t\n])")
UNSUPPORTED_COMMAND = re.compile(r"\(\(|[;&|)]+|(?:select|then|elif|else|fi|done|esac|\})(?![^\s;&|()])")
FUNCTION = re.compile(r"function[ \t]+(?P<keyword>[^\s()]+)(?:[ \t]*\([ \t]*\))?|(?P<name>[\w.:-]+)[ \t]*\([ \t]*\)")
CASE_PATTERN = re.compile(r"[^)]*\)")
ARITHMETIC_COMMAND = re.compile(r"\(\((?P<expression>(?:[^()]|\([^()]*\))*)\)\)")
TESTS = ("[", "[[", "test")
JUMPS = ("break", "continue", "return", "exit")


def read_commands(text: str, variables: Variables, first_line: int = 1) -> ScriptCommands:
    """Return the commands of a script that run or may run, while `variables` follow the script.

    Raises:
        ConfigError: a quote or a bracket is not closed, or a command is not supported.
    """
    reader = CommandReader(text, variables, first_line)
    try:
        reader.read_commands()
        commands, exit_line = tuple(reader.commands), reader.jump_line if reader.jump else None
        reader.read_uncalled_functions()
    except RecursionError:
        raise reader.error("the words are nested too deeply", "write them out", reader.line) from None
    return ScriptCommands(commands, tuple(reader.commands), exit_line, tuple(reader.after_exit))


def _matches_pattern(text: str, pattern: str) -> Status:
    """Whether a text matches the pattern of a branch, such as `gpu|cuda)`; None if only a shell can tell."""
    choices = [choice.strip() for choice in pattern.strip().removeprefix("(").removesuffix(")").split("|")]
    if any(re.search(r"[$`\\]", choice) for choice in choices):
        return None
    return any(fnmatchcase(text, re.sub("[\"']", "", choice)) for choice in choices)


class CommandReader(CommandListReader):
    """Follows the commands of a script."""

    def __init__(self, text: str, variables: Variables, first_line: int) -> None:
        super().__init__(text, variables, first_line)
        self.built_ins, self.inner_scripts = BuiltIns(self), InnerScripts(self)
        self.loops = Loops(self, self.built_ins)
        self.counts_arguments = False
        """Whether the last condition compares the number of the script's arguments."""
        self.called: set[str] = set()
        self.after_exit: list[ScriptCommand] = []

    def read_uncalled_functions(self) -> None:
        """Read the functions that the script does not call, with unknown arguments, in place of its commands."""
        self.commands, self.jump = [], ""
        for name, (text, position) in list(self.functions.items()):
            if name not in self.called:
                with self.inner_scripts.reading(text, position):
                    self.branch(None, self.command)

    def captured_output(self, start: int, commands: Sequence[Sequence[str]]) -> str | None:
        names = {command[0] for command in commands if command}
        followed = names & {*self.functions, *BUILT_INS, "if", "case", "for", "{"} or any(map(ASSIGNMENT.match, names))
        if self.skipped or self.depth >= MAX_DEPTH or not followed:
            return None
        position = self.position
        output = self.output
        values = dict(self.variables.values)
        jump = self.jump
        jumps = self.possible_jumps
        undecided = self.undecided
        count = len(self.commands)
        self.position, self.output, self.possible_jumps, self.undecided = start, [], set(), 0
        self.output_is_known = True
        self.depth += 1
        try:
            self.read_commands("$(", ")")
            text = "".join(self.output).rstrip("\n") if self.output_is_known and self.position == position else None
        except ConfigError:
            text = None
        self.depth -= 1
        self.position, self.output, self.variables.values = position, output, values
        self.jump, self.possible_jumps, self.undecided = jump, jumps, undecided
        self.output_is_known = True
        del self.commands[count:]
        return text

    def command(self) -> Status:
        line = self.line
        if arithmetic := self.match(ARITHMETIC_COMMAND):
            self.counts_arguments = "$#" in arithmetic[0] and self.variables.arguments is None
            return None if self.skipped else self.built_ins.assign_arithmetic(self.expand(arithmetic[1]), arithmetic[0])
        if unsupported := self.match(UNSUPPORTED_COMMAND):
            raise self.error(f"`{unsupported[0]}` is not supported here", "write the commands without it", line)
        if function := self.match(FUNCTION):
            self._define_function(function["keyword"] or function["name"])
            return True
        keyword = self.match(COMPOUND)
        if keyword is None:
            return self._simple_command()
        if keyword[0] == "!":
            self.match(BLANKS)
            return negated(self.command())
        printed = len(self.output or ())
        status = self._compound_command(keyword[0], line)
        self.redirected = False
        self.skip_redirections()
        if self.redirected and self.output is not None:
            del self.output[printed:]
        return status

    def _compound_command(self, keyword: str, line: int) -> Status:
        match keyword:
            case "{":
                return self.read_commands("{", "}")
            case "(":
                return self._subshell()
            case "if":
                self._if(line)
            case "case":
                self._case(line)
            case "for":
                self.loops.follow_for(line)
            case _:
                self.loops.follow_while(keyword, line)
        return True

    def _define_function(self, name: str) -> None:
        self.skip_lines()
        position = self.position
        self.branch(False, self.command)
        if not self.skipped:
            self.functions[name] = (self.inner_scripts.current_text(), position)

    def _subshell(self) -> Status:
        """Read the commands of `(…)`, which change no variables outside."""
        values = dict(self.variables.values)
        jump = self.jump
        jumps = set(self.possible_jumps)
        status = self.read_commands("(", ")")
        self.variables.values, self.jump, self.possible_jumps = values, jump, jumps
        return status

    def _if(self, line: int) -> None:
        reason = ""
        changed: set[str] = set()
        ran: Status = False
        self.ended_by = ""
        while self.ended_by != "fi":
            self.unknown_in_condition = ""
            condition: Status = True
            if self.ended_by != "else":
                condition, _ = self.branch(ran is not True, partial(self.read_commands, "if", "then"))
            if self.unknown_in_condition:
                reason = f", where {self.unknown_in_condition}"
            runs = runs_after(ran, condition)
            _, changed_here = self.branch(runs, partial(self.read_commands, "if", "elif", "else", "fi"))
            changed |= changed_here
            ran = any_of((ran, runs))
        self.variables.forget(changed, f"depends on the condition at line {line}{reason}", line)

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
            runs = runs_after(ran, matches)
            _, changed_here = self.branch(runs, partial(self.read_commands, "case", ";;", "esac"))
            changed |= changed_here
            ran = any_of((ran, runs))
            if self.ended_by == "esac":
                break
        reason = f", where {unknown}" if unknown else ""
        self.variables.forget(changed, f"depends on the `case` at line {line}{reason}", line)

    def _simple_command(self) -> Status:
        """Read assignments, or a program with its arguments, for which assignments before it do not count."""
        before = dict(self.variables.values)
        self.redirected, self.here_string = False, None
        self.skip_redirections()
        is_known = True
        while ASSIGNMENT.match(self.text, self.position):
            word = self.read_word()
            self.built_ins.assign([word])
            is_known = is_known and not ("$(" in word.source and MARKER.search(word.text))
            self.skip_redirections()
        self.variables.values, after = before, self.variables.values
        words = self.read_words()
        if not words:
            self.variables.values = after
            return True if is_known else None
        if self.skipped:
            self.after_exit += [self._script_command(words)] if self.jump == "exit" else []
            return None
        name = words[0].source
        if name in TESTS:
            self.counts_arguments = self.variables.arguments is None and any("$#" in word.source for word in words)
        is_program = name not in BUILT_INS or (name == "command" and [word.text for word in words[1:2]] != ["-v"])
        assigned = {each: before.get(each) for each in after if after[each] != before.get(each)}
        if name in JUMPS:
            return self._jump(name, words[1:])
        if not is_program or words[0].text in self.functions:
            self.variables.values = after
            follow = partial(self._call, words[0].text) if is_program else partial(self._built_in, name)
            status = follow(words[1:])
            self.variables.restore(assigned)
        else:
            status = None
            self.variables.values = after
            self._run_program(words, assigned)
            self.variables.values = before
        if status is None:
            unknown = self.variables.find_unknown("".join(word.text for word in words))
            self.unknown_in_condition = str(unknown or self.unknown_in_condition)
        return status

    def _built_in(self, name: str, words: Sequence[Word]) -> Status:
        match name:
            case "source" | ".":
                return self.inner_scripts.source(words)
            case "eval":
                return self.inner_scripts.eval(words)
        return self.built_ins.run(name, words)

    def _script_command(self, words: Sequence[Word]) -> ScriptCommand:
        path = self.variables.path
        arguments = tuple(Argument(text, word.line, path) for word in words for text in word.fields)
        start_line = self.start_line if path != self.variables.script else None
        return ScriptCommand(arguments, self.variables.known_exports(), start_line, self.in_process)

    def _run_program(self, words: Sequence[Word], assigned: Iterable[str]) -> None:
        command = self._script_command(words)
        self.commands += [command] if command.words else []
        self.inner_scripts.run(words, assigned)
        if words[0].text not in SILENT_PROGRAMS:
            self.print_text(None)

    def _jump(self, name: str, words: Sequence[Word]) -> Status:
        """Begin a `break`, `continue`, `return` or `exit`."""
        argument = next((word.text for word in words), "")
        if name == "exit" and self.counts_arguments:
            return None  # those of the script are on Quintet's command line
        self.jump = "exit" if name == "return" and not (self.variables.local_values or self.source_depth) else name
        self.jump_line = self.line
        self.levels = int(argument) if argument.isdecimal() else 1
        return argument == "0" if argument.isdecimal() else None

    def _call(self, name: str, words: Sequence[Word]) -> Status:
        """Follow a function."""
        if self.depth >= MAX_DEPTH:
            raise self.error(f"{name} is called too deeply", "write out one of its runs", self.line)
        self.called.add(name)
        variables, redirected = self.variables, self.redirected
        unknown = next((MARKER.findall(word.expansion)[0] for word in words if word.count_is_unknown), None)
        arguments = tuple(text for word in words for text in word.arguments)
        before = dict(variables.values)
        printed = len(self.output or ())
        integers = set(variables.integers)
        text, position = self.functions[name]
        with self.inner_scripts.arguments(arguments if unknown is None else (f"\ue000{unknown}\ue001",) * 9):
            with self.inner_scripts.reading(text, position):
                self.source_depth = 0
                self.variables.local_values.append({})
                status = self.command()
                may_return = "return" in self.possible_jumps
                local_values = self.variables.local_values.pop()
            if self.jump == "return":
                status, self.jump = None, ""
            if may_return:
                status = None
                self.variables.forget(self.variables.changes(before), f"may be set by {name}", self.line)
            self.variables.restore(local_values)
        variables.integers = (variables.integers - local_values.keys()) | (integers & local_values.keys())
        if redirected and self.output is not None:
            del self.output[printed:]
        return status
