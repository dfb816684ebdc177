"""Countdown: an expression that takes each given number once and reaches the target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from quintet.expressions import ExpressionError, evaluate
from quintet.rewards.answer_extraction import extract_answer
from quintet.rewards.numbers import parse_number
from quintet.rewards.score import WRONG, GroundTruthError, Score
from quintet.rewards.thoughts import final_text


def verify(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Score 1 if the expression uses each number once and reaches the target.

    `reward_components["numbers"]` is 1 if it uses the right numbers.

    `ground_truth` has `target` and `numbers` (or `nums`), or is the target, with the numbers in `extra`.

    Raises:
        GroundTruthError: the row lacks target or numbers, or one of them is not a number.
    """
    target, numbers = _task(ground_truth, extra)
    expression = _expression(extract_answer(final_text(text)), target)
    try:
        value, used = evaluate(expression)
    except ExpressionError:
        return Score(WRONG, reward_components={"numbers": 0.0})
    uses_each_once = Counter(used) == Counter(numbers)
    return Score(float(uses_each_once and value == target), expression, {"numbers": float(uses_each_once)})


def _task(ground_truth: Any, extra: Mapping[str, Any]) -> tuple[Fraction, list[Fraction]]:
    row = {**extra, **ground_truth} if isinstance(ground_truth, dict) else {**extra, "target": ground_truth}
    numbers = row.get("numbers", row.get("nums"))
    if row.get("target") is None or not isinstance(numbers, list | tuple):
        raise GroundTruthError("the row lacks target or numbers")
    return _number(row["target"]), [_number(number) for number in numbers]


def _number(value: Any) -> Fraction:
    """
    Raises:
        GroundTruthError: the value is not a number.
    """
    number = parse_number(str(value))
    if number is None:
        raise GroundTruthError(f"the target or one of the numbers is not a number: {str(value)[:80]!r}")
    return number


def _expression(answer: str, target: Fraction) -> str:
    """Return the last line, without the result if it is an equation."""
    line = answer.strip().splitlines()[-1] if answer.strip() else ""
    left, equals, result = line.partition("=")
    return left.strip() if equals and parse_number(result) == target else line.strip()
