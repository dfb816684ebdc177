"""If these fail, a wrong output or result of a program is accepted, or a right one is not."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.rewards.verifiers.code_comparison import parse_literal, same_output, same_result, same_value


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        *(("0.5", "0.50"), ("1", "1.0"), ("1.0", "1"), ("+5.0", "5"), (".5", "0.5"), ("5e-1", "0.5"), ("100", "1e2")),
        *(("0.30000000000000004", "0.3"), ("10000000.4", "10000000.0"), ("99999999.9999", "100000000.0")),
        *(("0.3333333333", "0.333333"), ("0.333333", "0.3333333333333333"), ("1e23", "9.999999999999999e22")),
        *(("1.0000001", "1"), ("-0.0", "0.0"), ("1.6e-19", "0.0"), ("nan", "nan"), ("inf", "inf")),
        *(("a  b ", "a b"), ("a\n\n", "a"), ("a\r\nb", "a\nb"), ("x 0.1 y", "x 0.10 y"), ("", "\n")),
        *(("[0.30000000000000004, 1]", "[0.3, 1.0]"), ("{'a':(0.5,)}", "{'a':(0.50,)}"), ("1.0,2", "1,2.0")),
    ],
)  # fmt: skip
def test_the_same_output(output: str, expected: str) -> None:
    assert same_output(output, expected)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        *(("1/2", "0.5"), ("50%", "0.5"), ("$1.5", "1.5"), ("1,000", "1000.0"), ("1_0.0", "10.0"), ("١.0", "1.0")),
        *(("10000001", "10000000"), ("10000001.0", "10000000.0"), ("-10000001", "-10000000"), ("1e999", "1e998")),
        *(("12345678901234567891.0", "12345678901234567890.0"), ("0.0000014", "0.000001"), ("1e-7", "2e-7")),
        *(("0.0000001", "0.0000009"), ("-1.6e-19", "1.6e-19"), ("3", "3.00001"), ("0.33", "0.333333")),
        *(("True", "true"), ("inf", "Infinity"), ("inf", "5.0"), ("5.0", "inf"), ("nan", "0.0"), ("01", "1")),
        *(("001.0", "1.0"), ("a", "b"), ("a b", "b a"), ("a", "a b"), ("a\n\nb", "a\nb"), ("", "0"), (".", "0.0")),
        *(("[1,2]", "[1, 2]"), ("[0.5]", "0.5"), ("[0.5]", "(0.5)"), ("[1.5, 2]", "[1.4, 2]"), ("[1, 3]", "[1.0, 2]")),
    ],
)  # fmt: skip
def test_another_output(output: str, expected: str) -> None:
    assert not same_output(output, expected)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        *((0.1 + 0.2, 0.3), ([0.1 + 0.2], [0.3]), ({"a": [0.1 + 0.2]}, {"a": [0.3]}), (3, 3.0), (1e17, 10**17)),
        *(((1, (2,)), [1, [2]]), ({1: 2.0000001}, {"1": 2.0}), ({None: 1, True: 2}, {"null": 1, "true": 2})),
        *((True, 1), (5.5e-17, 0.0), (math.nan, math.nan), (math.inf, math.inf), (None, None), ([], [])),
        *((Fraction(1, 3), 1 / 3), (Decimal("0.3"), 0.3), (2.9999999999, 3.0), (10**400, 10**400)),
    ],
)  # fmt: skip
def test_the_same_result(result: Any, expected: Any) -> None:
    assert same_value(result, expected)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        *((10**17 + 1, 10**17), (2.9999999999, 3), (10000001, 1e7), (10000001.0, 1e7), (1e-10, 2e-10)),
        *((0.3001, 0.3), ([1, 2], [2, 1]), ([1], [1, 1]), ({1, 2}, [1, 2]), ("1", 1), (b"a", "a"), (None, 0)),
        *(({}, []), ([], {}), ([1], {"0": 1}), ({1: 1, "1": 1}, {"1": 1}), (math.inf, 1e308), (10**400, 1e308)),
    ],
)  # fmt: skip
def test_another_result(result: Any, expected: Any) -> None:
    assert not same_value(result, expected)


def test_an_expected_value_may_be_wrapped_in_a_list() -> None:
    assert same_result(8, [8])
    assert same_result([8], [8])
    assert same_result([8], [[8]])
    assert not same_result(8, [8, 8])


@given(st.integers(), st.integers())
def test_different_integers_are_never_equal(a: int, b: int) -> None:
    texts = [(f"{a}", f"{b}"), (f"{a}.0", f"{b}"), (f"{a}", f"{b}.0"), (f"{a}.0", f"{b}.0")]
    assert [same_output(x, y) for x, y in texts] == [a == b] * 4
    assert same_value(a, b) == (a == b)


@given(st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False))
def test_a_float_equals_itself_however_it_is_written(value: float) -> None:
    assert same_output(repr(value), f"{value:.17g}")
    assert same_value(value, float(f"{value:.17g}"))


def test_literals_are_json_or_python() -> None:
    assert parse_literal("(1, True)") == (1, True)
    with pytest.raises(ValueError, match="neither JSON nor"):
        parse_literal("f(2)")
    assert parse_literal("[" + "7" * 5000 + "]")[0] % 10 == 7
