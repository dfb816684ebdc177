"""Comparison of what programs print and return with what tests expect; `docs/rewards.md` states the rules."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

from quintet.rewards.score import GroundTruthError

RELATIVE_TOLERANCE: Final = Fraction(1, 10**6)
ZERO_TOLERANCE: Final = Fraction(1, 10**12)
"""Largest number that counts as an expected 0.0: rounding errors of sums that cancel."""
MIN_ROUNDED_DIGITS: Final = 6
"""Numbers with a point and so many significant digits may be rounded in their last digit."""
LARGEST_EXACT: Final = 2**53
"""Floats from here on are whole without meaning integers."""
INTEGER: Final = re.compile(r"[+-]?[0-9]+")
DECIMAL: Final = re.compile(
    r"[+-]?(?:(0|[1-9][0-9]{0,400})?\.([0-9]{0,400})|(0|[1-9][0-9]{0,400}))(?:[eE]([+-]?[0-9]{1,3}))?"
)
BRACKETS: Final = re.compile(r"([\[\](){},:])")
MAX_KEY: Final = 10**300
"""Larger numbers are no keys of JSON: their text may be too long."""
MAX_INT_DIGITS: Final = 4000
"""Longer integers exceed the limit of `int`, which `Decimal` does not have."""


def same_output(output: str, expected: str) -> bool:
    """Compare line by line and word by word: numbers as `same_number` does, all other words as text.

    Spaces at the ends of lines, empty lines at the ends of the text and the number of spaces between words do not
    count.
    """
    lines, expected_lines = _lines(output), _lines(expected)
    return len(lines) == len(expected_lines) and all(map(_same_words, lines, expected_lines))


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").strip().split("\n")


def _same_words(line: str, expected: str) -> bool:
    a, b = line.split(), expected.split()
    return len(a) == len(b) and all(x == y or _same_parts(x, y) for x, y in zip(a, b, strict=True))


def _same_parts(word: str, expected: str) -> bool:
    """Compare the numbers in words such as `[0.5,`."""
    a, b = BRACKETS.split(word), BRACKETS.split(expected)
    return len(a) == len(b) and all(x == y or same_number(x, y) for x, y in zip(a, b, strict=True))


def same_number(word: str, expected: str) -> bool:
    """Return whether two words are the same number in decimal notation, of which one has a point or an exponent.

    Whole numbers without exponent must be equal. Others may differ by a relative 1e-6, or in the last digit of a number
    with at least six significant digits.
    """
    if INTEGER.fullmatch(word) and INTEGER.fullmatch(expected):
        return False
    a, b = _decimal(word), _decimal(expected)
    if a is None or b is None:
        return False
    if a == b:
        return True
    is_whole = a.denominator == b.denominator == 1 and "e" not in (word + expected).lower()
    return not is_whole and abs(a - b) <= max(_tolerance(a, b), _rounding(word, a), _rounding(expected, b))


def _decimal(word: str) -> Fraction | None:
    match = DECIMAL.fullmatch(word)
    return None if match is None or not any(match.group(1, 2, 3)) else Fraction(Decimal(word))


def _rounding(word: str, value: Fraction) -> Fraction:
    """Return half a unit of the last digit of a number with many digits behind the point, else 0."""
    mantissa, _, decimals = word.lower().partition("e")[0].partition(".")
    digits = (mantissa.lstrip("+-") + decimals).lstrip("0")
    if "e" in word.lower() or not decimals or len(digits) < MIN_ROUNDED_DIGITS or abs(value) >= LARGEST_EXACT:
        return Fraction(0)
    return Fraction(1, 2 * 10 ** len(decimals))


def _tolerance(a: Fraction, expected: Fraction) -> Fraction:
    return RELATIVE_TOLERANCE * abs(expected) if expected else ZERO_TOLERANCE


def same_value(result: Any, expected: Any) -> bool:
    """Compare a result with a value from JSON: sequences by element, mappings by key, floats within a tolerance.

    Tuples count as lists, integer keys as the text that JSON has for them, and NaN as NaN. Integers are equal only to
    the same number.
    """
    if isinstance(expected, Mapping):
        return isinstance(result, Mapping) and _same_mapping(result, expected)
    if isinstance(expected, list | tuple):
        is_sequence = isinstance(result, list | tuple) and len(result) == len(expected)
        return is_sequence and all(map(same_value, result, expected))
    if isinstance(expected, float) and _is_real(result):
        return _same_float(result, expected)
    return bool(result == expected) and not isinstance(result, Mapping | list | tuple)


def _is_real(value: Any) -> bool:
    return isinstance(value, float | int | Fraction | Decimal) and not isinstance(value, bool)


def _same_float(result: Any, expected: float) -> bool:
    if not (isinstance(result, int) or math.isfinite(result)) or not math.isfinite(expected):
        return bool(result == expected) or (result != result and expected != expected)
    a, b = Fraction(result), Fraction(expected)
    if a == b:
        return True
    is_whole = isinstance(result, int) or (a.denominator == b.denominator == 1 and abs(b) < LARGEST_EXACT)
    return not is_whole and abs(a - b) <= _tolerance(a, b)


def _same_mapping(result: Mapping[Any, Any], expected: Mapping[Any, Any]) -> bool:
    by_text = {_json_key(key): value for key, value in result.items()}
    expected_by_text = {_json_key(key): value for key, value in expected.items()}
    if len(by_text) != len(result) or by_text.keys() != expected_by_text.keys():
        return False
    return all(same_value(by_text[key], value) for key, value in expected_by_text.items())


def _json_key(key: Any) -> Any:
    """Return the text that JSON has for a key."""
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return str(key) if isinstance(key, int | float) and abs(key) < MAX_KEY else key


def same_result(result: Any, expected: Any) -> bool:
    """Compare a result with the expected value, or with the only element of an expected list, as datasets wrap it."""
    wrapped: Sequence[Any] = expected if isinstance(expected, list) else ()
    return same_value(result, expected) or (len(wrapped) == 1 and same_value(result, wrapped[0]))


def parse_literal(text: str) -> Any:
    """Parse JSON with integers of any length, or a Python literal.

    Raises:
        GroundTruthError: the text is neither.
    """
    try:
        return json.loads(text, parse_int=_parse_int)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError) as error:
        raise GroundTruthError(f"{text!r:.80} is neither JSON nor a Python literal") from error


def _parse_int(digits: str) -> int:
    return int(digits) if len(digits) <= MAX_INT_DIGITS else int(Decimal(digits))
