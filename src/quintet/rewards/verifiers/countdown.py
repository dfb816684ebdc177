"""Countdown: an expression that takes each given number once and reaches the target."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

from quintet.rewards.reading import answered
from quintet.rewards.score import WRONG, Score

__all__ = ["BadExpression", "evaluate", "judge"]

LONGEST: Final = 300
"""Characters of an expression."""
DEEPEST: Final = 30
"""Parentheses within parentheses."""
TOKEN: Final = re.compile(r"\s*(?:(\d{1,12})|([-+*/()]))")
SIGNS: Final = {"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")", "{": "(", "}": ")"}
COMMANDS: Final = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\left": "", r"\right": "", "$": "", r"\ ": " "}
FRACTION: Final = re.compile(r"\\d?frac\s*(\{[^{}]*\})\s*(\{[^{}]*\})")


class BadExpression(ValueError):
    """What was written is no expression of + - * / and whole numbers, or divides by 0."""


def judge(text: str, truth: Any, extra: Mapping[str, Any]) -> Score:
    """1 where the expression takes each number once and reaches the target; `parts["numbers"]` says whether it takes
    the right numbers.

    `truth` has `target` and `numbers` (`nums`); or is the target, with the numbers in `extra`.

    Raises:
        ValueError: the row lacks one of the two.
    """
    target, given = _asked(truth, extra)
    written = _expression(answered(text), target)
    try:
        value, used = evaluate(written)
    except BadExpression:
        return Score(WRONG, parts={"numbers": 0.0})
    each_once = Counter(used) == Counter(given)
    return Score(float(each_once and value == target), written, {"numbers": float(each_once)})


def _asked(truth: Any, extra: Mapping[str, Any]) -> tuple[Fraction, list[int]]:
    row = {**extra, **truth} if isinstance(truth, dict) else {**extra, "target": truth}
    given = row.get("numbers", row.get("nums"))
    if row.get("target") is None or not isinstance(given, list | tuple):
        raise ValueError("the row doesn't say target and numbers")
    return Fraction(str(row["target"])), [int(each) for each in given]


def _expression(answer: str, target: Fraction) -> str:
    """The side of an equation that isn't the result; the last line of several."""
    line = answer.strip().splitlines()[-1] if answer.strip() else ""
    left, equals, result = line.partition("=")
    return left.strip() if equals and result.strip(" $.") == str(target) else line.strip()


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    r"""The value of an expression and the numbers in it, in their order.

    >>> evaluate("(3 + 5) * 2 \\div 4")
    (Fraction(4, 1), [3, 5, 2, 4])

    Raises:
        BadExpression: it is none, or longer or deeper than anybody needs.
    """
    if len(text) > LONGEST:
        raise BadExpression("too long")
    parser = _Parser(list(_tokens(_ascii(text))))
    value = parser.sum(0)
    if parser.left():
        raise BadExpression("something follows the expression")
    return value, parser.used


def _ascii(text: str) -> str:
    text = FRACTION.sub(r"(\1/\2)", text)
    for command, sign in (COMMANDS | SIGNS).items():
        text = text.replace(command, sign)
    return text.strip()


def _tokens(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None:
            raise BadExpression(f"no expression at {text[at : at + 10]!r}")
        yield found[1] or found[2]
        at = found.end()


class _Parser:
    """Recursive descent; `used` collects the numbers."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]
        self.used: list[int] = []

    def left(self) -> bool:
        return bool(self._tokens)

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self._next_is("+", "-"):
            sign, other = self._tokens.pop(), self._product(depth)
            value = value + other if sign == "+" else value - other
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._atom(depth)
        while self._next_is("*", "/"):
            sign, other = self._tokens.pop(), self._atom(depth)
            if sign == "/" and other == 0:
                raise BadExpression("a division by 0")
            value = value * other if sign == "*" else value / other
        return value

    def _atom(self, depth: int) -> Fraction:
        read = self._tokens.pop() if self._tokens else "the end"
        if read.isdecimal():
            self.used.append(int(read))
            return Fraction(read)
        if read != "(" or depth >= DEEPEST:
            raise BadExpression(f"a number was expected, not {read}")
        value = self.sum(depth + 1)
        if not self._next_is(")"):
            raise BadExpression("a parenthesis isn't closed")
        self._tokens.pop()
        return value

    def _next_is(self, *signs: str) -> bool:
        return bool(self._tokens) and self._tokens[-1] in signs
