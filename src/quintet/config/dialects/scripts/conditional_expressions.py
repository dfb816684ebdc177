"""Conditions of `[ … ]`, `test` and `[[ … ]]`."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from quintet.config.dialects.scripts.conditions import Status, all_of, any_of, negated
from quintet.config.dialects.scripts.patterns import is_quick, matches, unprotected
from quintet.config.dialects.scripts.variables import CALL_ARGUMENT, DIRECTORY, MARKER, NOT_SET
from quintet.config.dialects.scripts.word_reader import Word, WordReader
from quintet.errors import ConfigError

FILE_TESTS: Mapping[str, Callable[[str], bool]] = {
    "-f": os.path.isfile,
    "-d": os.path.isdir,
    "-e": os.path.exists,
    "-s": lambda path: os.path.exists(path) and os.path.getsize(path) > 0,
    "-L": os.path.islink,
    "-h": os.path.islink,
    "-r": lambda path: os.access(path, os.R_OK),
    "-w": lambda path: os.access(path, os.W_OK),
    "-x": lambda path: os.access(path, os.X_OK),
}
UNARY = (
    *FILE_TESTS,
    "-z",
    "-n",
    "-v",
    "-t",
    "-o",
    "-a",
    "-b",
    "-c",
    "-g",
    "-k",
    "-p",
    "-u",
    "-G",
    "-N",
    "-O",
    "-R",
    "-S",
)
COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
BINARY = (*COMPARISONS, "=", "==", "!=", "<", ">", "-nt", "-ot", "-ef")
INTEGER = re.compile(r"[ \t\n]*[-+]?\d{1,18}[ \t]*")
REGULAR_EXPRESSION = re.compile(r"(?:[\w^$.*+?/|()\ue100-\ue17f-]|\[\^?[\w.-]+\])+")
"""Pattern after `=~` that Python and a shell understand alike."""


class ConditionalExpressions:
    """Evaluates conditions with the variables of a reader."""

    def __init__(self, reader: WordReader) -> None:
        self.reader, self.variables = reader, reader.variables

    def test(self, words: Sequence[Word]) -> Status:
        """Evaluate the words of `[ … ]` or `test …`."""
        texts = [self._as_run_here(field) for word in words for field in word.fields]
        if any(word.count_is_unknown for word in words) and any(map(MARKER.search, texts)):
            return None
        return self._test(texts)

    def _as_run_here(self, text: str) -> str:
        """Return a text as a shell of this environment has it, without arguments: what is not set is empty."""

        def value(marker: re.Match[str]) -> str:
            reason = self.variables.unknown_values[int(marker[1])].reason
            self.reader.counts_arguments |= reason == CALL_ARGUMENT
            return "" if reason in (CALL_ARGUMENT, NOT_SET) else marker[0]

        return MARKER.sub(value, text)

    def _test(self, texts: Sequence[str]) -> Status:
        if any(MARKER.search(text) for text in texts[:1]) and len(texts) > 1:
            return None if len(texts) != 3 or texts[1] not in BINARY else self._binary(*texts)
        match texts:
            case []:
                return False
            case [text]:
                return None if MARKER.fullmatch(text) else text != ""
            case ["!", text]:
                return negated(self._test([text]))
            case [name, text]:
                return self._unary(name, text) if name in UNARY else False
            case [left, name, right] if name in (*BINARY, "-a", "-o"):
                return self._binary(left, name, right)
            case ["!", *rest] if len(rest) < 4:
                return negated(self._test(rest)) if len(rest) != 2 or rest[0] in UNARY else True
            case ["(", *inner, ")"] if len(inner) < 3:
                return self._test(inner)
        return self._long_test(texts)

    def _long_test(self, texts: Sequence[str]) -> Status:
        """Evaluate a test of several with `-a` and `-o`, of three words each."""
        for name, combine in (("-o", any_of), ("-a", all_of)):
            positions = [number for number, text in enumerate(texts) if text == name and number % 4 in (2, 3)]
            if positions and "(" not in texts and "!" not in texts:
                ends = [-1, *positions, len(texts)]
                parts = [texts[start + 1 : end] for start, end in pairwise(ends)]
                return combine([self._test(part) for part in parts]) if all(parts) else None
        return None

    def _unary(self, name: str, text: str) -> Status:
        """Evaluate `-z TEXT`, `-f FILE` and the like."""
        if MARKER.search(text):
            is_long = name in ("-z", "-n") and MARKER.sub("", text) != ""
            return (name == "-n") if is_long else None
        if name in ("-z", "-n"):
            return (text == "") is (name == "-z")
        if name == "-v" and re.fullmatch(r"[A-Za-z_]\w*", text):
            values = self.variables.get(text)
            return values != () and (values is not None) and (None if MARKER.search(values[0]) else True)
        if name not in FILE_TESTS:
            return None
        directory = self.variables.scalar(DIRECTORY) or "."
        is_known = os.path.isabs(text) or not MARKER.search(directory)
        return FILE_TESTS[name](os.path.join(directory, text)) if text and is_known else None if text else False

    def _binary(self, left: str, name: str, right: str) -> Status:
        """Evaluate `LEFT = RIGHT`, `LEFT -lt RIGHT` and the like."""
        if name in ("-a", "-o"):
            combine = all_of if name == "-a" else any_of
            return combine([self._test([left]), self._test([right])])
        if MARKER.search(left + right) or name in ("<", ">", "-nt", "-ot", "-ef"):
            return None
        if name in COMPARISONS:
            is_integer = INTEGER.fullmatch(left) and INTEGER.fullmatch(right)
            return COMPARISONS[name](int(left), int(right)) if is_integer else False
        return (left == right) is (name != "!=")

    def conditional(self, words: Sequence[Word]) -> Status:
        """Evaluate the words of `[[ … ]]`.

        Raises:
            ConfigError: bash refuses them.
        """
        self.words = list(words)[::-1]
        status = self._or()
        if self.words:
            raise self.reader.error("the condition is not supported", "write it without [[ ]]", words[0].line)
        return status

    def _next_is(self, *sources: str) -> bool:
        return bool(self.words) and self.words[-1].source in sources

    def _or(self) -> Status:
        return self._list("||", self._and, any_of, True)

    def _and(self) -> Status:
        return self._list("&&", self._primary, all_of, False)

    def _list(
        self, separator: str, read: Callable[[], Status], combine: Callable[[Sequence[Status]], Status], decides: bool
    ) -> Status:
        """Evaluate conditions between `&&` or `||`, up to the first that decides."""
        statuses = [read()]
        while self._next_is(separator):
            self.words.pop()
            is_decided = decides in statuses
            self.reader.skipped += is_decided
            statuses.append(read())
            self.reader.skipped -= is_decided
        return combine(statuses)

    def _primary(self) -> Status:
        if self._next_is("!"):
            self.words.pop()
            return negated(self._primary())
        if self._next_is("("):
            self.words.pop()
            status = self._or()
            if not self._next_is(")"):
                raise self.reader.error("the condition is not supported", "write it without [[ ]]", self.reader.line)
            self.words.pop()
            return status
        if len(self.words) > 2 and self.words[-2].source in (*BINARY, "=~"):
            left, name, right = (self.words.pop() for _ in range(3))
            return self._comparison(left, name.source, right)
        if len(self.words) > 1 and self._next_is(*UNARY):
            return self._unary(self.words.pop().source, self._as_run_here(self.words.pop().text))
        if not self.words or self._next_is("&&", "||", ")"):
            raise self.reader.error("the condition is not supported", "write it without [[ ]]", self.reader.line)
        return self._test([self._as_run_here(self.words.pop().text)])

    def _comparison(self, left: Word, name: str, right: Word) -> Status:
        left_text, pattern = (self._as_run_here(word.expansion) for word in (left, right))
        left_text = unprotected(left_text)
        if name == "=~":
            self.variables.forget(["BASH_REMATCH"], "can only be evaluated by a shell", self.reader.line)
            if MARKER.search(left_text + pattern) or not REGULAR_EXPRESSION.fullmatch(pattern):
                return None
            expression = re.sub("[\ue100-\ue17f]", lambda part: re.escape(unprotected(part[0])), pattern)
            if not is_quick(expression, left_text, searched=True):
                return None
            try:
                return re.search(expression, left_text) is not None
            except re.error:
                return None
        if name in COMPARISONS:
            try:
                first, second = (self.reader.evaluate(word.text, f"[[ … {name} … ]]") for word in (left, right))
            except ConfigError:
                return None  # a shell goes on
            return None if isinstance(first, str) or isinstance(second, str) else COMPARISONS[name](first, second)
        if name not in ("=", "==", "!=") or MARKER.search(left_text + pattern):
            return None
        status = matches(left_text, pattern)
        return status if name != "!=" else negated(status)
