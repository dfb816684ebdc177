"""Simple commands: assignments, functions, builtin commands and programs, none of which is run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from quintet.config.dialects.scripts.assignments import ASSIGNMENT
from quintet.config.dialects.scripts.builtin_commands import BUILT_INS, DECLARATIONS, BuiltIns
from quintet.config.dialects.scripts.command_lists import CommandListReader
from quintet.config.dialects.scripts.conditions import Status
from quintet.config.dialects.scripts.inner_scripts import MAX_DEPTH, InnerScripts
from quintet.config.dialects.scripts.patterns import protected
from quintet.config.dialects.scripts.program_output import SILENT_PROGRAMS, program_output
from quintet.config.dialects.scripts.simple_commands import Argument, ScriptCommand
from quintet.config.dialects.scripts.variables import ALL_NAMES, DIRECTORY, MARKER, Variables
from quintet.config.dialects.scripts.word_reader import Word

TESTS = ("[", "[[", "test")
JUMPS = ("break", "continue", "return", "exit")
PASSING_WORDS = ("xargs", "parallel")
"""Programs that add words of their input to the command that they run."""
ORPHAN = re.compile(r"[+~]{0,2}[A-Za-z_][\w@/-]*(?:\.[\w@/-]+)+=.*|[+~]{1,2}[A-Za-z_][\w.@/-]*=.*", re.DOTALL)
"""Override on a line of its own, which no backslash connects with the command before it."""


def _starting_with_name(words: Sequence[Word]) -> list[Word]:
    """Return the words of a command, of which the first is only its name."""
    first, *rest = [word for word in words if word.fields or word.items is not None]
    others = [Word(field, first.line, protected(field), (field,)) for field in first.fields]
    if len(others) == 1:
        return [first, *rest]
    return [*others, *rest]


class SimpleCommandReader(CommandListReader):
    """Follows simple commands."""

    def __init__(self, text: str, variables: Variables, first_line: int) -> None:
        super().__init__(text, variables, first_line)
        self.built_ins, self.inner_scripts = BuiltIns(self), InnerScripts(self)
        self.called: set[str] = set()
        self.after_exit: list[ScriptCommand] = []
        """Commands after the line at which the script ends, which do not run."""
        self.substitution_status: Status = True
        """Status of the last `$(…)` in a command."""

    def simple_command(self) -> Status:
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
