"""The world protocol: message space, never tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from quintet.records import Observation, Step
from quintet.registry import Registry

if TYPE_CHECKING:
    import numpy as np

__all__ = ["WORLDS", "Unsolved", "World"]


class Unsolved(Exception):
    """A world's expert knows no way to success from here, or finds none within its limit."""


class World(Protocol):
    """One game at a time. The same seed always gives the same start state and the same draws."""

    actions: tuple[str, ...]
    """The legal action words."""

    def instruction(self) -> str:
        """What the policy is told once, in the system message: task, legend, legal actions."""
        ...

    def reset(self, seed: int) -> Observation:
        """Start the game of that seed."""
        ...

    def step(self, action: Any) -> Step:
        """Execute one legal action."""
        ...

    def render(self) -> np.ndarray:
        """The present state as RGB `uint8[height, width, 3]`."""
        ...

    def close(self) -> None: ...


WORLDS: Registry[World] = Registry("world", entry_points="quintet.worlds")
