"""Result of a verifier, and what it compares with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
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


class GroundTruthError(ValueError):
    """Ground truth that no response can be compared with: an error of the data, which ends the run. `valid` says what
    the verifier accepts."""

    def __init__(self, problem: str, valid: str = "") -> None:
        super().__init__(f"{problem}; {valid}" if valid else problem)


def binary_score(correct: bool, predicted: str | None) -> Score:
    """Return score 1 or 0."""
    return Score(CORRECT if correct else WRONG, predicted)


def accepted_answers(ground_truth: Any) -> list[str]:
    """Return the correct answers of a ground truth as text: one, a list of them, or a mapping with `target`,
    `ground_truth` or `answer`; also the JSON of such a mapping or of a list of texts. A float that is an integer may be
    written either way.

    Raises:
        GroundTruthError: there is none, one is empty, or one is neither a text nor a number.
    """
    ground_truth = _parsed(ground_truth)
    if isinstance(ground_truth, Mapping):
        names = [name for name in ANSWER_NAMES if ground_truth.get(name) is not None]
        if not names:
            raise GroundTruthError(
                f"the row has no ground truth: {dict(ground_truth)!r:.80}", f"name it {_ONE_OF_NAMES}"
            )
        ground_truth = _parsed(ground_truth[names[0]])
    answers = list(ground_truth) if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not answers:
        raise GroundTruthError("the row has no ground truth: the list is empty")
    return [text for answer in answers for text in _answer_texts(answer)]


ANSWER_NAMES = ("target", "ground_truth", "answer")
"""Entries of a mapping that have the ground truth."""
_ONE_OF_NAMES = ", ".join(ANSWER_NAMES)


def _parsed(ground_truth: Any) -> Any:
    """Return the value of a text that is the JSON of a mapping with an answer, or of a list of texts; files without
    nested columns have these. Other values are returned as they are: `[1, 2]` is an answer."""
    if not isinstance(ground_truth, str) or not ground_truth.lstrip().startswith(("{", "[")):
        return ground_truth
    try:
        value = json.loads(ground_truth)
    except (ValueError, RecursionError):
        return ground_truth
    is_mapping = isinstance(value, dict) and any(name in value for name in ANSWER_NAMES)
    is_list = isinstance(value, list) and bool(value) and all(isinstance(answer, str) for answer in value)
    return value if is_mapping or is_list else ground_truth


def _answer_texts(answer: Any) -> Iterator[str]:
    if answer is None or (isinstance(answer, str) and not answer.strip()) or answer != answer:
        raise GroundTruthError(f"the row has no ground truth: {answer!r}")
    if not isinstance(answer, str | int | float):
        raise GroundTruthError(
            f"the ground truth {answer!r:.80} is a {type(answer).__name__}", "write text or a number"
        )
    yield str(answer)
    if isinstance(answer, float) and answer.is_integer():
        yield str(int(answer))
