"""GSM8K (Cobbe et al. 2021): the number after `####`, compared as in verl, as text without commas and dollar signs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quintet.rewards.answer_extraction import find_numbers
from quintet.rewards.score import WRONG, Score, accepted_answers, binary_score

MARKED = re.compile(r"#### (-?[0-9.,]+)")
READ_CHARACTERS = 300
"""Characters at the end of a response that verl's scorer reads."""


def verify_strict(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Compare the last `#### <number>` of the last 300 characters; a text without one is wrong, which also rewards the
    format."""
    marked = MARKED.findall(text[-READ_CHARACTERS:])
    return _compare(_bare(marked[-1]), ground_truth) if marked else Score(WRONG)


def verify_flexible(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Compare the last number of the text."""
    numbers = find_numbers(text)
    return _compare(numbers[-1], ground_truth) if numbers else Score(WRONG)


def _compare(number: str, ground_truth: Any) -> Score:
    return binary_score(any(number == _solution(answer) for answer in accepted_answers(ground_truth)), number)


def _solution(ground_truth: str) -> str:
    """Return the number of a ground truth, which may be a full GSM8K solution."""
    return _bare(ground_truth.rpartition("####")[2])


def _bare(number: str) -> str:
    return number.strip().replace(",", "").replace("$", "")
