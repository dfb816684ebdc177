"""Equality of scalars: by exact fractions where both are rational, else by values of many digits.

Scalars with variables are compared at several fractions. Rational functions that agree there are equal but for a
negligible probability (Schwartz 1980, Zippel 1979).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

from quintet.rewards.math_answers.evaluation import LOG_2, Evaluator, Undefined
from quintet.rewards.math_answers.nodes import Call, Node, Num, symbols

BASE_DIGITS: Final = 100
DIGITS_STEP: Final = 50
MAX_DIGITS: Final = 5000
"""Scalars that need more digits are not equal."""
MIN_ROUNDED_DIGITS: Final = 7
"""Digits that a decimal number needs to stand for an irrational one."""
POINTS: Final = 3
TRIED_POINTS: Final = 9
MAX_SYMBOLS: Final = 20


def equal_scalars(a: Node, b: Node) -> bool:
    """Return whether two scalars are equal, for all values of their variables."""
    names = tuple(sorted({*symbols(a), *symbols(b)}))
    if len(names) > MAX_SYMBOLS:
        return False
    if not names:
        return _equal_at(a, b, {}) is True
    results = [result for point in _points(names) if (result := _equal_at(a, b, point)) is not None][:POINTS]
    return len(results) == POINTS and all(results)


def proportional(a: Node, b: Node) -> int:
    """Return the sign of the constant `a / b`, 0 if it is not constant, real and unequal to 0."""
    names = tuple(sorted({*symbols(a), *symbols(b)}))
    ratio = Call("div", (a, b))
    values = []
    for point in _points(names) if 0 < len(names) <= MAX_SYMBOLS else ():
        try:
            value = Evaluator(BASE_DIGITS, point).value(ratio)
        except Undefined:
            continue
        values.append(value)
        if len(values) == POINTS:
            break
    evaluator = Evaluator(BASE_DIGITS, {})
    first, *others = (evaluator.number(value) for value in values) if len(values) == POINTS else (Fraction(0),)
    if not first or first.imag or any(abs(other - first) > abs(first) / 10**60 for other in others):
        return 0
    return 1 if first.real > 0 else -1


def value_of(node: Node) -> Any:
    """Return the value of a constant real scalar, for sorting; None if it has none."""
    try:
        value = Evaluator(BASE_DIGITS, {}).value(node)
    except Undefined:
        return None
    return None if value.imag else value


def _equal_at(a: Node, b: Node, point: Mapping[str, Fraction]) -> bool | None:
    """Return whether two scalars have the same value at a point, None if one is undefined there."""
    digits = BASE_DIGITS
    while True:
        evaluator = Evaluator(digits, point)
        try:
            x, y = evaluator.value(a), evaluator.value(b)
        except Undefined:
            return None
        if isinstance(x, Fraction) and isinstance(y, Fraction):
            return x == y
        low, high = evaluator.magnitudes
        spread = int((high - low) * LOG_2) + 1
        needed = BASE_DIGITS + 2 * spread
        if needed <= digits:
            return _is_near(evaluator, x, y, spread, high) or _is_rounded(a, b, x, y, evaluator)
        if needed > MAX_DIGITS:
            return False
        digits = -(-needed // DIGITS_STEP) * DIGITS_STEP


def _is_near(evaluator: Evaluator, x: Any, y: Any, spread: int, high: int) -> bool:
    """Return whether two values differ by rounding only, relative to the largest value that was computed."""
    difference = abs(evaluator.number(x) - evaluator.number(y))
    return bool(difference <= evaluator.mp.mpf(2) ** high * evaluator.mp.mpf(10) ** (-60 - spread))


def _is_rounded(a: Node, b: Node, x: Any, y: Any, evaluator: Evaluator) -> bool:
    """Return whether one is a decimal number to which the other, an irrational number, is rounded."""
    for decimal, value, other in ((a, x, y), (b, y, x)):
        digits, last_place = decimal_places(decimal)
        if digits >= MIN_ROUNDED_DIGITS and not isinstance(other, Fraction):
            return bool(abs(evaluator.number(value) - other) <= evaluator.number(last_place) / 2)
    return False


def decimal_places(node: Node) -> tuple[int, Fraction]:
    """Return the digits and the value of the last place of a decimal number, 0 digits of anything else."""
    match node:
        case Num(_, digits, last_place):
            return digits, last_place
        case Call("neg", (inner,)):
            return decimal_places(inner)
        case Call(
            "mul", (Num(_, digits, last_place), Call("pow", (Num(Fraction(numerator=10, denominator=1)), exponent)))
        ):
            value = value_of(exponent)
            if isinstance(value, Fraction) and value.denominator == 1 and abs(value) <= MAX_DIGITS:
                return digits, last_place * Fraction(10) ** int(value)
    return 0, Fraction(0)


@lru_cache(maxsize=256)
def _points(names: tuple[str, ...]) -> tuple[Mapping[str, Fraction], ...]:
    """Return fractions for each variable: between 0 and 3, negative ones, and large ones."""
    return tuple(_drawn_points(names))


def _drawn_points(names: tuple[str, ...]) -> Iterator[Mapping[str, Fraction]]:
    draw = random.Random(0)  # noqa: S311 - no secret
    for number in range(TRIED_POINTS):
        low, high = ((1, 2999), (-2999, -1), (3001, 9999))[number % 3]
        yield {name: Fraction(draw.randrange(low, high) * 2 + 1, 2003) for name in names}
