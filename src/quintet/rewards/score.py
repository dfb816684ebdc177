"""What a verifier says of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RIGHT", "WRONG", "Score", "Verifier", "right", "truths"]


@dataclass(frozen=True, slots=True)
class Score:
    """How right an answer is: `score` between 0 and 1, `predicted` the answer that was read out of the text, `parts`
    what else is to be logged."""

    score: float
    predicted: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


Verifier = Callable[[str, Any, Mapping[str, Any]], Score]
"""`(text, truth, extra) -> Score`: the policy's words, what is right, and what the row says besides."""

WRONG = 0.0
RIGHT = 1.0


def right(yes: bool, predicted: str | None) -> Score:
    """All or nothing."""
    return Score(RIGHT if yes else WRONG, predicted)


def truths(truth: Any) -> list[str]:
    """Every answer that counts as right: one, a list of them, or a mapping with `target`.

    Raises:
        ValueError: the row names none.
    """
    if isinstance(truth, dict):
        truth = truth.get("target", truth.get("answer"))
    found = truth if isinstance(truth, list | tuple) else [truth]
    if not found or any(one is None for one in found):
        raise ValueError("the row doesn't say what is right")
    return [str(one) for one in found]
