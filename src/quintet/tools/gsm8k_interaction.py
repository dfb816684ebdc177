"""A user who says whether a GSM8K answer is right, as verl's Gsm8kInteraction does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quintet.rewards.verifiers.gsm8k import verify_strict
from quintet.tools.interaction import UserReply
from quintet.tools.tool import ToolEpisode

RIGHT = "Your response is correct!"
WRONG = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction:
    """Asks for another answer until one is right: the last `#### <number>` of a response."""

    def __init__(self) -> None:
        self._ground_truth: Any = None

    def create(self, episode: ToolEpisode) -> None:
        """See `Interaction.create`; a ground truth among the row's arguments replaces the row's ground truth."""
        self._ground_truth = episode.arguments.get("ground_truth", episode.ground_truth)

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> UserReply:
        """Reply in the words of verl's interaction; the reward is 1 for a right answer."""
        response = next((message["content"] for message in reversed(messages) if message["role"] == "assistant"), "")
        is_right = verify_strict(str(response), self._ground_truth, {}).score == 1.0
        return UserReply(RIGHT if is_right else WRONG, float(is_right), ended=is_right)

    def close(self) -> None:
        """See `Interaction.close`."""
