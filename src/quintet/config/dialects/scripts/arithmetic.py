"""Integer arithmetic of bash: `$((…))`, `((…))`, `let`, `declare -i` and subscripts."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Protocol

TOKEN = re.compile(
    r"\s*(?:(?P<number>\d[\w@#]*)|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<operator>\+\+|--|\*\*|(?:<<|>>|[-+*/%&^|])=|<<|>>|[<>=!]=|&&|\|\||[-+*/%<>=!~&^|?:,()]))"
)
NUMBER = re.compile(
    r"0[xX](?P<hexadecimal>[0-9a-fA-F]+)|(?P<base>[1-9]\d?)#(?P<digits>[0-9a-zA-Z@_]+)|0(?P<octal>[0-7]*)|[1-9]\d*"
)
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ@_"
MAX_LENGTH, MAX_DEPTH = 4096, 64
"""Characters of an expression, and expressions inside one another."""
PRECEDENCE = {
    symbol: level
    for level, symbols in enumerate(
        ("||", "&&", "|", "^", "&", "== !=", "<= >= < >", "<< >>", "+ -", "* / %", "**"), start=3
    )
    for symbol in symbols.split()
}
ASSIGNMENTS = ("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "^=", "|=")
STEPS = {"++": 1, "--": -1}


class ExpressionError(ValueError):
    """An expression that bash refuses, or that is too long."""


class UnknownOperand(Exception):
    """An operand whose value is not known; its argument is the marker."""


class Operands(Protocol):
    """Variables in an expression."""

    def operand(self, name: str) -> str:
        """Return the value of a variable as a text.

        Raises:
            UnknownOperand: it is not known.
        """

    def set_operand(self, name: str, value: int) -> None:
        """Set a variable."""


def _quotient(left: int, right: int) -> int:
    if right == 0:
        raise ExpressionError("division by 0")
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


def _power(base: int, exponent: int) -> int:
    if exponent < 0:
        raise ExpressionError("exponent less than 0")
    return pow(base, exponent, 1 << 64)


BINARY: Mapping[str, Callable[[int, int], int]] = {
    "|": operator.or_,
    "^": operator.xor,
    "&": operator.and_,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "<<": lambda left, right: left << (right & 63),
    ">>": lambda left, right: left >> (right & 63),
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": _quotient,
    "%": lambda left, right: left - right * _quotient(left, right),
    "**": _power,
}


def evaluate(expression: str, operands: Operands, depth: int = 0) -> int:
    """Return the value of an expression, and set the variables that it assigns.

    Raises:
        ExpressionError: bash refuses it.
        UnknownOperand: it depends on a value that is not known.
    """
    if depth > MAX_DEPTH or len(expression) > MAX_LENGTH:
        raise ExpressionError("too long")
    return _Expression(expression, operands, depth).value()


def assigned_names(expression: str) -> set[str]:
    """Return the variables that an expression may set."""
    steps = re.findall(
        r"(?:\+\+|--)\s*([A-Za-z_]\w*)|([A-Za-z_]\w*)\s*(?:\[[^]]*\]\s*)?(?:\+\+|--|(?:<<|>>|[-+*/%&|^])?=(?!=))",
        expression,
    )
    return {name for names in steps for name in names if name}


def _wrapped(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def number(text: str) -> int:
    """Return the value of an integer constant.

    Raises:
        ExpressionError: it is none.
    """
    matched = NUMBER.fullmatch(text)
    if matched is None:
        raise ExpressionError(text)
    if matched["base"] is None:
        base = 16 if matched["hexadecimal"] else 10 if matched["octal"] is None else 8
        return _wrapped(int(matched["hexadecimal"] or text, base) if matched["octal"] != "" else 0)
    base, value = int(matched["base"]), 0
    for digit in matched["digits"].lower() if base <= 36 else matched["digits"]:
        if DIGITS.index(digit) >= base or not 2 <= base <= 64:
            raise ExpressionError(text)
        value = value * base + DIGITS.index(digit)
    return _wrapped(value)


class _Expression:
    """A parser that evaluates what it reads; without effect where `&&`, `||` and `?:` skip it."""

    def __init__(self, text: str, operands: Operands, depth: int) -> None:
        self.operands, self.depth = operands, depth
        self.tokens: list[str] = []
        self.skipped = 0
        position, text = 0, text.rstrip()
        while position < len(text):
            matched = TOKEN.match(text, position)
            if matched is None:
                raise ExpressionError(text)
            self.tokens.append(matched[0].strip())
            position = matched.end()
        self.tokens.reverse()

    def value(self) -> int:
        if not self.tokens:
            return 0
        try:
            value = self._sequence()
        except RecursionError:
            raise ExpressionError("nested too deeply") from None
        if self.tokens:
            raise ExpressionError(self.tokens[-1])
        return value

    def _next(self, *expected: str) -> str:
        """Take the next token if it is one of the expected; empty otherwise."""
        return self.tokens.pop() if self.tokens and self.tokens[-1] in expected else ""

    def _sequence(self) -> int:
        value = self._assignment()
        while self._next(","):
            value = self._assignment()
        return value

    def _assignment(self) -> int:
        following = self.tokens[-2] if len(self.tokens) > 1 else ""
        if following in ASSIGNMENTS and _is_name(self.tokens[-1]):
            name, sign = self.tokens.pop(), self.tokens.pop()[:-1]
            value = self._assignment()
            return self._set(name, self._binary_value(sign, self._operand(name), value) if sign else value)
        condition = self._binary(3)
        if not self._next("?"):
            return condition
        first = self._unless(not condition, self._sequence)
        if not self._next(":"):
            raise ExpressionError("`:` expected")
        second = self._unless(bool(condition), self._assignment)
        return first if condition else second

    def _unless(self, skipped: bool, read: Callable[[], int]) -> int:
        self.skipped += skipped
        value = read()
        self.skipped -= skipped
        return value

    def _binary(self, level: int) -> int:
        left = self._unary()
        while self.tokens and PRECEDENCE.get(self.tokens[-1], 0) >= level:
            symbol = self.tokens.pop()
            above = PRECEDENCE[symbol] + (symbol != "**")
            if symbol in ("&&", "||"):
                is_decided = bool(left) is (symbol == "||")
                right = self._unless(is_decided, lambda above=above: self._binary(above))  # type: ignore[misc]
                left = int(is_decided if symbol == "||" and is_decided else not is_decided and right != 0)
            else:
                left = self._binary_value(symbol, left, self._binary(above))
        return left

    def _binary_value(self, symbol: str, left: int, right: int) -> int:
        return 0 if self.skipped else _wrapped(int(BINARY[symbol](left, right)))

    def _unary(self) -> int:
        if not self.tokens:
            raise ExpressionError("operand expected")
        part = self.tokens.pop()
        match part:
            case "-" | "+":
                return _wrapped(self._unary() * (-1 if part == "-" else 1))
            case "!":
                return int(self._unary() == 0)
            case "~":
                return ~self._unary()
            case "(":
                value = self._sequence()
                if not self._next(")"):
                    raise ExpressionError("`)` expected")
                return value
            case "++" | "--" if self.tokens and _is_name(self.tokens[-1]):
                name = self.tokens.pop()
                return self._set(name, self._operand(name) + STEPS[part])
        if not _is_name(part):
            return number(part)
        value = self._operand(part)
        if step := self._next(*STEPS):
            self._set(part, value + STEPS[step])
        return value

    def _operand(self, name: str) -> int:
        """Return the value of a variable, which is an expression itself."""
        if self.skipped:
            return 0
        text = self.operands.operand(name)
        return evaluate(text, self.operands, self.depth + 1)

    def _set(self, name: str, value: int) -> int:
        value = _wrapped(value)
        if not self.skipped:
            self.operands.set_operand(name, value)
        return value


def _is_name(token: str) -> bool:
    return token[0] == "_" or token[0].isalpha()
