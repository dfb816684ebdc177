"""VAGEN's four tasks at the table: start, stages, solution and an expert."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from quintet.envs.primitive_skill.table import Limits, Position, skill_text

CUBE: Final = 20.0
"""Half the side of a cube, millimeters."""
TABLE_LIMITS: Limits = ((-100, 150), (-200, 200), (10, 200))
ALIGNED, GOAL_RADIUS, CLOSED = 10.0, 50.0, 100.0
"""Tolerances of VAGEN's tasks, millimeters."""
LEFT_TARGET, RIGHT_TARGET = (80, -100, 0), (80, 100, 0)
DROP: Final = 30.0
"""Height above the resting place at which the expert releases objects, millimeters."""


@dataclass(slots=True)
class Body:
    """Cube or ball at its center, millimeters."""

    x: float
    y: float
    z: float
    half: float = CUBE
    """Half its size."""

    @property
    def position(self) -> Position:
        return round(self.x), round(self.y), round(self.z)


@dataclass(slots=True)
class Drawer:
    """Drawer that opens toward positive y, with VAGEN's measures, millimeters."""

    opening: float = 300.0
    half: float = 130.0
    """Half its side."""
    bottom: float = 150.0
    """Height of its floor."""
    closed_y: float = -800.0
    x: float = -400.0

    @property
    def center(self) -> Position:
        return round(self.x), round(self.closed_y + self.opening), 200

    @property
    def handle(self) -> Position:
        return round(self.x), round(self.closed_y + self.opening + 170), 200

    def catches(self, body: Body) -> bool:
        """Return whether an object above or in it cannot fall to the ground."""
        x, y, _ = self.center
        return max(abs(body.x - x), abs(body.y - y)) <= self.half - body.half / 2 and body.z >= self.bottom

    def contains(self, body: Body) -> bool:
        """Return whether an object is inside the drawer."""
        return self.catches(body) and abs(body.z - self.bottom - body.half) < 1


@dataclass(slots=True)
class Scene:
    """Everything on the table; `held` names the object in the gripper, which is at `home`."""

    bodies: dict[str, Body]
    targets: Mapping[str, Position]
    drawer: Drawer | None = None
    held: str | None = None
    home: tuple[float, float, float] = (0.0, 0.0, 300.0)

    def is_held(self, name: str) -> bool:
        return self.held == name


@dataclass(frozen=True, slots=True)
class Task:
    """Task of VAGEN."""

    instruction: str
    limits: Limits
    start: Callable[[np.random.Generator], Scene]
    stages: Callable[[Scene], Sequence[bool]]
    """Which stages are solved now, without the last one, which is the task."""
    is_solved: Callable[[Scene], bool]
    expert: Callable[[Scene], str | None]
    """Next skill of a solution; None if there is none."""
    values: Callable[[Scene], Mapping[str, Any]] = lambda scene: {}
    """Further values for the observation."""

    def positions(self, scene: Scene) -> Mapping[str, Position]:
        """Return the positions of objects and targets."""
        bodies = {name: body.position for name, body in scene.bodies.items()}
        drawer = {} if scene.drawer is None else {"drawer": scene.drawer.center}
        return bodies | dict(scene.targets) | drawer


Region = tuple[tuple[float, float], tuple[float, float]]
"""Ranges of x and y."""


def _cubes(rng: np.random.Generator, regions: Mapping[str, Region]) -> dict[str, Body]:
    """Draw cubes that do not touch, each in its region."""
    while True:
        cubes = {
            name: Body(round(float(rng.uniform(*x_range))), round(float(rng.uniform(*y_range))), CUBE)
            for name, (x_range, y_range) in regions.items()
        }
        bodies = list(cubes.values())
        distances = (math.hypot(a.x - b.x, a.y - b.y) for i, a in enumerate(bodies) for b in bodies[:i])
        if min(distances) > 4 * CUBE:
            return cubes


def _carry(scene: Scene, name: str, x: float, y: float, floor: float = 0.0) -> str:
    """Return the skill that brings an object to a place, or grasps it before that."""
    body = scene.bodies[name]
    if scene.is_held(name):
        return skill_text("place", x, y, floor + body.half + DROP)
    return skill_text("pick", *body.position)


# ---- AlignTwoCube


def _start_align(rng: np.random.Generator) -> Scene:
    return Scene(_cubes(rng, {"red_cube": ((100, 150), (-200, 100)), "green_cube": ((100, 150), (100, 200))}), {})


def _is_aligned(body: Body) -> bool:
    return abs(body.x) <= ALIGNED and body.z <= 50


def _align_expert(scene: Scene) -> str | None:
    misplaced = [name for name, body in scene.bodies.items() if scene.is_held(name) or not _is_aligned(body)]
    if not misplaced:
        return None
    name = scene.held or misplaced[0]
    others = [body.y for other, body in scene.bodies.items() if other != name and _is_aligned(body)]
    free = (y for y in (-80, 80, 0) if all(abs(y - other) > 3 * CUBE for other in others))
    return _carry(scene, name, 0, next(free))


# ---- PlaceTwoCube


def _start_place(rng: np.random.Generator) -> Scene:
    region = ((-100.0, 0.0), (-100.0, 100.0))
    targets = {"left_target": LEFT_TARGET, "right_target": RIGHT_TARGET}
    return Scene(_cubes(rng, {"red_cube": region, "green_cube": region}), targets)


def _in_goals(scene: Scene) -> tuple[bool, bool]:
    """Return whether the red cube is in the left and the green one in the right target, held or not."""
    pairs = zip(scene.bodies.values(), scene.targets.values(), strict=True)
    red, green = (math.hypot(body.x - target[0], body.y - target[1]) <= GOAL_RADIUS for body, target in pairs)
    return red, green


def _place_stages(scene: Scene) -> Sequence[bool]:
    red, _ = _in_goals(scene)
    is_placed = red and not scene.is_held("red_cube")
    return scene.is_held("red_cube"), is_placed, is_placed and scene.is_held("green_cube")


def _place_expert(scene: Scene) -> str | None:
    for (name, target), is_in in zip(
        zip(scene.bodies, scene.targets.values(), strict=True), _in_goals(scene), strict=True
    ):
        if not is_in or scene.is_held(name):
            return _carry(scene, name, target[0], target[1])
    return None


# ---- PutAppleInDrawer


def _start_apple(rng: np.random.Generator) -> Scene:
    x, y = round(float(rng.uniform(-280, -110))), round(float(rng.uniform(50, 190)))
    return Scene({"apple": Body(x, y, 37, 37)}, {}, Drawer(), home=(0.0, 0.0, 650.0))


def _apple_is_in(scene: Scene) -> bool:
    return scene.drawer is not None and not scene.is_held("apple") and scene.drawer.contains(scene.bodies["apple"])


def _apple_expert(scene: Scene) -> str | None:
    if scene.drawer is None or (not _apple_is_in(scene) and scene.drawer.opening < scene.drawer.half):
        return None
    if not _apple_is_in(scene):
        return _carry(scene, "apple", *scene.drawer.center[:2], floor=scene.drawer.bottom)
    x, y, z = scene.drawer.handle
    return skill_text("push", x, y + 20, z, x, -600, z)


# ---- StackThreeCube


def _start_stack(rng: np.random.Generator) -> Scene:
    region = ((-100.0, 150.0), (-200.0, 200.0))
    return Scene(_cubes(rng, dict.fromkeys(("red_cube", "green_cube", "purple_cube"), region)), {})


def _is_on(scene: Scene, upper: str, lower: str) -> bool:
    above, below = scene.bodies[upper], scene.bodies[lower]
    is_centered = math.hypot(above.x - below.x, above.y - below.y) < CUBE
    return is_centered and above.z > below.z + CUBE and not scene.is_held(upper) and not scene.is_held(lower)


def _stack_stages(scene: Scene) -> Sequence[bool]:
    return scene.is_held("red_cube"), _is_on(scene, "red_cube", "green_cube"), scene.is_held("purple_cube")


def _stack_solved(scene: Scene) -> bool:
    return _is_on(scene, "red_cube", "green_cube") and _is_on(scene, "purple_cube", "red_cube")


def _stack_expert(scene: Scene) -> str | None:
    for upper, lower in (("red_cube", "green_cube"), ("purple_cube", "red_cube")):
        if not _is_on(scene, upper, lower):
            below = scene.bodies[lower]
            return _carry(scene, upper, below.x, below.y, floor=below.z + below.half)
    return None


TASKS = {
    "AlignTwoCube": Task(
        "Please align the cubes in the y-axis, which means the x-coordinates of both cubes should be 0 (+-10mm)",
        TABLE_LIMITS,
        _start_align,
        lambda scene: [_is_aligned(body) for body in scene.bodies.values()],
        lambda scene: all(map(_is_aligned, scene.bodies.values())),
        _align_expert,
    ),
    "PlaceTwoCube": Task(
        "Please place red cube at left target and green cube at right target.",
        TABLE_LIMITS,
        _start_place,
        _place_stages,
        lambda scene: all(_in_goals(scene)) and scene.held is None,
        _place_expert,
    ),
    "PutAppleInDrawer": Task(
        "Please put the apple in the drawer and close the drawer.",
        ((-500, -100), (-600, 200), (10, 650)),
        _start_apple,
        lambda scene: (scene.is_held("apple"), _apple_is_in(scene)),
        lambda scene: _apple_is_in(scene) and scene.drawer is not None and scene.drawer.opening <= CLOSED,
        _apple_expert,
        lambda scene: {"drawer_open_value": round(scene.drawer.opening) if scene.drawer else 0},
    ),
    "StackThreeCube": Task(
        "Please stack the red cube on top of the green cube, and then stack purple cube on top of the red cube.",
        TABLE_LIMITS,
        _start_stack,
        _stack_stages,
        _stack_solved,
        _stack_expert,
        lambda scene: {"cube_size": (40, 40, 40)},
    ),
}
