"""Tasks of the arm: start states, instructions, success, and the waypoints of an expert.

n is the number of robots, K the objects of a task. Positions are meters in the plane of the table.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Final

import numpy as np

from quintet.envs.simulators.arm.scene import (
    BLUE,
    GREEN,
    RED,
    TIP_RADIUS,
    WORKSPACE_HIGH,
    WORKSPACE_LOW,
    YELLOW,
    Body,
)

BALL_RADIUS: Final = 0.020
PUCK_RADIUS: Final = 0.026
TOUCH: Final = TIP_RADIUS + BALL_RADIUS
"""Distance between tip and ball at which they touch."""
CONTACT: Final = TIP_RADIUS + PUCK_RADIUS
TARGET_RADIUS: Final = 0.034
PUSHED: Final = 0.022
"""Distance between puck and target at which the puck is on the target."""
CLEARANCE: Final = 0.012
"""Distance that the expert keeps from what it must not touch."""


class ArmTask(ABC):
    """Task of the arm: its objects, their start states, and the distance that decides success."""

    bodies: ClassVar[tuple[Body, ...]]

    @abstractmethod
    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return random positions of the tip, [2], and the objects, [K, 2]."""

    @abstractmethod
    def instruction(self, start_state: int) -> str:
        """Return the instruction of the policy."""

    @abstractmethod
    def distances(self, tips: np.ndarray, objects: np.ndarray, start_states: np.ndarray) -> np.ndarray:
        """Return how far robots are from the solution, meters [n]; the task is solved at 0."""

    def failed(self, tips: np.ndarray, objects: np.ndarray, start_states: np.ndarray) -> np.ndarray | None:
        """Return which robots can no longer solve the task, bool [n], or None if that is impossible."""
        del tips, objects, start_states
        return None

    def ordered_objects(self, objects: np.ndarray, start_states: np.ndarray) -> np.ndarray:
        """Return the objects [n, K, 2] in an order that identifies them for a policy without instructions."""
        del start_states
        return objects

    @abstractmethod
    def waypoints(self, tips: np.ndarray, objects: np.ndarray, start_states: np.ndarray) -> np.ndarray:
        """Return where an expert moves the tips, [n, 2]."""


class Reach(ArmTask):
    """Touch a ball."""

    bodies = (Body(BALL_RADIUS, RED),)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return next((tip, ball[None]) for tip, ball in _pairs(rng) if _apart(0.08, tip, ball))

    def instruction(self, start_state: int) -> str:
        del start_state
        return "touch the ball"

    def distances(self, tips: np.ndarray, objects: np.ndarray, start_states: np.ndarray) -> np.ndarray:
        del start_states
        return _gap(tips, objects[:, 0], TOUCH)

    def waypoints(self, tips: np.ndarray, objects: np.ndarray, start_states: np.ndarray) -> np.ndarray:
        del tips, start_states
        return objects[:, 0]


class ReachColor(ArmTask):
    """Touch the ball of the color that the instruction names, and not the other one, which fails the task."""

    bodies = (Body(BALL_RADIUS, RED), Body(BALL_RADIUS, BLUE))
    colors: ClassVar = ("red", "blue")

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        for tip, red in _pairs(rng):
            blue = _point(rng)
            if _apart(0.08, tip, red) and _apart(0.08, tip, blue) and _apart(0.11, red, blue):
                return tip, np.stack([red, blue])
        raise AssertionError

    def instruction(self, start_state: int) -> str:
        return f"touch the {self.colors[start_state % 2]} ball"

    def distances(self, tips: np.ndarray, objects: np.ndarray, start_states: np.ndarray) -> np.ndarray:
        return _gap(tips, self.ordered_objects(objects, start_states)[:, 0], TOUCH)

    def failed(self, tips: np.ndarray, objects: np.ndarray, start_states: np.ndarray) -> np.ndarray:
        return np.asarray(_gap(tips, self.ordered_objects(objects, start_states)[:, 1], TOUCH) == 0)

    def ordered_objects(self, objects: np.ndarray, start_states: np.ndarray) -> np.ndarray:
        return np.where((start_states % 2 == 0)[:, None, None], objects, objects[:, ::-1])

    def waypoints(self, tips: np.ndarray, objects: np.ndarray, start_states: np.ndarray) -> np.ndarray:
        ordered = self.ordered_objects(objects, start_states)
        return _around(tips, ordered[:, 0], ordered[:, 1], TOUCH + CLEARANCE)


class Push(ArmTask):
    """Push a puck onto a target."""

    bodies = (Body(PUCK_RADIUS, YELLOW, "cylinder", movable=True), Body(TARGET_RADIUS, GREEN, "disk"))

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        for tip, _ in _pairs(rng):
            puck, target = _point(rng, 0.06), _point(rng, 0.04)
            if _apart(0.08, puck, target) and _apart(CONTACT + 0.02, tip, puck):
                return tip, np.stack([puck, target])
        raise AssertionError

    def instruction(self, start_state: int) -> str:
        del start_state
        return "push the puck onto the target"

    def distances(self, tips: np.ndarray, objects: np.ndarray, start_states: np.ndarray) -> np.ndarray:
        del tips, start_states
        return _gap(objects[:, 0], objects[:, 1], PUSHED)

    def waypoints(self, tips: np.ndarray, objects: np.ndarray, start_states: np.ndarray) -> np.ndarray:
        """Go behind the puck, as seen from the target, and then through it toward the target."""
        del start_states
        puck, target = objects[:, 0], objects[:, 1]
        forward = _unit(target - puck)
        offset = tips - puck
        ahead = (offset * forward).sum(axis=1)
        aside = np.abs(offset[:, 0] * forward[:, 1] - offset[:, 1] * forward[:, 0])
        behind = (ahead < 0) & (aside < 0.4 * CONTACT)
        start = puck - (CONTACT + CLEARANCE / 2) * forward
        # The tip aims at the point of the puck opposite to the target, and past it by what is left to push.
        aim = puck - (CONTACT - 0.025) * forward
        return np.where(behind[:, None], aim, _around(tips, start, puck, CONTACT + CLEARANCE / 2))


TASKS: Final[dict[str, ArmTask]] = {"reach": Reach(), "reach_color": ReachColor(), "push": Push()}


def _point(rng: np.random.Generator, margin: float = 0.0) -> np.ndarray:
    return rng.uniform(WORKSPACE_LOW + margin, WORKSPACE_HIGH - margin)


def _pairs(rng: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while True:
        yield _point(rng), _point(rng)


def _apart(distance: float, first: np.ndarray, second: np.ndarray) -> bool:
    return bool(np.hypot(*(first - second)) >= distance)


def _gap(first: np.ndarray, second: np.ndarray, contact: float) -> np.ndarray:
    return np.asarray(np.maximum(np.hypot(*(first - second).T) - contact, 0))


def _unit(vectors: np.ndarray) -> np.ndarray:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9))


def _around(tips: np.ndarray, goals: np.ndarray, obstacles: np.ndarray, radius: float) -> np.ndarray:
    """Return where to move to reach `goals` without coming closer to `obstacles` than `radius`: the goal if the way is
    free, else along the tangent of the circle around the obstacle, on the side that is nearer to the goal."""
    way, offset = goals - tips, obstacles - tips
    length = np.linalg.norm(way, axis=1)
    along = np.clip((offset * way).sum(axis=1) / np.maximum(length**2, 1e-9), 0, 1)
    passing = np.linalg.norm(offset - along[:, None] * way, axis=1)
    distance = np.linalg.norm(offset, axis=1)
    turn = np.arcsin(np.clip(radius / np.maximum(distance, 1e-9), 0, 1))
    # Closer than the radius the tangent leads straight aside; a little more leads away.
    turn = np.where(distance < radius, np.pi / 2 + 0.4, turn)
    side = np.sign(offset[:, 0] * way[:, 1] - offset[:, 1] * way[:, 0])
    side = np.where(side == 0, 1.0, side)
    direction = np.arctan2(offset[:, 1], offset[:, 0]) + side * turn
    reach = np.maximum(np.sqrt(np.maximum(distance**2 - radius**2, 0)), 0.03)
    detour = tips + reach[:, None] * np.stack([np.cos(direction), np.sin(direction)], axis=1)
    return np.where((passing < radius - 1e-6)[:, None], detour, goals)
