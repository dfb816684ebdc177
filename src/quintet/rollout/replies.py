"""Replies to responses, by which an episode on a prompt continues: results of tools, or of simulated users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quintet.records import Failure
from quintet.rollout.chat.reply_messages import ReplyMessages
from quintet.rollout.single_turn_loop import RunningPrompt


@dataclass(frozen=True, slots=True)
class Reply:
    """Reply to a response."""

    texts: tuple[str, ...] = ()
    """One or several messages."""
    rewards: tuple[float, ...] = ()
    """Rewards of the response."""
    ended: bool = False
    """Whether the episode ends with it."""
    failure: Failure | None = None
    """Set in place of everything else: the episode has failed."""


class ReplySource(Protocol):
    """Replies to the responses of many episodes at a time."""

    messages: ReplyMessages
    """Encodes the replies."""
    reward_key: str
    """Name of the rewards in the `extra_info` of the reward function."""
    reward_weight: float
    """Factor on the rewards."""

    @property
    def pending(self) -> bool:
        """Whether replies are awaited."""

    def submit(self, number: int, running: RunningPrompt, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Start a reply to the response of an episode, which is the last message; return False if there is no reply."""

    def poll(self, *, wait: bool, seconds: float | None) -> list[tuple[int, Reply]]:
        """Return the replies that have arrived, by episode; `wait` waits for an event, up to `seconds` if given."""

    def drop(self, number: int) -> None:
        """End an episode; an awaited reply does not arrive."""

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""

    def close(self) -> None:
        """End all processes."""
