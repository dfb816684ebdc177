"""Loops: unrolled if their words are known, and otherwise read once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from quintet.config.dialects.scripts.builtin_commands import BuiltIns
from quintet.config.dialects.scripts.command_lists import CommandListReader
from quintet.config.dialects.scripts.conditions import Status, negated
from quintet.config.dialects.scripts.variables import MARKER, ItemChoices
from quintet.config.dialects.scripts.word_reader import Word

LOOP_HEADER = re.compile(
    r"[ \t]*(?:\(\((?P<arithmetic>.*?)\)\)(?=[ \t]*(?:;|\n|do\b|\{))|(?P<variable>\w+)(?P<words>\s+in\b)?)"
)
END_OF_HEADER = re.compile(r"[ \t]*;?")
MAX_ITERATIONS = 256
"""Iterations of a loop that are followed one by one."""


class Loops:
    """Follows the `for`, `while` and `until` that a reader comes to."""

    def __init__(self, reader: CommandListReader, built_ins: BuiltIns) -> None:
        self.reader = reader
        self.built_ins = built_ins
        self.variables = reader.variables

    def follow_for(self, line: int) -> Status:
        """Follow `for NAME in WORDS` and `for ((start; condition; step))`."""
        header = self.reader.match(LOOP_HEADER)
        if header is None:
            raise self.reader.error("the `for` has no variable", "write `for NAME in WORDS`", line)
        self.reader.unknown_in_condition = ""
        words = self.reader.read_words() if header["words"] else []
        items = self._loop_words(words) if header["words"] else self._arguments()
        self.reader.match(END_OF_HEADER)
        self.reader.read_commands("for", "do")
        start = self.reader.position

        def read_body() -> Status:
            self.reader.position = start
            return self.reader.read_commands("for", "done")

        if header["arithmetic"] is not None:
            parts = header["arithmetic"].split(";")
            names = re.findall(r"[A-Za-z_]\w*", parts[0])[:1]
            prepare = partial(self._step_of_counter, parts) if len(parts) == 3 else None
        else:
            names = [header["variable"]]
            prepare = None if items is None else partial(self._step_of_words, names[0], items)
        return self._loop("for", names, prepare, read_body, line, is_finite=header["arithmetic"] is None)

    def _step_of_counter(self, parts: Sequence[str], number: int) -> Status:
        """Begin an iteration of `for ((start; condition; step))`; return whether there is one."""
        change = parts[2 if number else 0]
        if change.strip():
            self.built_ins.assignments.assign_arithmetic(self.reader.expand(change), change)
        if not parts[1].strip():
            return True
        return self.built_ins.assignments.assign_arithmetic(self.reader.expand(parts[1]), parts[1])

    def _step_of_words(self, name: str, items: Sequence[str], number: int) -> Status:
        """Begin an iteration of `for NAME in WORDS`; return whether there is one."""
        if number < len(items):
            self.variables.assign(name, (items[number],), self.reader.line)
        return number < len(items)

    def _arguments(self) -> list[str] | None:
        """Return the arguments, over which a `for` without words runs; None if they are not known."""
        arguments = self.variables.arguments or ()
        return None if self.variables.is_unknown_count(arguments) else list(arguments)

    def _loop_words(self, words: Iterable[Word]) -> list[str] | None:
        """Return the words of a `for`; None if only a shell knows them."""
        items: list[str] = []
        for word in words:
            unknown = self.variables.find_unknown(word.text)
            if word.count_is_unknown or (unknown is None and any(map(MARKER.search, word.fields))):
                self.reader.unknown_in_condition = str(unknown or f"{word.source} is a pattern")
                return None
            items += word.fields
        if len(items) > MAX_ITERATIONS:
            self.reader.unknown_in_condition = f"there are more than {MAX_ITERATIONS} words"
            return None
        return items

    def follow_while(self, keyword: str, line: int) -> Status:
        """Follow `while` and `until`."""
        start = self.reader.position

        def prepare(_: int) -> Status:
            self.reader.position = start
            self.reader.unknown_in_condition = ""
            with self.reader.in_test():
                status = self.reader.read_commands(keyword, "do")
            return status if keyword == "while" else negated(status)

        def read_body() -> Status:
            self.reader.position = start
            with self.reader.in_test():
                self.reader.read_commands(keyword, "do")
            return self.reader.read_commands(keyword, "done")

        return self._loop(keyword, [], prepare, partial(self.reader.read_commands, keyword, "done"), line, read_body)

    def _loop(
        self,
        keyword: str,
        names: Sequence[str],
        prepare: Callable[[int], Status] | None,
        read_body: Callable[[], Status],
        line: int,
        read_all: Callable[[], Status] | None = None,
        *,
        is_finite: bool = False,
    ) -> Status:
        """Follow the iterations of a loop, or read it once if they are not known.

        `prepare` begins an iteration and returns whether there is one; `read_all` also reads the condition. `is_finite`
        says that the iterations are known before.
        """
        if self.reader.skipped:
            (read_all or read_body)()
            return None
        reader, variables = self.reader, self.variables
        jumps, state = set(reader.possible_jumps), self.variables.state()
        count, printed, assumed = len(reader.commands), len(reader.output), len(reader.assumptions)
        changes = f"depends on the `{keyword}` at line {line}"
        reader.loop_depth += 1
        status: Status = None
        if prepare is not None and self._follow_iterations(prepare, read_body, changes, line, is_finite=is_finite):
            status = self.status
        else:
            variables.reset(state)
            reader.jump = ""
            del reader.commands[count:], reader.output[printed:], reader.assumptions[assumed:]
            reason = f", where {reader.unknown_in_condition}" if reader.unknown_in_condition else ""
            variables.forget(names, f"changes in the loop at line {line}{reason}", line)
            changes = f"{changes}, whose iterations are not known{reason}"
            self._read_unknown_iterations(read_all or read_body, changes, line)
            reader.assumptions += [] if is_finite else [f"the `{keyword}` at line {line} ends"]
        reader.loop_depth -= 1
        reader.possible_jumps = jumps | (reader.possible_jumps & {"return"})
        return status

    def _follow_iterations(
        self,
        prepare: Callable[[int], Status],
        read_body: Callable[[], Status],
        reason: str,
        line: int,
        *,
        is_finite: bool,
    ) -> bool:
        """Follow the iterations of a loop; return False if their number is not known."""
        before, jumps = dict(self.variables.values), set[str]()
        self.status: Status = True
        for number in range(MAX_ITERATIONS + 1):
            runs = prepare(number)
            if runs is None or number == MAX_ITERATIONS:
                return False
            if not runs:
                self.reader.branch(False, read_body)
                break
            values = dict(self.variables.values)
            self.reader.possible_jumps = set()
            self.status, changed = self.reader.branch(None if jumps & {"break", "return"} else True, read_body)
            if self.reader.possible_jumps and not is_finite:
                return False
            jumps |= self.reader.possible_jumps
            changed |= self.variables.changes(values) if self.reader.possible_jumps else set()
            self.variables.forget(changed, reason, line)
            if self._ends_loop():
                break
        if jumps & {"break", "return"}:
            self.variables.forget(self.variables.changes(before), reason, line)
        self.status = None if jumps or self.reader.jump else self.status
        self.reader.possible_jumps = jumps
        return True

    def _ends_loop(self) -> bool:
        """Return whether a jump ends the loop around it, or the iteration only."""
        if self.reader.jump not in ("break", "continue"):
            return self.reader.jump != ""
        if self.reader.levels > 1:
            self.reader.levels -= 1
            return True
        jump, self.reader.jump = self.reader.jump, ""
        return jump == "break"

    def _read_unknown_iterations(self, read: Callable[[], Status], reason: str, line: int) -> None:
        """Read a loop of which the number of iterations is unknown, once for each choice of items."""
        count = len(self.reader.commands)
        # a value that one iteration changes is unknown in the next
        _, changed = self.reader.branch(None, read)
        del self.reader.commands[count:]
        self.variables.forget(changed, reason, line)
        outside = self.variables.choices
        positions = {} if outside is None else outside.positions
        self.variables.choices = choices = ItemChoices(dict(positions))
        for _ in range(MAX_ITERATIONS):
            _, changed = self.reader.branch(None, read)
            self.variables.forget(changed, reason, line)
            if not choices.advance(positions):
                break
        else:
            raise self.reader.error(f"the loop has more than {MAX_ITERATIONS} runs", "write out one of its runs", line)
        self.variables.choices = outside
