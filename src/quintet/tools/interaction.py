"""The interaction protocol: simulated users that reply to the responses of a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quintet.tools.tool import ToolEpisode


@dataclass(frozen=True, slots=True)
class UserReply:
    """Reply to a response."""

    text: str
    reward: float | None = None
    """Reward of the response."""
    ended: bool = False
    """Whether the conversation ends with this reply."""


class Interaction(Protocol):
    """A simulated user. An object replies to the responses of one episode, in a process of its own."""

    def create(self, episode: ToolEpisode) -> None:
        """Prepare for an episode, before its first response."""

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> UserReply:
        """Reply to the last of the messages, a response of the policy; each has `role` and `content`. An exception ends
        the episode, which then has failed."""

    def close(self) -> None:
        """Release resources at the end of the episode."""
