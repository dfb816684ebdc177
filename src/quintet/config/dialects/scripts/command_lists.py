"""Lists of commands with `;`, `|`, `&`, `&&` and `||`, and branches of which it is not known whether they run."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from quintet.config.dialects.scripts.conditions import Status, all_of, negated
from quintet.config.dialects.scripts.simple_commands import ScriptCommand
from quintet.config.dialects.scripts.text_reader import BLANKS
from quintet.config.dialects.scripts.variables import Variables
from quintet.config.dialects.scripts.word_reader import WordReader

PREFIX = re.compile(r"(?P<keyword>time[ \t]+-p|time|!)(?=[ \t\n])")
MAX_COMMANDS = 100_000
"""Commands that are read, with those in loops and functions each time."""

END_OF_COMMAND = re.compile(r";(?![;&])")
MAX_PRINTED = 1 << 20
"""Characters of output that are known."""


class CommandListReader(WordReader):
    """Reads commands and the conditions between them."""

    def __init__(self, text: str, variables: Variables, first_line: int) -> None:
        super().__init__(text, variables, first_line)
        self.commands: list[ScriptCommand] = []
        self.output: list[str | None] = []
        """What commands print, for `$(…)` and pipelines; None for a text that is not known."""
        self.condition = ""
        """Text of the condition around the position."""
        self.depth = self.source_depth = 0
        self.start_line: int | None = None
        """Line of the main script at which another file is read; None in the main script."""
        self.in_process = False
        """Whether the commands are those of a script in a process of its own."""
        self.jump, self.jump_line, self.levels = "", 0, 1
        """Which of `JUMPS` is under way, so that nothing runs up to its target; of how many loops."""
        self.jump_reason = ""
        """Why the script ends, if no `exit` ends it."""
        self.exit_status: Status = True
        self.compound_depth = self.loop_depth = 0
        self.possible_jumps: set[str] = set()
        """Those of `JUMPS` that may have ended a loop or a function, on a condition that is not known."""
        self.undecided = self.command_count = self.printed_length = 0
        self.tested = 0
        """Commands around the position whose failure ends no script under `set -e`."""

    def end(self, reason: str) -> None:
        """End the script, or the process of a `(…)` around the position."""
        if not self.skipped and not self.jump:
            self.jump, self.jump_line, self.jump_reason, self.exit_status = "exit", self.line, reason, False

    def read_commands(self, opening: str = "", *ends: str) -> Status:
        """Read commands up to one of `ends`, or to the end of the script if there is no `opening`."""
        status: Status = True
        separator = previous = ""
        state, jump = self.variables.state(), self.jump
        for _ in self.lines_until(opening, *ends):
            if separator not in ("&&", "||"):
                state, jump = self.variables.state(), self.jump
            start, outside = self.position, self.condition
            self.condition = previous if separator in ("&&", "||") else outside
            status = self._pipeline_after(separator, status)
            previous, self.condition = " ".join(self.text[start : self.position].split()), outside
            self.match(BLANKS)
            separator = self.take("&&", "||", "&")
            self.match(END_OF_COMMAND)
            if separator == "&":  # in a process of its own
                self.variables.reset(state)
                self.jump, status = jump, True
        if not previous and opening not in ("", "case", "$(") and (opening, *ends) != ("for", "do"):
            raise self.error(f"the {opening} that ends here has a part without commands", "write `:` there", self.line)
        return status

    def print_text(self, text: str | None) -> None:
        """Add to the output; None stands for a text that is not known."""
        if not self.redirected and not self.skipped:
            self.printed_length += len(text or "")
            is_known = not self.undecided and not self.possible_jumps and self.printed_length < MAX_PRINTED
            self.output.append(text if is_known else None)

    @abstractmethod
    def command(self) -> Status:
        """Read the command at the position."""

    @abstractmethod
    def is_compound(self) -> bool:
        """Return whether the command at the position is an `if`, `case`, `{` or a loop."""

    def pipeline(self) -> Status:
        """Read commands with `|` between them."""
        self.match(BLANKS)
        if prefix := self.match(PREFIX):
            if self.at_end or self.text[self.position] == "\n":
                return True
            with self.in_test(prefix["keyword"] == "!"):
                status = self.pipeline()
            return negated(status) if prefix["keyword"] == "!" else status
        self.command_count += 1
        if self.command_count > MAX_COMMANDS:
            raise self.error(f"it runs more than {MAX_COMMANDS} commands", "write out one of its runs", self.line)
        state, jump, position = self.variables.state(), self.jump, self.position
        self.stdin, self.has_input_file = None, False
        exits = not self.is_compound()
        printed = len(self.output)
        status = self.command()
        self.match(BLANKS)
        if not self.take("|&") and not self._take_pipe():
            if exits:
                self._end_after_failure(status, position)
            return status
        statuses = [status]
        is_last = False
        while not is_last:
            self.variables.reset(state)
            self.jump = jump
            self.skip_lines()
            self.stdin = self.joined_output(printed)
            del self.output[printed:]
            status = self.command()
            self.match(BLANKS)
            statuses.append(status)
            is_last = not self.take("|&") and not self._take_pipe()
        self.variables.reset(state)
        self.jump = jump
        status = all_of(statuses) if "pipefail" in self.variables.options else status
        self._end_after_failure(status, position)
        return status

    def _take_pipe(self) -> bool:
        is_pipe = self.text.startswith("|", self.position) and not self.text.startswith("||", self.position)
        self.position += is_pipe
        return is_pipe

    def joined_output(self, start: int) -> str | None:
        """Return what was printed since; None if it is not known."""
        texts = self.output[start:]
        return None if None in texts else "".join(text or "" for text in texts)

    @contextmanager
    def in_test(self, is_tested: bool = True) -> Iterator[None]:
        """Read commands whose failure ends no script."""
        self.tested += is_tested
        try:
            yield
        finally:
            self.tested -= is_tested

    def _end_after_failure(self, status: Status, position: int) -> None:
        """End the script under `set -e` if a command failed; one of which that is not known is taken to succeed."""
        options = self.variables.options
        if self.tested or self.skipped or self.jump or status or not {"e", "?e"} & options:
            return
        if self.text.startswith(("&&", "||"), self.position):
            return
        line = self.first_line + self.text.count("\n", 0, position)
        if status is None or "?e" in options:
            self.assumptions.append(f"the command at line {line} succeeds (`set -e`)")
        else:
            self.end(f"the command at line {line} fails, and `set -e` ends the script")

    def _pipeline_after(self, separator: str, status: Status) -> Status:
        """Read the command after a separator; after `&&` and `||`, the status before decides whether it runs."""
        if self.jump:
            self.branch(False, partial(self.pipeline))
            return status
        if separator not in ("&&", "||"):
            self.status = status = self.pipeline()
            return status
        skipped_at = separator == "||"
        runs = negated(status) if skipped_at else status
        line = self.line
        result, changed = self.branch(runs, partial(self.pipeline))
        self.variables.forget(changed, "is set on a condition that is not known", line)
        if runs is None:
            self.status = result if result is skipped_at else None
        elif runs:
            self.status = result
        else:
            self.status = status
        return self.status

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
        state, status_before = self.variables.state(), self.status
        count, printed = len(self.commands), len(self.output)
        self.undecided += runs is None
        self.skipped += runs is False
        reason = self.unknown_in_condition
        status = read()
        self.undecided -= runs is None
        self.skipped -= runs is False
        if runs is None:
            changed = self.variables.reset_unless_certain(state)
            self.status = None
            jump, self.jump = self.jump, ""
            # a jump out of several loops is one out of the loops around them, too
            self.possible_jumps |= {jump, "return" if self.levels > 1 else ""} - {"", "exit"}
            if jump == "exit":
                where = f", where {reason}" if reason else ""
                self.assumptions.append(f"the script goes on after the condition at line {self.jump_line}{where}")
            return status, set() if jump == "exit" else changed
        self.variables.reset(state)
        self.status = status_before
        if place is not None and not self.here_documents:
            self.skipped_to[place] = (self.position, self.ended_by)
        del self.commands[count:]
        del self.output[printed:]
        return status, set()
