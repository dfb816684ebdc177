"""Word problems of one addition or subtraction."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from quintet.data.tasks.task import Problem, TaskOptions, format_response, parse_options

NAMES: Final = ("Ann", "Ben", "Eva", "Max", "Tom", "Mia")
THINGS: Final = ("apples", "books", "coins", "pens", "eggs")


class WordProblemOptions(TaskOptions):
    """Options of `word_problems`."""

    instruction: str = "Answer with just the number."
    """Appended to each question; may be empty."""
    largest_result: Annotated[int, Field(ge=3, le=10**9)] = 18
    """Largest result; the smallest is 0."""


class WordProblems:
    """`Task` such as `Ann has 7 pens and buys 5 more. How many pens does Ann have now?`; things are bought or given
    away. A direct demonstration is the number alone."""

    source = "word_problems"
    ability = "math"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = parse_options(WordProblemOptions, options, "word_problems")

    def problem(self, seed: int, number: int) -> Problem:
        rng = random.Random(f"{seed}/{number}")  # noqa: S311 - not for cryptography
        third = self._options.largest_result // 3
        before, change = rng.randint(third, 2 * third), rng.randint(1, third)
        (name, other), thing = rng.sample(NAMES, 2), rng.choice(THINGS)
        is_bought = rng.random() < 0.5
        event = f"buys {change} more" if is_bought else f"gives {change} to {other}"
        result = before + change if is_bought else before - change
        question = f"{name} has {before} {thing} and {event}. How many {thing} does {name} have now?"
        working = f"{before} {'+' if is_bought else '-'} {change} = {result}"
        return Problem(
            question=self._options.add_instruction(question),
            ground_truth=str(result),
            key=question,
            response=str(result) if self._options.style == "direct" else format_response(str(result), working),
        )
