"""The tool protocol: functions that a policy calls in its responses."""

from __future__ import annotations

import json
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
    """Result of a call: the text that the policy reads, see `result_text`, and optionally a reward."""

    text: str
    reward: float | None = None


def result_text(value: Any) -> str:
    """Return a value as the policy reads it: text as it is, nothing for None, and other values as JSON.

    >>> result_text({"city": "Zürich", "found": True})
    '{"city": "Zürich", "found": true}'

    Raises:
        TypeError: JSON cannot represent the value.
    """
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False, default=_as_list)


def _as_list(value: Any) -> Any:
    """Return arrays and numbers of numpy and torch as lists and numbers of Python."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"the result is of type {type(value).__name__}, neither text nor JSON")


class Tool(Protocol):
    """A function that a policy may call. An object serves the calls of one episode, in a process of its own."""

    description: str
    """What the function does, for the policy."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""

    def create(self, episode: ToolEpisode) -> None:
        """Prepare for the calls of an episode, before the first one."""

    def execute(self, arguments: Mapping[str, Any]) -> Any:
        """Execute a call and return a `ToolResult`, or a value for `result_text`. The message of an exception becomes
        the result. `arguments` conform to `parameters`, unless the class has `checks_arguments = True`: then they are
        any object."""

    def close(self) -> None:
        """Release resources at the end of the episode."""


class StatelessTool:
    """Base of tools that know nothing of the episode; see `Tool`."""

    def create(self, episode: ToolEpisode) -> None:
        """Prepare nothing."""

    def close(self) -> None:
        """Release nothing."""
