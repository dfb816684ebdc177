"""Result of a verifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Score:
    """Correctness of a response: `score` between 0 and 1, and further metrics as `reward_components`."""

    score: float
    extracted_answer: str | None = None
    reward_components: Mapping[str, float] = field(default_factory=dict)


Verifier = Callable[..., Score]
"""`(text, ground_truth, extra) -> Score`: response, ground truth, and the extra fields of the row. A verifier with a
`config_class` also takes `options`, an instance of it."""

WRONG = 0.0
CORRECT = 1.0


def binary_score(correct: bool, predicted: str | None) -> Score:
    """Return score 1 or 0."""
    return Score(CORRECT if correct else WRONG, predicted)


def accepted_answers(ground_truth: Any) -> list[str]:
    """Return the correct answers of a ground truth: one, a list of them, or a mapping with `target`.

    Raises:
        ValueError: there is none.
    """
    if isinstance(ground_truth, dict):
        ground_truth = ground_truth.get("target", ground_truth.get("answer"))
    answers = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not answers or any(answer is None for answer in answers):
        raise ValueError("the row has no ground truth")
    return [str(answer) for answer in answers]
