"""The tool protocol: functions that a policy calls in its responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ToolEpisode:
    """Data of an episode for the tools that it calls and for its simulated user."""

    ground_truth: Any = None
    """Ground truth of the row."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The row's arguments for this tool, `extra_info.tools_kwargs.<name>.create_kwargs`, or for its user,
    `extra_info.interaction_kwargs`."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a call: the text that the policy reads, and optionally a reward."""

    text: str
    reward: float | None = None


class Tool(Protocol):
    """A function that a policy may call. An object serves the calls of one episode, in a process of its own."""

    description: str
    """What the function does, for the policy."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""

    def create(self, episode: ToolEpisode) -> None:
        """Prepare for the calls of an episode, before the first one."""

    def execute(self, arguments: Mapping[str, Any]) -> str | ToolResult:
        """Execute a call. The message of an exception becomes the result."""

    def close(self) -> None:
        """Release resources at the end of the episode."""
