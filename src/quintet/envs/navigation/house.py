"""Interface of the houses of the navigation env, and its actions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

TURN_DEGREES, TILT_DEGREES = 90, 30
MOVES = {"moveahead": 0, "moveback": 180, "moveright": 90, "moveleft": -90}
"""Direction of each move relative to the agent's heading, degrees clockwise."""
TURNS = {"rotateright": TURN_DEGREES, "rotateleft": -TURN_DEGREES}
TILTS = {"lookup": -TILT_DEGREES, "lookdown": TILT_DEGREES}
"""Change of the downward tilt of the camera, degrees."""
ACTIONS = (*MOVES, *TURNS, *TILTS)
"""VAGEN's actions in their order."""


@dataclass(frozen=True, slots=True)
class VisibleObject:
    """Object in the agent's view."""

    name: str
    direction: str
    """`ahead`, `right`, `back` or `left` of the agent."""
    distance: float
    """Distance on the floor, meters."""


class House(Protocol):
    """House with an agent and a task."""

    num_tasks: int | None
    """Number of tasks; None if there is no limit."""
    instruction: str
    """Instruction of the task."""

    def start(self, task: int) -> None:
        """Put the agent at the start of a task."""

    def act(self, action: str) -> bool:
        """Execute an action of `ACTIONS` and return whether it was possible."""

    @property
    def distance(self) -> float:
        """Distance of the agent from the object of the task, on the floor, meters."""

    def visible_objects(self) -> list[VisibleObject]:
        """Return the objects in view, the nearest first."""

    def render(self) -> np.ndarray:
        """Return the agent's view, RGB `uint8[resolution, resolution, 3]`."""

    def render_map(self) -> np.ndarray:
        """Return the house from above, RGB `uint8[resolution, resolution, 3]`."""

    def expert_action(self) -> str:
        """Return the next action of a shortest path to the object.

        Raises:
            UnsolvableError: there is no path, or the house has no expert.
        """

    def close(self) -> None: ...


def direction_of(degrees: float) -> str:
    """Return the direction of an angle, clockwise from the agent's heading, as VAGEN names it."""
    angle = (degrees + 180) % 360 - 180
    if -45 <= angle <= 45:
        return "ahead"
    return "back" if abs(angle) > 135 else "right" if angle > 0 else "left"


def floor_angle(dx: float, dy: float) -> float:
    """Return the angle of a vector on the floor, degrees clockwise from the second axis."""
    return math.degrees(math.atan2(dx, dy))
