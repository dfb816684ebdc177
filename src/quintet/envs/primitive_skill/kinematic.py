"""Table whose objects move without forces: they are carried, fall, rest on each other, slide off and are pushed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from quintet.config.native.embodied_envs import PrimitiveSkillConfig
from quintet.envs.env import UnsolvableError
from quintet.envs.primitive_skill.table import Position
from quintet.envs.primitive_skill.tasks import TASKS, Body, Drawer, Scene
from quintet.envs.ray_casting import Box, Camera, Color, Point, Shape, Sphere, cast_rays

GRASP = 20.0
"""Maximum distance of the gripper from the center of the object that it grasps, along each axis, millimeters."""
GRIPPER = 10.0
"""Half the width of the closed gripper, millimeters."""
RELEASE = 10.0
"""Distance by which a released object may overlap what it is placed on, millimeters."""


CAMERA: Final = Camera((1.0, 0.0, 0.6), (-1.2, 0.0, -0.4), (0, 0, 1), fov=57.3)
"""As in VAGEN's tasks: from (1, 0, 0.6) toward (-0.2, 0, 0.2), 1 rad."""
COLORS: dict[str, Color] = {
    "red_cube": (220, 40, 40),
    "green_cube": (40, 180, 70),
    "purple_cube": (200, 60, 200),
    "apple": (200, 35, 45),
}
WOOD, METAL, TARGET, CABINET, HANDLE = (196, 164, 120), (120, 125, 135), (70, 110, 220), (150, 105, 70), (60, 60, 65)
TARGET_HALF: Final = 0.05


def _shapes(scene: Scene) -> list[Shape]:
    shapes: list[Shape] = [Box((-1.5, -1.5, -0.1), (0.4, 1.5, 0.0), WOOD)]
    for x, y, _ in scene.targets.values():
        shapes.append(_around((x / 1000, y / 1000, 0.001), (TARGET_HALF, TARGET_HALF, 0.001), TARGET))
    if scene.drawer is not None:
        shapes += _drawer(scene.drawer)
    home = scene.home[0] / 1000, scene.home[1] / 1000, scene.home[2] / 1000
    shapes += [_around((home[0], home[1] + side, home[2] + 0.03), (0.01, 0.008, 0.05), METAL) for side in (-0.04, 0.04)]
    shapes.append(_around((home[0], home[1], home[2] + 0.11), (0.03, 0.06, 0.03), METAL))
    return shapes + [_body(body, COLORS[name]) for name, body in scene.bodies.items()]


def _body(body: Body, color: Color) -> Shape:
    center, half = (body.x / 1000, body.y / 1000, body.z / 1000), body.half / 1000
    return Sphere(center, half, color) if body.half != 20 else _around(center, (half, half, half), color)


def _drawer(drawer: Drawer) -> list[Shape]:
    x, y, _ = (millimeters / 1000 for millimeters in drawer.center)
    half = drawer.half / 1000
    bottom = drawer.bottom / 1000
    back = (drawer.closed_y + 150) / 1000
    front = y + half
    cabinet = Box((x - 0.2, back - 0.5, 0.0), (x + 0.2, back, 0.5), CABINET)
    sides = [
        Box((x + s * half - 0.01, y - half, bottom - 0.02), (x + s * half + 0.01, front, 0.26), WOOD) for s in (-1, 1)
    ]
    floor = Box((x - half, y - half, bottom - 0.02), (x + half, front, bottom), WOOD)
    panel = Box((x - half, front, bottom - 0.02), (x + half, front + 0.02, 0.28), CABINET)
    handle = _around((drawer.handle[0] / 1000, drawer.handle[1] / 1000, 0.2), (0.05, 0.02, 0.015), HANDLE)
    return [cabinet, *sides, floor, panel, handle]


def _around(center: Point, half: Point, color: Color) -> Box:
    (x, y, z), (dx, dy, dz) = center, half
    return Box((x - dx, y - dy, z - dz), (x + dx, y + dy, z + dz), color)


class KinematicTable:
    """See `Table`."""

    def __init__(self, config: PrimitiveSkillConfig) -> None:
        self._config = config
        self._task = TASKS[config.task]
        self.instruction, self.limits = self._task.instruction, self._task.limits

    def reset(self, seed: int) -> None:
        self._scene = self._task.start(np.random.default_rng(seed))

    def execute(self, skill: str, parameters: Sequence[float]) -> None:
        start, end = parameters[:3], parameters[3:]
        if skill == "pick":
            self._pick(*start)
        elif skill == "place":
            self._release(*start)
        else:
            self._push(start, end)

    def positions(self) -> Mapping[str, Position]:
        return self._task.positions(self._scene)

    def information(self, *, masked: bool) -> Mapping[str, Any]:
        scene = self._scene
        values = dict(self._task.values(scene))
        if not masked:
            values |= {f"is_{name}_grasped": scene.held == name for name in scene.bodies}
            values |= {f"stage_{number}_success": done for number, done in enumerate(self._task.stages(scene))}
        return values

    def stage(self) -> int:
        solved = [number for number, done in enumerate(self._task.stages(self._scene), 1) if done]
        return max(solved, default=0)

    def is_solved(self) -> bool:
        return self._task.is_solved(self._scene)

    def render(self) -> np.ndarray:
        return cast_rays(CAMERA, _shapes(self._scene), self._config.resolution)

    def expert_skill(self) -> str:
        skill = self._task.expert(self._scene)
        if skill is None:
            raise UnsolvableError("the expert knows no solution from this state")
        return skill

    def close(self) -> None:
        """See `Table.close`."""

    # ---- skills

    def _pick(self, x: float, y: float, z: float) -> None:
        """Open the gripper, close it at a position, and lift the object between its fingers."""
        scene = self._scene
        self._release(*scene.home)
        for name, body in scene.bodies.items():
            is_there = abs(body.x - x) <= GRASP and abs(body.y - y) <= GRASP and abs(body.z - z) <= body.half
            if is_there and not self._is_covered(body):
                scene.held = name
                body.x, body.y, body.z = scene.home
                self._settle()
                return

    def _push(self, start: Sequence[float], end: Sequence[float]) -> None:
        """Move the closed gripper along a line at the height of its start, and push the objects in its path."""
        scene = self._scene
        length = math.hypot(end[0] - start[0], end[1] - start[1])
        if length == 0:
            return
        direction = ((end[0] - start[0]) / length, (end[1] - start[1]) / length)
        for name, body in scene.bodies.items():
            is_inside = scene.drawer is not None and scene.drawer.contains(body)
            if name == scene.held or is_inside or abs(body.z - start[2]) > body.half + GRIPPER:
                continue
            ahead = (body.x - start[0]) * direction[0] + (body.y - start[1]) * direction[1]
            lateral = (body.x - start[0]) * direction[1] - (body.y - start[1]) * direction[0]
            reach = length + body.half + GRIPPER
            if 0 <= ahead < reach and abs(lateral) <= body.half + GRIPPER:
                body.x += (reach - ahead) * direction[0]
                body.y += (reach - ahead) * direction[1]
        if scene.drawer is not None:
            self._push_drawer(scene.drawer, start, end)
        self._settle()

    def _push_drawer(self, drawer: Drawer, start: Sequence[float], end: Sequence[float]) -> None:
        """Close the drawer, with its contents, as far as the gripper moves against its handle."""
        x, y, z = drawer.handle
        is_met = abs(start[0] - x) <= drawer.half and abs(start[2] - z) <= drawer.half and start[1] >= y - GRASP
        shift = min(max(y - end[1], 0.0), drawer.opening)
        if not is_met or shift == 0:
            return
        for body in self._scene.bodies.values():
            if drawer.contains(body):
                body.y -= shift
        drawer.opening -= shift

    def _release(self, x: float, y: float, z: float) -> None:
        """Release the held object at a position: the skill place."""
        scene = self._scene
        if scene.held is None:
            return
        body = scene.bodies[scene.held]
        scene.held = None
        body.x, body.y, body.z = x, y, z
        self._settle()

    # ---- resting

    def _settle(self) -> None:
        """Drop all objects, the lowest first."""
        resting: list[Body] = []
        for name, body in sorted(self._scene.bodies.items(), key=lambda item: item[1].z):
            if name != self._scene.held:
                self._drop(body, resting)
                resting.append(body)

    def _drop(self, body: Body, others: Sequence[Body]) -> None:
        """Lower an object onto the surface below it; it slides off objects that it overlaps only at the edge."""
        drawer = self._scene.drawer
        floor = drawer.bottom if drawer is not None and drawer.catches(body) else 0.0
        for other in sorted(others, key=lambda each: -each.z):
            reach = body.half + other.half
            dx, dy = body.x - other.x, body.y - other.y
            if abs(dx) >= reach or abs(dy) >= reach or body.z <= other.z - reach:
                continue
            is_above = body.z + RELEASE >= other.z + reach
            if is_above and abs(dx) <= other.half and abs(dy) <= other.half:
                floor = max(floor, other.z + other.half)
                break
            if abs(dx) >= abs(dy):
                body.x = other.x + math.copysign(reach, dx)
            else:
                body.y = other.y + math.copysign(reach, dy)
        body.z = floor + body.half

    def _is_covered(self, body: Body) -> bool:
        """Return whether another object rests on this one, or the closed drawer is around it."""
        drawer = self._scene.drawer
        if drawer is not None and drawer.contains(body) and drawer.opening < drawer.half:
            return True
        return any(
            other is not body
            and abs(other.x - body.x) < other.half + body.half
            and abs(other.y - body.y) < other.half + body.half
            and 0 < other.z - body.z <= other.half + body.half + RELEASE
            for other in self._scene.bodies.values()
        )
