"""Lists of commands with `;`, `|`, `&`, `&&` and `||`, and branches of which it is not known whether they run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial

from quintet.config.dialects.scripts.commands import ScriptCommand, ScriptText
from quintet.config.dialects.scripts.conditions import Status, negated
from quintet.config.dialects.scripts.shell_variables import Variables
from quintet.config.dialects.scripts.shell_words import BLANKS, OPERATORS, WordReader

PIPES = ("|", "|&")
MAX_COMMANDS = 100_000
"""Commands that are read, with those in loops and functions each time."""


class CommandListReader(WordReader):
    """Reads commands and the conditions between them."""

    def __init__(self, text: str, variables: Variables, first_line: int) -> None:
        super().__init__(text, variables, first_line)
        self.commands: list[ScriptCommand] = []
        self.output: list[str] | None = None
        """What the commands in a `$(…)` print; None outside one."""
        self.output_is_known = True
        self.unknown_in_condition = ""
        """Why the last condition is not known."""
        self.functions: dict[str, tuple[ScriptText, int]] = {}
        """Text and position of the body of each function."""
        self.depth = self.source_depth = 0
        self.start_line: int | None = None
        """Line of the main script at which another file is read; None in the main script."""
        self.in_process = False
        """Whether the commands are those of a script in a process of its own."""
        self.jump, self.jump_line, self.levels = "", 0, 1
        """Which of `JUMPS` is under way, so that nothing runs up to its target; of how many loops."""
        self.possible_jumps: set[str] = set()
        """Those of `JUMPS` that may have ended a loop or a function, on a condition that is not known."""
        self.skipped = self.undecided = self.command_count = 0
        self.skipped_to: dict[tuple[int, tuple[str, ...]] | None, tuple[int, str]] = {}
        """Position after the commands from a position up to the words that end them, and which of the words does."""

    def read_commands(self, opening: str = "", *ends: str) -> Status:
        """Read commands up to one of `ends`, or to the end of the script if there is no `opening`."""
        status: Status = True
        separator = ""
        for _ in self.lines_until(opening, *ends):
            self.command_count += 1
            if self.command_count > MAX_COMMANDS:
                raise self.error(f"it runs more than {MAX_COMMANDS} commands", "write out one of its runs", self.line)
            values = dict(self.variables.values)
            printed = len(self.output or ())
            jump = self.jump
            status = self._command_after(separator, status)
            self.match(BLANKS)
            previous, separator = separator, self.take(*OPERATORS)
            if previous in PIPES or separator in (*PIPES, "&"):  # in a process of its own
                self.variables.values, self.jump = values, jump
            if separator in PIPES and self.output is not None:
                del self.output[printed:]
        return status

    def print_text(self, text: str | None) -> None:
        """Add to the output of a `$(…)`; None stands for a text that is not known."""
        if self.redirected:
            return
        text = None if self.undecided or self.possible_jumps else text
        self.output_is_known = self.output_is_known and text is not None
        if self.output is not None:
            self.output.append(text or "")

    @abstractmethod
    def command(self) -> Status:
        """Read the command at the position."""

    def _command_after(self, separator: str, status: Status) -> Status:
        """Read the command after a separator; after `&&` and `||`, the status before decides whether it runs."""
        if self.jump:
            self.branch(False, partial(self.command))
            return status
        if separator not in ("&&", "||"):
            return self.command()
        skipped_at = separator == "||"
        runs = negated(status) if skipped_at else status
        line = self.line
        result, changed = self.branch(runs, self.command)
        self.variables.forget(changed, "is set on a condition that is not known", line)
        if runs is None:
            return result if result is skipped_at else None
        return result if runs else status

    def branch(self, runs: Status, read: Callable[[], Status]) -> tuple[Status, set[str]]:
        """Read commands and undo what they do unless they run; also return the variables that they may change.

        Those that end in an `exit` may change none, since nothing runs after them.
        """
        if runs:
            return read(), set()
        place = (self.position, read.args) if runs is False and isinstance(read, partial) else None
        if place in self.skipped_to and not self.here_documents:
            self.position, self.ended_by = self.skipped_to[place]
            return None, set()
        variables = self.variables
        before = dict(variables.values)
        exported = set(variables.exported)
        arguments = variables.arguments
        count, printed = len(self.commands), len(self.output or ())
        self.undecided += runs is None
        self.skipped += runs is False
        status = read()
        self.undecided -= runs is None
        self.skipped -= runs is False
        changed = variables.changes(before)
        variables.values, variables.arguments = before, arguments
        if runs is None:
            jump, self.jump = self.jump, ""
            # a jump out of several loops is one out of the loops around them, too
            self.possible_jumps |= {jump, "return" if self.levels > 1 else ""} - {"", "exit"}
            return status, set() if jump == "exit" else changed
        if place is not None and not self.here_documents:
            self.skipped_to[place] = (self.position, self.ended_by)
        variables.exported = exported
        del self.commands[count:]
        if self.output is not None:
            del self.output[printed:]
        return status, set()
