"""Numeric answers, compared exactly or within a tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from quintet.rewards.answer_extraction import extract_answer
from quintet.rewards.number_mentions import read_answer, read_last
from quintet.rewards.numbers import Quantity, number_text, parse_number, parse_quantity
from quintet.rewards.score import WRONG, GroundTruthError, Score, accepted_answers, binary_score
from quintet.rewards.thoughts import final_text


def verify(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Compare the number of the extracted answer, or else the last number of the text.

    `extra["absolute_tolerance"]` and `extra["relative_tolerance"]` (a share of the correct number) allow a difference;
    without them, numbers must be equal. A percentage is compared as its number and as its value, and units must agree
    if both have one.

    Raises:
        GroundTruthError: the ground truth is not a number.
        ValueError: a tolerance is not a number.
    """
    truths = [parse_truth(answer) for answer in accepted_answers(ground_truth)]
    text = final_text(text)
    answer = extract_answer(text)
    is_extracted = answer != text.strip()
    quantity = read_answer(answer) if is_extracted else parse_quantity(text) or read_last(text)
    if quantity is None:
        return Score(WRONG)
    correct = any(_is_close(quantity, truth, extra) for truth in truths)
    return binary_score(correct, number_text(quantity.value, answer))


@lru_cache(maxsize=1024)
def parse_truth(ground_truth: str) -> Quantity:
    """Parse a ground truth, once for all responses of a group.

    Raises:
        GroundTruthError: it is not a number.
    """
    quantity = parse_quantity(ground_truth)
    if quantity is None:
        raise GroundTruthError(
            f"the ground truth is not a number: {ground_truth[:80]!r}; write it as 12, -1,234.5, 3/4, 1e-3 or 50%"
        )
    return quantity


def _is_close(answer: Quantity, truth: Quantity, extra: Mapping[str, Any]) -> bool:
    absolute, relative = (_tolerance(extra.get(f"{kind}_tolerance", 0)) for kind in ("absolute", "relative"))
    return answer.has_unit_of(truth) and any(
        abs(value - correct) <= max(absolute, relative * abs(correct)) for value, correct in answer.values(truth)
    )


def _tolerance(text: Any) -> Fraction:
    value = parse_number(str(text))
    if value is None or value < 0:
        raise ValueError(f"a tolerance must be a number of at least 0: {text!r}")
    return value
