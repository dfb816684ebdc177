"""Interface of the tables of the primitive_skill env, and its skills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

NUM_PARAMETERS = {"pick": 3, "place": 3, "push": 6}
"""Coordinates of each skill, in VAGEN's order."""
Limits = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""Lowest and highest x, y and z, millimeters."""
Position = tuple[int, int, int]
"""x toward the camera, y to the right and z upward, millimeters."""


class Table(Protocol):
    """Table with objects, a robot arm and a task."""

    instruction: str
    limits: Limits
    """Workspace of the arm."""

    def reset(self, seed: int) -> None:
        """Put the objects at the start of an episode."""

    def execute(self, skill: str, parameters: Sequence[float]) -> None:
        """Execute a skill with coordinates in the workspace, millimeters."""

    def positions(self) -> Mapping[str, Position]:
        """Return the positions of objects and targets, always in the same order."""

    def information(self, *, masked: bool) -> Mapping[str, Any]:
        """Return further values for the observation; without `masked` also the held object and the solved stages."""

    def stage(self) -> int:
        """Return the number of the last solved stage, counted from 1; 0 if no stage is solved."""

    def is_solved(self) -> bool:
        """Return whether the task is solved."""

    def render(self) -> np.ndarray:
        """Return the table with the arm's gripper, RGB `uint8[resolution, resolution, 3]`."""

    def expert_skill(self) -> str:
        """Return the next skill of a solution.

        Raises:
            UnsolvableError: the expert knows none from this state, or the table has no expert.
        """

    def close(self) -> None: ...


def skill_text(name: str, *coordinates: float) -> str:
    """Return a skill as an action: `pick(62,-55,20)`."""
    return f"{name}({','.join(str(round(coordinate)) for coordinate in coordinates)})"
