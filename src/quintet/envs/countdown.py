"""Countdown: an expression that takes each given number once and reaches a target, scored as in RAGEN and TinyZero."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

import numpy as np

from quintet.config.native.text_envs import CountdownConfig
from quintet.envs.bandit import text_image
from quintet.envs.env import TEXT, Env
from quintet.envs.question_files import check_file, row_of
from quintet.envs.start_states import layout_split, split_of
from quintet.expressions import ExpressionError, evaluate
from quintet.records import Observation, Step

COLUMNS = ("nums", "target")


class Countdown(Env):
    """Countdown problem from a file, or drawn from the seed. An episode is one answer."""

    actions = (TEXT,)

    def __init__(self, config: CountdownConfig) -> None:
        self._config = config

    @staticmethod
    def check_config(config: CountdownConfig) -> None:
        """Check that the file of problems can be read.

        Raises:
            ConfigError: it cannot, or lacks a column.
        """
        if config.path is not None:
            check_file(config.path, COLUMNS)

    def instruction(self) -> str:
        return (
            "Write an expression of + - * / and parentheses that takes each of the numbers once and has the target as"
            " its value. Answer with the expression alone."
        )

    def reset(self, seed: int) -> Observation:
        config = self._config
        if config.path is None:
            self._numbers, self._target, _ = draw_problem(config.numbers, config.largest_number, seed)
        else:
            numbers, self._target = row_of(config.path, COLUMNS, seed, config.max_rows)
            self._numbers = [int(number) for number in numbers]
        self._text = f"Target: {self._target}, numbers: {', '.join(map(str, self._numbers))}"
        return Observation(self._text)

    def step(self, action: str) -> Step:
        """See `Env.step`; the reward is 1 for a solution, `format_reward` for another value of an expression with the
        right numbers, and otherwise 0."""
        try:
            value, used = evaluate(action)
        except ExpressionError:
            value, used = Fraction(0), []
        takes_each_once = Counter(used) == Counter(self._numbers)
        solved = takes_each_once and value == self._target
        reward = 1.0 if solved else self._config.format_reward if takes_each_once else 0.0
        self._text = f"Your answer gets {reward:g} points."
        return Step(Observation(self._text), reward, True, False, {"success": solved})

    def render(self) -> np.ndarray:
        return text_image(self._text)


def draw_problem(count: int, largest: int, seed: int) -> tuple[list[int], int, str]:
    """Return numbers, a target that is at least 1, and an expression that reaches it, which adds and subtracts them.

    The numbers belong to the split of the seed, so that no two splits have a problem in common.
    """
    rng, split = random.Random(f"countdown/{seed}"), split_of(seed)  # noqa: S311 - a game, no secret
    while True:
        numbers = [rng.randint(1, largest) for _ in range(count)]
        signs = [rng.choice("+-") for _ in numbers[1:]]
        target = numbers[0] + sum(n if sign == "+" else -n for sign, n in zip(signs, numbers[1:], strict=True))
        if target >= 1 and layout_split(str(sorted(numbers))) is split:
            expression = str(numbers[0]) + "".join(f" {s} {n}" for s, n in zip(signs, numbers[1:], strict=True))
            return sorted(numbers), target, expression
