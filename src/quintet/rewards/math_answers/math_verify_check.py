"""Comparison by `math-verify` (Hugging Face 2025) of what is outside of the grammar of answers, without its tolerance.

math-verify rounds decimals to 6 places and treats differences below 1e-15 as 0, so very small numbers are equal there.
Here its verdict counts only if all numbers in both answers agree relative to their size.

The timeouts of math-verify are disabled: they need the main thread and do not interrupt a long multiplication. Some
answers never terminate; then the process is killed, see `quintet.rewards.verifier_pool`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import product
from typing import Any, Final

from quintet.rewards.math_answers.tokens import COMMANDS, IGNORED, VOCABULARY, unwrapped
from quintet.rewards.numbers import TEXT
from quintet.rewards.units import parse_unit

UNIT: Final = re.compile(r"\\(?:text|mathrm|mbox|textrm|operatorname)\s*\{([^{}]*)\}((?:\^\{?[0-9]\}?)?)[\s\\.,;}]*$")
COMMAND: Final = re.compile(r"\\([A-Za-z]+)")
DOTS: Final = re.compile(r"\.\.|…|\\[lc]?dots")
EVALUATED: Final = frozenset(VOCABULARY["evaluated"])
"""Commands outside of the grammar of answers that math-verify reads, or that have no meaning."""
DIGITS: Final = 60
EXACT_DIGITS: Final = 40
"""Digits to which exact numbers must agree."""
DECIMAL_DIGITS: Final = 12
"""Digits to which numbers must agree of which one has a decimal point; sympy reads 15."""


def equal_answers(answer: str, ground_truth: str) -> bool:
    """Return whether math-verify finds two answers equal; it ignores units, words and signs, which must not differ."""
    answer, ground_truth = unwrapped(answer), unwrapped(ground_truth)
    units = {unit for unit in (_unit(answer), _unit(ground_truth)) if unit}
    return (
        len(units) < 2
        and _ignored_by_math_verify(answer) == _ignored_by_math_verify(ground_truth)
        and matches(f"\\boxed{{{answer}}}", ground_truth)
    )


def _ignored_by_math_verify(answer: str) -> list[str]:
    """Return words but for a unit, commands without a value, dots and primes of an answer, without its name."""
    value = answer.rpartition("=")[2]
    value = UNIT.sub("", value) if _unit(value) else value
    words = [word.lower() for text in TEXT.findall(value) for word in text.split()]
    commands = set(COMMAND.findall(TEXT.sub("", value))) - COMMANDS.keys() - IGNORED - EVALUATED
    dots = ["…"] * bool(DOTS.search(value))
    return [*sorted(words), *sorted(commands), *dots, *["'"] * (value.count("'") + value.count(r"\prime"))]


def _unit(answer: str) -> str | None:
    """Return the unit in a text command at the end of an answer."""
    match = UNIT.search(answer)
    return None if match is None else parse_unit(f"{match[1]}{match[2]}")


def matches(text: str, ground_truth: str) -> bool:
    """Return whether math-verify finds the ground truth in a text."""
    return same(_parse_truth(ground_truth), parsed(text))


def parsed(text: str, **options: Any) -> list[Any]:
    """Return what math-verify reads in a text."""
    from math_verify import parse

    return list(parse(text, parsing_timeout=None, **options))


def same(truth: list[Any], answer: list[Any]) -> bool:
    """Return whether one of the readings of the ground truth equals one of the answer's."""
    return any(_same_reading(gold, target) for gold, target in product(truth, answer))


@lru_cache(maxsize=1024)
def _parse_truth(ground_truth: str) -> list[Any]:
    """Parse the ground truth, once for all responses of a group."""
    return parsed(f"\\boxed{{{ground_truth}}}") or parsed(ground_truth)


def _same_reading(truth: Any, answer: Any) -> bool:
    from math_verify import verify

    return (
        not _is_unsolved(truth, answer)
        and bool(verify(truth, answer, timeout_seconds=None))
        and _numbers_agree(truth, answer)
    )


def _is_unsolved(truth: Any, answer: Any) -> bool:
    """Return whether the answer is an equation such as `x^2 = 5`, of which math-verify takes the right side."""
    from latex2sympy2_extended import is_expr_of_only_symbols
    from sympy import Eq

    if not isinstance(answer, Eq) or isinstance(truth, Eq):
        return False
    return bool(answer.lhs.free_symbols) and not is_expr_of_only_symbols(answer.lhs)


def _numbers_agree(truth: Any, answer: Any) -> bool:
    """Return whether each number of one answer is, relative to its size, a number of the other."""
    from sympy import Basic, MatrixBase

    if not (isinstance(truth, Basic | MatrixBase) and isinstance(answer, Basic | MatrixBase)):
        return True
    a, b = _numbers(truth), _numbers(answer)
    if not a or not b or len(a) > 50 or len(b) > 50:
        return True
    return all(any(_near(x, y) for y in b) for x in a) and all(any(_near(x, y) for x in a) for y in b)


def _numbers(expression: Any) -> list[Any]:
    """Return the constants at the top of an expression, or those in its sets, tuples, matrices and equations."""
    from sympy import Eq, FiniteSet, Interval, MatrixBase, Tuple, Union

    if isinstance(expression, Eq):
        return _numbers(expression.rhs)
    if isinstance(expression, MatrixBase):
        return [number for part in expression.flat() for number in _numbers(part)]
    if isinstance(expression, FiniteSet | Tuple | Union):
        return [number for part in expression.args for number in _numbers(part)]
    if isinstance(expression, Interval):
        return [*_numbers(expression.start), *_numbers(expression.end)]
    return [expression] if getattr(expression, "is_number", False) else []


def _near(x: Any, y: Any) -> bool:
    from sympy import Float

    if x == y:
        return True
    digits = DECIMAL_DIGITS if x.has(Float) or y.has(Float) else EXACT_DIGITS
    try:
        a, b = x.doit().evalf(DIGITS), y.doit().evalf(DIGITS)
        return bool(abs(a - b) <= max(abs(a), abs(b)) * 10**-digits)
    except (TypeError, ValueError, AttributeError):
        return False
