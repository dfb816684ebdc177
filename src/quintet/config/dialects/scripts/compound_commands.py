"""The commands that a shell script runs, followed without running any.

Loops over known words are unrolled, functions are followed where they are called, and the conditions of `if`, `case`
and `while` are evaluated. Where that is not possible, all branches are read, and the variables that they set become
unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from quintet.config.dialects.scripts.assignments import ASSIGNMENT
from quintet.config.dialects.scripts.brace_expansion import SKIPPED
from quintet.config.dialects.scripts.builtin_commands import BUILT_INS, DECLARATIONS, BuiltIns
from quintet.config.dialects.scripts.command_lists import CommandListReader
from quintet.config.dialects.scripts.conditions import Status, any_of, runs_after
from quintet.config.dialects.scripts.inner_scripts import MAX_DEPTH, InnerScripts
from quintet.config.dialects.scripts.loops import Loops
from quintet.config.dialects.scripts.patterns import matches, protected
from quintet.config.dialects.scripts.program_output import SILENT_PROGRAMS, program_output
from quintet.config.dialects.scripts.simple_commands import Argument, ScriptCommand, ScriptCommands
from quintet.config.dialects.scripts.text_reader import BLANKS
from quintet.config.dialects.scripts.variables import ALL_NAMES, DIRECTORY, MARKER, Variables
from quintet.config.dialects.scripts.word_reader import Word
from quintet.errors import ConfigError

COMPOUND = re.compile(r"\((?!\()|(?:if|case|for|while|until|\{)(?=[ \t\n(])")
UNSUPPORTED_COMMAND = re.compile(r"\(\(|[;&|)]+|(?:select|coproc|then|elif|else|fi|do|done|esac|\})(?![^\s;&|()<>])")
FUNCTION = re.compile(r"function[ \t]+(?P<keyword>[^\s()]+)(?:[ \t]*\([ \t]*\))?|(?P<name>[\w.:-]+)[ \t]*\([ \t]*\)")
CASE_PATTERN_END = re.compile(r"[ \t\n]*(?P<end>[|)])")
ARITHMETIC_COMMAND = re.compile(r"\(\((?P<expression>(?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")
TESTS = ("[", "[[", "test")
SUBSTITUTION_STATE = (
    *("output", "jump", "jump_line", "jump_reason", "exit_status", "possible_jumps", "undecided", "tested", "levels"),
    *("redirected", "stdin", "is_prompted", "has_input_file", "status", "unknown_in_condition", "depth", "ended_by"),
    *("here_documents", "compound_depth", "loop_depth", "condition"),
)
"""Attributes of a reader that the commands of a `$(…)` do not change."""
PASSING_WORDS = ("xargs", "parallel")
"""Programs that add words of their input to the command that they run."""
JUMPS = ("break", "continue", "return", "exit")
ORPHAN = re.compile(r"[+~]{0,2}[A-Za-z_][\w@/-]*(?:\.[\w@/-]+)+=.*|[+~]{1,2}[A-Za-z_][\w.@/-]*=.*", re.DOTALL)
"""Override on a line of its own, which no backslash connects with the command before it."""


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


def _starting_with_name(words: Sequence[Word]) -> list[Word]:
    """Return the words of a command, of which the first is only its name."""
    first, *rest = [word for word in words if word.fields or word.items is not None]
    others = [Word(field, first.line, protected(field), (field,)) for field in first.fields]
    if len(others) == 1:
        return [first, *rest]
    return [*others, *rest]


class CommandReader(CommandListReader):
    """Follows the commands of a script."""

    def __init__(self, text: str, variables: Variables, first_line: int) -> None:
        super().__init__(text, variables, first_line)
        self.built_ins, self.inner_scripts = BuiltIns(self), InnerScripts(self)
        self.loops = Loops(self, self.built_ins)
        self.called: set[str] = set()
        self.after_exit: list[ScriptCommand] = []
        self.substitution_status: Status = True
        """Status of the last `$(…)` in a command."""

    def read_uncalled_functions(self) -> None:
        """Read the functions that the script does not call, with unknown arguments, in place of its commands."""
        self.commands, self.jump = [], ""
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
            return self._simple_command()
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

    def _simple_command(self) -> Status:
        """Read assignments, or a command with its arguments, for which assignments before it do not last."""
        state = self.variables.state()
        self.redirected, self.substitution_status = False, True
        self.is_prompted = self.stdin is None and not self.compound_depth and not self.depth
        self.skip_redirections()
        assigned: dict[str, tuple[str, ...] | None] = {}
        while ASSIGNMENT.match(self.text, self.position):
            word = self.read_word(is_assignment=True)
            if not self.skipped:
                name = self.built_ins.assignments.assign(word)
                assigned[name] = state.values.get(name)
            self.skip_redirections()
        after = self.variables.values
        self.variables.values = dict(state.values) if assigned else after
        words = self.read_words()
        fields = [field for word in words for field in word.fields]
        if self.skipped:
            self.after_exit += [self._script_command(words)] if self.jump == "exit" and fields else []
            return None
        if self.jump and words and words[0].source == "[[" and any(word.source in ("&&", "||") for word in words):
            # the condition may be decided before what ends the script
            self.jump = ""
            self.assumptions.append(f"the condition at line {self.line} does not end the script")
            return None
        if self.jump:  # an expansion ended the script
            self.after_exit.append(self._script_command(words))
            return None
        if not fields:
            self.variables.values = after
            if self.has_input_file:
                self.print_text(None)
            return self.substitution_status
        self.variables.values = {**self.variables.values, **{name: after[name] for name in assigned if name in after}}
        status = self._run(_starting_with_name(words), assigned)
        self.variables.restore(assigned)
        if status is None:
            unknown = self.variables.find_unknown("".join(word.text for word in words))
            self.unknown_in_condition = str(unknown or self.unknown_in_condition)
        return status

    def _run(self, words: Sequence[Word], assigned: Mapping[str, tuple[str, ...] | None]) -> Status:
        """Run a function, a builtin command or a program."""
        name, rest = words[0].fields[0], words[1:]
        fields = [field for word in words for field in word.fields]
        if name in ("command", "builtin") and rest:
            if fields[1] in ("-v", "-V"):
                return self.built_ins.is_command(fields[1:])
            rest = rest[1:] if fields[1] in ("-p", "--") else rest
            if rest and rest[0].fields[0] in (*BUILT_INS, *JUMPS):
                return self._run_built_in(rest[0].fields[0], rest[1:], assigned)
        elif name in self.variables.functions:
            return self._call(name, rest)
        elif name in (*BUILT_INS, *JUMPS) and (name != "[[" or words[0].source == name):
            return self._run_built_in(name, rest, assigned)
        if ORPHAN.fullmatch(name) or re.match(r"[A-Za-z_]\w*\[", name):
            message = f"{name} is no command: no backslash connects this line with the one before it"
            raise self.error(message, "add the backslash, or remove the line", words[0].line)
        status = self._run_program(words, fields, assigned)
        if MARKER.fullmatch(name):
            self.variables.forget([ALL_NAMES], f"may be set by the command {words[0].source}", self.line)
        return status

    def _run_built_in(self, name: str, words: Sequence[Word], assigned: Mapping[str, tuple[str, ...] | None]) -> Status:
        if name in TESTS:
            self.counts_arguments = self.variables.arguments is None and any("$#" in word.source for word in words)
        match name:
            case "source" | ".":
                return self.inner_scripts.source(words)
            case "eval":
                return self.inner_scripts.eval(words)
        if name in JUMPS:
            return self._jump(name, words)
        status = self.built_ins.run(name, words)
        if name in DECLARATIONS and {field for word in words for field in word.fields} & assigned.keys():
            raise self.error(f"an assignment before `{name}` is not supported", "write it on its own line", self.line)
        return status

    def _script_command(self, words: Sequence[Word]) -> ScriptCommand:
        path = self.variables.path
        arguments = tuple(Argument(text, word.line, path) for word in words for text in word.fields)
        start_line = self.start_line if path != self.variables.script else None
        reasons = [f"the condition before line {self.line} is met"] if self.undecided or self.possible_jumps else []
        conditions = tuple(dict.fromkeys((*self.assumptions, *reasons)))
        return ScriptCommand(arguments, self.variables.known_exports(), start_line, self.in_process, conditions)

    def _run_program(
        self, words: Sequence[Word], fields: Sequence[str], assigned: Mapping[str, tuple[str, ...] | None]
    ) -> Status:
        if fields[0] == "exec" and len(fields) == 1:
            if self.redirected:
                self.redirected = False
                self.print_text(None)
            return True
        if any(field.rpartition("/")[2] in PASSING_WORDS for field in fields):
            marker = self.variables.unknown(fields[0], "passes words of its input", self.line, is_array=True)
            words = [*words, Word("", self.line, marker, (marker,), count_is_unknown=True)]
        self.commands.append(self._script_command(words))
        followed = self.inner_scripts.run(words, assigned)
        status: Status = None
        if fields[0] not in SILENT_PROGRAMS and not followed:
            directory, path = (self.variables.scalar(name) for name in (DIRECTORY, "PATH"))
            text, status = program_output(fields, self.stdin, directory or ".", path)
            self.print_text(text)
        if fields[0] == "exec":
            self.exit_status = None
            self.end("`exec` replaces the shell")
        return status

    def _jump(self, name: str, words: Sequence[Word]) -> Status:
        """Begin a `break`, `continue`, `return` or `exit`."""
        argument = next((field for word in words for field in word.fields), "")
        if name == "exit" and self.counts_arguments:
            # those of the script are on Quintet's command line
            self.assumptions.append(f"the script is called with arguments, which line {self.line} asks for")
            return None
        if name == "return" and not (self.variables.local_values or self.source_depth):
            return False
        if name in ("break", "continue"):
            if not self.loop_depth:
                return True
            if argument and not re.fullmatch(r"[1-9]\d?", argument):
                raise self.error(f"`{name} {argument}` is not supported", "write the number of loops", self.line)
        reason = f"the condition is `{' '.join(self.condition.split())}`" if self.condition else ""
        self.jump, self.jump_line, self.jump_reason = name, self.line, reason
        self.levels = min(int(argument), self.loop_depth) if name in ("break", "continue") and argument else 1
        self.exit_status = self.status if not argument else argument == "0" if argument.isdecimal() else None
        return self.exit_status

    def _call(self, name: str, words: Sequence[Word]) -> Status:
        """Follow a function."""
        function, variables, line = self.variables.functions[name], self.variables, self.line
        if function is None:
            variables.forget([ALL_NAMES, "@"], f"may be set by {name}, which depends on a condition", line)
            self.print_text(None)
            return None
        if self.depth >= MAX_DEPTH:
            raise self.error(f"{name} is called too deeply", "write out one of its runs", line)
        self.called.add(name)
        redirected = self.redirected
        unknown = next((MARKER.findall(word.expansion)[0] for word in words if word.count_is_unknown), None)
        arguments = tuple(field for word in words for field in word.fields)
        if unknown is not None:
            arguments = (variables.unknown_array(f"\ue000{unknown}\ue001"),)
        before = dict(variables.values)
        printed, loop_depth, self.loop_depth = len(self.output), self.loop_depth, 0
        with self.inner_scripts.arguments(arguments), self.inner_scripts.reading(*function):
            self.source_depth = 0
            variables.local_values.append({})
            status = self.command()
            may_return = "return" in self.possible_jumps
            local_values = variables.local_values.pop()
            if self.jump == "return":
                status, self.jump = self.exit_status, ""
            if may_return:
                status = None
                variables.forget(variables.changes(before), f"may be set by {name}", line)
            for each, (values, attributes) in local_values.items():
                variables.restore({each: values})
                variables.attributes[each] = attributes if variables.attributes.get(each) != "n" else "n"
        self.loop_depth = loop_depth
        if redirected:
            del self.output[printed:]
        return status
