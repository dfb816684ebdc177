"""Numeric answers, compared exactly or within a tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from quintet.rewards.answer_extraction import extract_answer, find_numbers, parse_number, strip_formatting
from quintet.rewards.score import WRONG, Score, accepted_answers, binary_score


def verify(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Compare the extracted answer if it is a number, or else its last number.

    `extra["absolute_tolerance"]` and `extra["relative_tolerance"]` (a share of the correct number) allow a difference;
    without them, numbers must be equal.

    Raises:
        ValueError: the ground truth or a tolerance is not a number.
    """
    value = _answer_value(extract_answer(text))
    if value is None:
        return Score(WRONG)
    correct = any(_is_close(value, _true_value(answer), extra) for answer in accepted_answers(ground_truth))
    return binary_score(correct, str(value))


def _answer_value(answer: str) -> Fraction | None:
    for text in (strip_formatting(answer), *find_numbers(answer)[-1:]):
        value = parse_number(text)
        if value is not None:
            return value
    return None


def _true_value(ground_truth: str) -> Fraction:
    value = parse_number(strip_formatting(ground_truth))
    if value is None:
        raise ValueError(f"the ground truth is not a number: {ground_truth[:80]!r}")
    return value


def _is_close(value: Fraction, correct: Fraction, extra: Mapping[str, Any]) -> bool:
    absolute, relative = (_tolerance(extra.get(f"{kind}_tolerance", 0)) for kind in ("absolute", "relative"))
    return abs(value - correct) <= max(absolute, relative * abs(correct))


def _tolerance(text: Any) -> Fraction:
    value = parse_number(str(text))
    if value is None or value < 0:
        raise ValueError(f"a tolerance must be a number of at least 0: {text!r}")
    return value
