"""The commands that a shell script runs, followed without running any.

Loops over known words are unrolled, functions are followed where they are called, and the conditions of `if`, `case`
and `while` are evaluated. Where that is not possible, all branches are read, and the variables that they set become
unknown.
"""

from __future__ import annotations

import re
from functools import partial

from quintet.config.dialects.scripts.brace_expansion import SKIPPED
from quintet.config.dialects.scripts.conditions import Status, any_of, runs_after
from quintet.config.dialects.scripts.inner_scripts import MAX_DEPTH
from quintet.config.dialects.scripts.loops import Loops
from quintet.config.dialects.scripts.patterns import matches
from quintet.config.dialects.scripts.simple_command_reader import SimpleCommandReader
from quintet.config.dialects.scripts.simple_commands import ScriptCommands
from quintet.config.dialects.scripts.text_reader import BLANKS
from quintet.config.dialects.scripts.variables import MARKER, Variables
from quintet.errors import ConfigError

COMPOUND = re.compile(r"\((?!\()|(?:if|case|for|while|until|\{)(?=[ \t\n(])")
UNSUPPORTED_COMMAND = re.compile(r"\(\(|[;&|)]+|(?:select|coproc|then|elif|else|fi|do|done|esac|\})(?![^\s;&|()<>])")
FUNCTION = re.compile(r"function[ \t]+(?P<keyword>[^\s()]+)(?:[ \t]*\([ \t]*\))?|(?P<name>[\w.:-]+)[ \t]*\([ \t]*\)")
CASE_PATTERN_END = re.compile(r"[ \t\n]*(?P<end>[|)])")
ARITHMETIC_COMMAND = re.compile(r"\(\((?P<expression>(?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")
SUBSTITUTION_STATE = (
    *("output", "jump", "jump_line", "jump_reason", "exit_status", "possible_jumps", "undecided", "tested", "levels"),
    *("redirected", "stdin", "is_prompted", "has_input_file", "status", "unknown_in_condition", "depth", "ended_by"),
    *("here_documents", "compound_depth", "loop_depth", "condition"),
)
"""Attributes of a reader that the commands of a `$(…)` do not change."""


def read_commands(text: str, variables: Variables, first_line: int = 1) -> ScriptCommands:
    """Return the commands of a script that run or may run, while `variables` follow the script.

    Raises:
        ConfigError: a quote or a bracket is not closed, or a command is not supported.
    """
    reader = CommandReader(text, variables, first_line)
    try:
        reader.read_commands()
        commands, exit_line = tuple(reader.commands), reader.jump_line if reader.jump else None
        jump_reason = reader.jump_reason
        reader.read_uncalled_functions()
    except RecursionError:
        raise reader.error("the words are nested too deeply", "write them out", reader.line) from None
    reason = jump_reason
    return ScriptCommands(commands, tuple(reader.commands), exit_line, reason, tuple(reader.after_exit))


class CommandReader(SimpleCommandReader):
    """Follows the commands of a script."""

    def __init__(self, text: str, variables: Variables, first_line: int) -> None:
        super().__init__(text, variables, first_line)
        self.loops = Loops(self, self.built_ins)

    def read_uncalled_functions(self) -> None:
        """Read the functions that the script does not call, with unknown arguments, in place of its commands.

        What they would do to readonly variables is no error, since bash does not run them.
        """
        self.commands, self.jump = [], ""
        self.variables.attributes = {name: each.replace("r", "") for name, each in self.variables.attributes.items()}
        for name, function in list(self.variables.functions.items()):
            if name not in self.called and function is not None:
                with self.inner_scripts.reading(*function):
                    self.branch(None, self.command)

    def substituted(self, start: int, opening: str = "$(") -> str:
        ends = () if opening == "`" else (")",)
        if self.depth >= MAX_DEPTH:
            raise self.error("the words are nested too deeply", "write them out", self.line)
        inside, state, line = self.position, self.variables.state(), self.line
        reader_state = {name: getattr(self, name) for name in SUBSTITUTION_STATE}
        count = len(self.commands)
        self.output, self.possible_jumps, self.here_documents, self.undecided, self.tested = [], set(), [], 0, 0
        self.variables.options -= {"e", "?e"}
        self.depth += 1
        try:
            status = self.read_commands("" if opening == "`" else "$(", *ends)
            output = self.joined_output(0) if not self.possible_jumps else None
            self.substitution_status = None if self.possible_jumps else self.exit_status if self.jump else status
        except ConfigError:
            self.position = inside
            if opening == "`" or not self._skip_parentheses():
                raise
            output, self.substitution_status = None, None
            del self.commands[count:]
        self.variables.reset(state)
        for name, value in reader_state.items():
            setattr(self, name, value)
        if output is not None or self.skipped:
            return (output or "").rstrip("\n")
        shown = " ".join(self.text[inside : self.position - len(ends)].split())
        shown = shown if len(shown) <= 40 else f"{shown[:39]}…"
        construct = f"`{shown}`" if opening == "`" else f"$({shown})"
        return self.variables.unknown(construct, "is the output of a program, and none is run here", line)

    def _skip_parentheses(self) -> bool:
        """Skip the text up to the parenthesis that is closed; return whether there is one."""
        depth = 1
        while depth and not self.at_end:
            if self.match(SKIPPED) is None:
                depth += {"(": 1, ")": -1}.get(self.text[self.position], 0)
                self.position += 1
        return depth == 0

    def is_compound(self) -> bool:
        matched = COMPOUND.match(self.text, self.position)
        return matched is not None and matched[0] != "("

    def command(self) -> Status:
        line = self.line
        if arithmetic := self.match(ARITHMETIC_COMMAND):
            self.counts_arguments = "$#" in arithmetic[0] and self.variables.arguments is None
            self.skip_redirections()
            return (
                None
                if self.skipped
                else self.built_ins.assignments.assign_arithmetic(self.expand(arithmetic[1]), arithmetic[0])
            )
        if unsupported := self.match(UNSUPPORTED_COMMAND):
            raise self.error(f"`{unsupported[0]}` is not supported here", "write the commands without it", line)
        if function := self.match(FUNCTION):
            self._define_function(function["keyword"] or function["name"])
            return True
        keyword = self.match(COMPOUND)
        if keyword is None:
            return self.simple_command()
        printed = len(self.output)
        self.compound_depth += 1
        status = self._compound_command(keyword[0], line)
        self.compound_depth -= 1
        self.redirected = False
        self.skip_redirections()
        if self.redirected:
            del self.output[printed:]
        self.redirected = False
        return status

    def _compound_command(self, keyword: str, line: int) -> Status:
        match keyword:
            case "{":
                return self.read_commands("{", "}")
            case "(":
                return self._subshell()
            case "if":
                return self._if(line)
            case "case":
                return self._case(line)
            case "for":
                return self.loops.follow_for(line)
        return self.loops.follow_while(keyword, line)

    def _define_function(self, name: str) -> None:
        self.skip_lines()
        function = self.inner_scripts.current_text(), self.position
        self.branch(False, self.command)
        if not self.skipped:
            self.variables.functions[name] = function

    def _subshell(self) -> Status:
        """Read the commands of `(…)`, which change no variables outside."""
        state, jump = self.variables.state(), self.jump
        jumps = set(self.possible_jumps)
        status = self.read_commands("(", ")")
        if self.jump != jump or self.possible_jumps != jumps:
            status = None if self.possible_jumps != jumps else self.exit_status
        self.variables.reset(state)
        self.jump, self.possible_jumps = jump, jumps
        return status

    def _if(self, line: int) -> Status:
        reason, outside = "", self.condition
        changed: set[str] = set()
        statuses: list[Status] = []
        ran: Status = False
        self.ended_by = ""
        while self.ended_by != "fi":
            self.unknown_in_condition = ""
            condition: Status = True
            if self.ended_by != "else":
                start = self.position
                with self.in_test():
                    condition, _ = self.branch(ran is not True, partial(self.read_commands, "if", "then"))
                self.condition = self.text[start : self.position].removesuffix("then").strip(" \t\n;")
            if self.unknown_in_condition:
                reason = f", where {self.unknown_in_condition}"
            runs = runs_after(ran, condition)
            status, changed_here = self.branch(runs, partial(self.read_commands, "if", "elif", "else", "fi"))
            statuses += [status] if runs is not False else []
            changed |= changed_here
            ran = any_of((ran, runs))
        self.condition = outside
        self.variables.forget(changed, f"depends on the condition at line {line}{reason}", line)
        return (statuses[0] if statuses else True) if ran is not None and len(statuses) < 2 else None

    def _case(self, line: int) -> Status:
        """Follow the first branch whose pattern matches; if that is unknown, read all that may be the first."""
        self.match(BLANKS)
        word = self.read_word(is_assignment=True)
        unknown, outside = self.variables.find_unknown(word.text), self.condition
        self.condition = f"case {word.source} in"
        self.skip_lines()
        if not self.take("in"):
            raise self.error("the `case` has no `in`", "write `case WORD in`", line)
        changed: set[str] = set()
        statuses: list[Status] = []
        ran: Status = False
        for _ in self.lines_until("case", "esac"):
            self.skipped += ran is True
            match = self._matches_patterns(word.text, line)
            self.skipped -= ran is True
            match = None if unknown else match
            runs = runs_after(ran, match)
            status, changed_here = self.branch(runs, partial(self.read_commands, "case", ";;&", ";;", ";&", "esac"))
            if self.ended_by in (";;&", ";&"):
                raise self.error(f"`{self.ended_by}` is not supported", "end the branch with `;;`", self.line)
            statuses += [status] if runs is not False else []
            changed |= changed_here
            ran = any_of((ran, runs))
            if self.ended_by == "esac":
                break
        self.condition = outside
        reason = f", where {unknown}" if unknown else ""
        self.variables.forget(changed, f"depends on the `case` at line {line}{reason}", line)
        return (statuses[0] if statuses else True) if ran is not None and len(statuses) < 2 else None

    def _matches_patterns(self, text: str, line: int) -> Status:
        """Read the patterns of a branch, such as `gpu|cuda)`; return whether one matches."""
        self.take("(")
        statuses: list[Status] = []
        while True:
            self.match(BLANKS)
            pattern = self.read_word(is_assignment=True)
            statuses.append(None if MARKER.search(pattern.expansion) else matches(text, pattern.expansion))
            end = self.match(CASE_PATTERN_END)
            if end is None:
                raise self.error(f"the pattern {pattern.source} is not supported", "write it in another way", line)
            if end["end"] == ")":
                return any_of(statuses)
