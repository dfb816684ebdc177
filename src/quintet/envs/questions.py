"""Questions with answers from files, such as MetaMathQA (Yu et al. 2023), asked until the answer is right."""

from __future__ import annotations

import re

import numpy as np

from quintet.config.native.text_envs import QuestionsConfig
from quintet.envs.bandit import text_image
from quintet.envs.env import TEXT, Env
from quintet.envs.question_files import cell_text, check_file, row_of
from quintet.records import Observation, Step

STATED = re.compile(r"The answer is:?(.*)\Z", re.DOTALL)
"""End of a solution of MetaMathQA."""


class Questions(Env):
    """Question with several tries. Each wrong answer multiplies the reward of the right one by `discount`, one half by
    default."""

    actions = (TEXT,)

    def __init__(self, config: QuestionsConfig) -> None:
        self._config = config

    @staticmethod
    def check_config(config: QuestionsConfig) -> None:
        """Check that the file of questions can be read.

        Raises:
            ConfigError: it cannot, or lacks a column.
        """
        check_file(config.path, (config.question_key, config.answer_key))

    def instruction(self) -> str:
        return "Answer the question with the result alone."

    def reset(self, seed: int) -> Observation:
        config = self._config
        columns = (config.question_key, config.answer_key)
        values = zip(row_of(config.path, columns, seed), columns, strict=True)
        self._text, answer = (cell_text(value, column, config.path) for value, column in values)
        stated = STATED.search(answer)
        self._answer, self._reward = comparable(answer if stated is None else stated[1]), 1.0
        if not self._answer:
            raise ValueError(f"{config.path}: the question {self._text!r:.80} has no answer: {answer!r:.80}")
        return Observation(self._text)

    def step(self, action: str) -> Step:
        """See `Env.step`; answers are compared without spaces and case."""
        right = comparable(action) == self._answer
        reward = self._reward if right else 0.0
        self._reward *= self._config.discount
        self._text = "Correct." if right else "Wrong. Think again."
        return Step(Observation(self._text), reward, right, False, {"success": right})

    def render(self) -> np.ndarray:
        return text_image(self._text)


def comparable(answer: str) -> str:
    """Return an answer without spaces and in lower case.

    >>> comparable(" x = 3 Km")
    'x=3km'
    """
    return re.sub(r"\s+", "", answer).casefold()
