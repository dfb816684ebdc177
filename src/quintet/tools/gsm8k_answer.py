"""Check of a GSM8K answer, as verl's Gsm8kTool has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from quintet.rewards.verifiers.gsm8k import verify_flexible
from quintet.rewards.verifiers.math import equal_value, true_answers
from quintet.tools.tool import ToolEpisode, ToolResult, result_text

WRONG_REWARD = -0.05
"""Reward of a call with a wrong answer."""


class Gsm8kAnswer:
    """Tells whether an answer is right, so that the policy can correct it."""

    description: ClassVar[str] = "Checks an answer to the problem: the reward is 1.0 if it is right, else 0.0."
    parameters: ClassVar[Mapping[str, Any]] = {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "the answer, a number"}},
        "required": ["answer"],
    }

    checks_arguments: ClassVar[bool] = True

    def __init__(self) -> None:
        self.ground_truth: Any = None

    def create(self, episode: ToolEpisode) -> None:
        """See `Tool.create`; a ground truth among the row's arguments replaces the row's ground truth."""
        self.ground_truth = episode.arguments.get("ground_truth", episode.ground_truth)

    def execute(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Return the correctness in the words of verl's tool."""
        answer = result_text(arguments.get("answer"))
        score = self.score(answer)
        return ToolResult(f"Current parsed {answer=} reward={score}", 0.0 if score > 0 else WRONG_REWARD)

    def close(self) -> None:
        """See `Tool.close`."""

    def score(self, answer: str) -> float:
        """Return 1 for a right answer, else 0."""
        return float(verify_flexible(answer, self.ground_truth, {}).score)


class Geometry3kAnswer(Gsm8kAnswer):
    """Tells whether an answer, which may be an expression, has the value of the right one."""

    def score(self, answer: str) -> float:
        return float(any(equal_value(answer, truth) for truth in true_answers(self.ground_truth)))
