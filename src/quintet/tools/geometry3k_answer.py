"""Check of an answer of Geometry3K, as verl's Geo3kTool has it."""

from __future__ import annotations

from quintet.rewards.verifiers.math import equal_value, true_answers
from quintet.tools.gsm8k_answer import Gsm8kAnswer


class Geometry3kAnswer(Gsm8kAnswer):
    """Tells whether an answer, which may be an expression, has the value of the right one."""

    def score(self, answer: str) -> float:
        return float(any(equal_value(answer, truth) for truth in true_answers(self.ground_truth)))
