"""Countdown: reach a target with each of some numbers, as in the game show; made from a solution."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import Field, PositiveInt, model_validator

from quintet.data.arithmetic import Tree, steps, value_of, written
from quintet.data.tasks import Problem, TaskOptions, answered, options_of

__all__ = ["Countdown", "CountdownOptions"]

DRAWS: Final = 2000
"""Ways of putting numbers together that are tried for one problem."""
LARGEST: Final = 10_000
"""Results on the way that nobody would want to work out by head."""


class CountdownOptions(TaskOptions):
    """Options of `countdown`."""

    instruction: str = "Write the expression between <answer> and </answer>."
    """Follows each question; may be empty."""
    numbers: Annotated[int, Field(ge=2, le=8)] = 4
    """How many there are."""
    largest_number: PositiveInt = 99
    """They lie between 1 and this."""
    least_target: PositiveInt = 10
    """The target is no smaller."""
    largest_target: PositiveInt = 100
    """And no larger."""
    operators: Annotated[str, Field(pattern=r"^[-+*/]+$")] = "+-*/"
    """Which of + - * / may be used; quotients on the way are whole."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.least_target > self.largest_target:
            raise ValueError(f"least_target={self.least_target} is above largest_target={self.largest_target}")
        return self


class Countdown:
    """Numbers and a target that can be reached with all of them."""

    source = "countdown"
    ability = "math"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options_of(CountdownOptions, options, "countdown")

    def problem(self, seed: int, number: int) -> Problem | None:
        """See `Task.problem`; the numbers stand in ascending order, so that they don't tell the solution."""
        options = self._options
        rng = random.Random(f"{seed}/{number}")  # noqa: S311 - a draw, no secret
        for _ in range(DRAWS):
            numbers = [rng.randint(1, options.largest_number) for _ in range(options.numbers)]
            found = _combined(numbers, options.operators, rng)
            if found is not None and options.least_target <= found[1] <= options.largest_target:
                return self._problem(sorted(numbers), *found)
        return None

    def _problem(self, numbers: list[int], tree: Tree, target: int) -> Problem:
        options, listed = self._options, ", ".join(map(str, numbers))
        done = steps(tree) or []
        working = " , ".join(f"{left} {sign} {right} = {out}" for left, sign, right, out in done)
        rules = f"with {' '.join(options.operators)}, using each number once."
        return Problem(
            question=options.asked(f"Make {target} from {listed} {rules}"),
            truth={"target": target, "numbers": numbers},
            key=f"{target}: {listed}",
            response=answered(written(tree), working if options.style == "worked" else None),
            about={"count": len(numbers)},
        )


def _combined(numbers: list[int], operators: str, rng: random.Random) -> tuple[Tree, int] | None:
    """All numbers put together two by two at random, and what comes out; None where something on the way is no
    positive whole number."""
    pool: list[tuple[Tree, int]] = [(number, number) for number in numbers]
    while len(pool) > 1:
        (left, a), (right, b) = (pool.pop(rng.randrange(len(pool))) for _ in range(2))
        sign = rng.choice(operators)
        result = value_of(sign, a, b)
        if result is None or not 1 <= result <= LARGEST:
            return None
        pool.append(((sign, left, right), result))
    return pool[0]
