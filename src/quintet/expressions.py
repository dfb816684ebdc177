"""Arithmetic expressions of integers, evaluated exactly and without running code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

MAX_CHARS: Final = 300
MAX_DEPTH: Final = 30
"""Nesting depth of parentheses."""
TOKEN: Final = re.compile(r"\s*(?:(\d{1,12})|([-+*/()]))")
SIGNS: Final = {"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "[": "(", "]": ")", "{": "(", "}": ")"}
COMMANDS: Final = {r"\times": "*", r"\cdot": "*", r"\div": "/", r"\left": "", r"\right": "", "$": "", r"\ ": " "}
FRACTION: Final = re.compile(r"\\d?frac\s*(\{[^{}]*\})\s*(\{[^{}]*\})")


class ExpressionError(ValueError):
    """The text is not an expression of + - * / and integers, or divides by 0."""


def evaluate(text: str) -> tuple[Fraction, list[int]]:
    r"""Return the value of an expression and the numbers in it, in order.

    >>> evaluate("(3 + 5) * 2 \\div 4")
    (Fraction(4, 1), [3, 5, 2, 4])

    Raises:
        ExpressionError: it is not an expression, or too long or too deeply nested.
    """
    if len(text) > MAX_CHARS:
        raise ExpressionError("too long")
    parser = _Parser(list(_tokens(_ascii(text))))
    value = parser.sum(0)
    if parser.has_tokens():
        raise ExpressionError("text after the expression")
    return value, parser.used


def _ascii(text: str) -> str:
    text = FRACTION.sub(r"(\1/\2)", text)
    for command, sign in (COMMANDS | SIGNS).items():
        text = text.replace(command, sign)
    return text.strip()


def _tokens(text: str) -> Iterator[str]:
    position = 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"no expression at {text[position : position + 10]!r}")
        yield match[1] or match[2]
        position = match.end()


class _Parser:
    """Recursive descent parser; `used` collects the numbers."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens[::-1]
        self.used: list[int] = []

    def has_tokens(self) -> bool:
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
                raise ExpressionError("division by 0")
            value = value * other if sign == "*" else value / other
        return value

    def _atom(self, depth: int) -> Fraction:
        operand = self._tokens.pop() if self._tokens else "the end"
        if operand.isdecimal():
            self.used.append(int(operand))
            return Fraction(operand)
        if operand != "(" or depth >= MAX_DEPTH:
            raise ExpressionError(f"expected a number, not {operand}")
        value = self.sum(depth + 1)
        if not self._next_is(")"):
            raise ExpressionError("unclosed parenthesis")
        self._tokens.pop()
        return value

    def _next_is(self, *signs: str) -> bool:
        return bool(self._tokens) and self._tokens[-1] in signs
