"""GSM8K (Cobbe et al. 2021): the number after `####`, read where verl reads it, and compared by value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quintet.rewards.number_mentions import find_quantities, read_last
from quintet.rewards.numbers import Quantity, number_text, same_number
from quintet.rewards.score import WRONG, Score, accepted_answers, binary_score
from quintet.rewards.thoughts import final_text
from quintet.rewards.verifiers.numeric import parse_truth

MARKED = re.compile(r"#### ([^\n#]*[0-9][^\n#]*)")
READ_CHARACTERS = 300
"""Characters at the end of a response that verl's scorer reads."""
BEFORE_NUMBER = re.compile(r"[\s*_`$({\[\\]*")


def verify_strict(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Compare the last `#### <number>` of the last 300 characters; a text without one is wrong, which also rewards the
    format.

    Raises:
        GroundTruthError: the ground truth is not a number.
    """
    marked = MARKED.findall(final_text(text)[-READ_CHARACTERS:])
    return _compare(_leading_number(marked[-1]) if marked else None, ground_truth)


def verify_flexible(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Compare the last number of the text.

    Raises:
        GroundTruthError: the ground truth is not a number.
    """
    return _compare(read_last(final_text(text)), ground_truth)


def _leading_number(line: str) -> Quantity | None:
    """Return the number that a line begins with."""
    first = next(iter(find_quantities(line)), None)
    return None if first is None or BEFORE_NUMBER.sub("", line[: first.start], count=1) else first.quantity


def _compare(answer: Quantity | None, ground_truth: Any) -> Score:
    truths = [parse_truth(truth.rpartition("####")[2].strip()) for truth in accepted_answers(ground_truth)]
    if answer is None:
        return Score(WRONG)
    return binary_score(any(same_number(answer, truth) for truth in truths), number_text(answer.value, ""))
