"""Countdown: reach a target number using each given number once; problems are built from a solution."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from pydantic import Field, PositiveInt, model_validator

from quintet.data.tasks.arithmetic import Tree, apply_operator, evaluate_steps, to_text
from quintet.data.tasks.task import Problem, TaskOptions, format_response, parse_options

MAX_ATTEMPTS: Final = 2000
"""Random combinations tried per problem."""
MAX_INTERMEDIATE: Final = 10_000
"""Largest intermediate result."""


class CountdownOptions(TaskOptions):
    """Options of `countdown`."""

    instruction: str = "Write the expression between <answer> and </answer>."
    """Appended to each question; may be empty."""
    numbers: Annotated[int, Field(ge=2, le=8)] = 4
    """How many numbers are given."""
    largest_number: PositiveInt = 99
    """Largest given number; the smallest is 1."""
    min_target: PositiveInt = 10
    """Smallest target."""
    max_target: PositiveInt = 100
    """Largest target."""
    operators: Annotated[str, Field(pattern=r"^[-+*/]+$")] = "+-*/"
    """Operators that may be used, out of + - * /; divisions are exact."""

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.min_target > self.max_target:
            raise ValueError(f"min_target={self.min_target} is above max_target={self.max_target}")
        return self


class Countdown:
    """Given numbers and a target that is reachable with all of them."""

    source = "countdown"
    ability = "math"

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = parse_options(CountdownOptions, options, "countdown")

    def problem(self, seed: int, number: int) -> Problem | None:
        """See `Task.problem`; the numbers are sorted, so that their order does not reveal the solution."""
        options = self._options
        rng = random.Random(f"{seed}/{number}")  # noqa: S311 - not for cryptography
        for _ in range(MAX_ATTEMPTS):
            numbers = [rng.randint(1, options.largest_number) for _ in range(options.numbers)]
            solution = _combine_randomly(numbers, options.operators, rng)
            if solution is not None and options.min_target <= solution[1] <= options.max_target:
                return self._problem(sorted(numbers), *solution)
        return None

    def _problem(self, numbers: list[int], tree: Tree, target: int) -> Problem:
        options, numbers_text = self._options, ", ".join(map(str, numbers))
        operations = evaluate_steps(tree) or []
        working = " , ".join(f"{left} {operator} {right} = {out}" for left, operator, right, out in operations)
        rules = f"with {' '.join(options.operators)}, using each number once."
        return Problem(
            question=options.add_instruction(f"Make {target} from {numbers_text} {rules}"),
            ground_truth={"target": target, "numbers": numbers},
            key=f"{target}: {numbers_text}",
            response=format_response(to_text(tree), working if options.style == "worked" else None),
            extra_info={"count": len(numbers)},
        )


def _combine_randomly(numbers: list[int], operators: str, rng: random.Random) -> tuple[Tree, int] | None:
    """Combine all numbers at random and return the expression and its value.

    None if an intermediate result is not a positive integer or is too large.
    """
    pool: list[tuple[Tree, int]] = [(number, number) for number in numbers]
    while len(pool) > 1:
        (left, a), (right, b) = (pool.pop(rng.randrange(len(pool))) for _ in range(2))
        operator = rng.choice(operators)
        result = apply_operator(operator, a, b)
        if result is None or not 1 <= result <= MAX_INTERMEDIATE:
            return None
        pool.append(((operator, left, right), result))
    return pool[0]
