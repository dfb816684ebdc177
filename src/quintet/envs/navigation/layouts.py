"""Random houses of two furnished rooms: walls, doors, objects, tasks, and shortest paths."""

from __future__ import annotations

import math
import zlib
from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from quintet.config.native.embodied_envs import NavigationConfig
from quintet.envs.navigation.furniture import COLORS, FURNITURE_KINDS, TABLES
from quintet.envs.navigation.house import floor_angle
from quintet.envs.ray_casting import Box, Shape
from quintet.errors import ConfigError

AGENT_RADIUS, WALL_HEIGHT, WALL, DOOR = 0.2, 2.6, 0.1, 1.3
"""Meters; `WALL` is the thickness of inner walls, `DOOR` the width of the door in them."""
GAP: Final = 0.75
"""Minimum distance between objects, meters."""
MAX_ATTEMPTS: Final = 500
NUM_OBJECTS: Final = 6
Position = tuple[float, float]
Rectangle = tuple[float, float, float, float]
"""Lowest x and y, highest x and y."""
HEADINGS = {0: (0, 1), 90: (1, 0), 180: (0, -1), 270: (-1, 0)}
"""Steps on the floor by heading, degrees clockwise from y."""
INSTRUCTIONS: dict[str, str] = TABLES["instructions"]


@dataclass(frozen=True, slots=True)
class Furniture:
    """Object in a house."""

    kind: str
    color: str
    x: float
    y: float

    @property
    def name(self) -> str:
        return f"{self.color} {self.kind}"

    @property
    def rectangle(self) -> Rectangle:
        half = FURNITURE_KINDS[self.kind].half_size
        return self.x - half, self.y - half, self.x + half, self.y + half


@dataclass(frozen=True, slots=True)
class Layout:
    """House and task."""

    width: float
    depth: float
    walls: tuple[Rectangle, ...]
    objects: tuple[Furniture, ...]
    """The first one is the object of the task."""
    start: tuple[float, float]
    heading: int
    instruction: str

    @property
    def obstacles(self) -> np.ndarray:
        """Rectangles that the agent cannot enter, [obstacles, 4]."""
        return np.array([*self.walls, *(placed.rectangle for placed in self.objects)])

    def shapes(self) -> list[Shape]:
        """Return the shapes to draw."""
        room = Box((0, 0, 0), (self.width, self.depth, WALL_HEIGHT), (222, 205, 180), "bricks", inside=True)
        walls = [Box((a, b, 0), (c, d, WALL_HEIGHT), (190, 200, 215), "bricks") for a, b, c, d in self.walls]
        furniture = [
            shape
            for placed in self.objects
            for shape in FURNITURE_KINDS[placed.kind].shapes(placed.x, placed.y, COLORS[placed.color])
        ]
        return [room, *walls, *furniture]


def next_position(x: float, y: float, step: tuple[int, int], length: float) -> Position:
    """Return the position after a move, rounded so that positions are compared exactly."""
    return round(x + step[0] * length, 6), round(y + step[1] * length, 6)


def is_free(layout: Layout, obstacles: np.ndarray, start: Position, to: Position) -> bool:
    """Return whether the agent can move straight along an axis between two points."""
    (low_x, high_x), (low_y, high_y) = (
        (min(a, b) - AGENT_RADIUS, max(a, b) + AGENT_RADIUS) for a, b in zip(start, to, strict=True)
    )
    if low_x < 0 or low_y < 0 or high_x > layout.width or high_y > layout.depth:
        return False
    blocked = (obstacles[:, 0] < high_x) & (obstacles[:, 2] > low_x)
    return not (blocked & (obstacles[:, 1] < high_y) & (obstacles[:, 3] > low_y)).any()


def crosses(wall: Rectangle, start: Position, end: Position) -> bool:
    """Return whether a straight line between two points meets a rectangle."""
    low, high = 0.0, 1.0
    for axis in (0, 1):
        delta = end[axis] - start[axis]
        bounds = sorted(wall[axis + side] - start[axis] for side in (0, 2))
        if delta == 0:
            if bounds[0] > 0 or bounds[1] < 0:
                return False
            continue
        first, second = sorted(bound / delta for bound in bounds)
        low, high = max(low, first), min(high, second)
    return low <= high


def shortest_path(config: NavigationConfig, layout: Layout, start: Position) -> list[tuple[int, int]]:
    """Return a shortest sequence of steps on the floor to success by breadth-first search; empty if there is none."""
    target, obstacles = layout.objects[0], layout.obstacles
    before: dict[Position, tuple[Position, tuple[int, int]] | None] = {start: None}
    queue = deque([start])
    while queue:
        position = queue.popleft()
        if math.hypot(target.x - position[0], target.y - position[1]) <= config.success_threshold:
            steps: list[tuple[int, int]] = []
            while (previous := before[position]) is not None:
                position, step = previous
                steps.append(step)
            return steps[::-1]
        for step in HEADINGS.values():
            to = next_position(*position, step, config.step_length)
            if to not in before and is_free(layout, obstacles, position, to):
                before[to] = position, step
                queue.append(to)
    return []


@lru_cache(maxsize=256)
def generate_layout(config: NavigationConfig, task: int) -> Layout:
    """Return the house of a task; all episodes of a group share it.

    Raises:
        ConfigError: no house has a path of at most `env.max_steps` moves to its object.
    """
    rng = np.random.default_rng([task, zlib.crc32(config.eval_set.encode())])
    for _ in range(MAX_ATTEMPTS):
        layout = _draw_layout(config, rng)
        if layout is None:
            continue
        moves = len(shortest_path(config, layout, layout.start))
        if 0 < moves <= config.max_steps:
            return layout
    raise ConfigError(
        f"none of {MAX_ATTEMPTS} random houses has a path of at most {config.max_steps} moves to its object",
        key="env.max_steps",
        value=config.max_steps,
        hint="increase env.max_steps, or change env.step_length or env.success_threshold",
    )


def _draw_layout(config: NavigationConfig, rng: np.random.Generator) -> Layout | None:
    """Draw a house; None if its objects or the agent find no place."""
    width, depth = float(rng.integers(7, 10)), float(rng.integers(5, 8))
    middle = round(float(rng.uniform(0.42, 0.58)) * width, 2)
    door = round(float(rng.uniform(0.6, depth - 0.6 - DOOR)), 2)
    walls = ((middle, 0.0, middle + WALL, door), (middle, door + DOOR, middle + WALL, depth))
    objects = _draw_objects(rng, width, depth, (middle - 0.8, door - 0.2, middle + 0.9, door + DOOR + 0.2), walls)
    if objects is None:
        return None
    layout = Layout(width, depth, walls, objects, (0.0, 0.0), 0, _instruction(config, objects))
    target, obstacles = objects[0], layout.obstacles
    x, y = (round(float(rng.uniform(0.3, side - 0.3)), 2) for side in (width, depth))
    is_elsewhere = (x < middle) != (target.x < middle)
    is_near = math.hypot(target.x - x, target.y - y) < config.success_threshold + config.step_length
    if is_near or is_elsewhere != (config.eval_set == "long_horizon") or not is_free(layout, obstacles, (x, y), (x, y)):
        return None
    toward_target = round(floor_angle(target.x - x, target.y - y) / 90) * 90 % 360
    return replace(layout, start=(x, y), heading=int(rng.integers(4)) * 90 if is_elsewhere else toward_target)


def _draw_objects(
    rng: np.random.Generator, width: float, depth: float, door: Rectangle, walls: tuple[Rectangle, ...]
) -> tuple[Furniture, ...] | None:
    """Draw objects of different kinds that leave passages around them and through the door."""
    objects: list[Furniture] = []
    occupied = [door]
    for kind in rng.permutation(list(FURNITURE_KINDS))[:NUM_OBJECTS].tolist():
        half, color = FURNITURE_KINDS[kind].half_size, str(rng.choice(list(COLORS)))
        x, y = (round(float(rng.uniform(half + 0.05, side - half - 0.05)), 2) for side in (width, depth))
        item = Furniture(kind, color, x, y)
        if any(_overlaps(item.rectangle, other, GAP) for other in occupied[1:]):
            continue
        if _overlaps(item.rectangle, door, 0.0) or any(_overlaps(item.rectangle, wall, 0.05) for wall in walls):
            continue
        objects.append(item)
        occupied.append(item.rectangle)
    return tuple(objects) if len(objects) >= NUM_OBJECTS // 2 else None


def _overlaps(first: Rectangle, second: Rectangle, gap: float) -> bool:
    return all(first[axis] - gap < second[axis + 2] and second[axis] - gap < first[axis + 2] for axis in (0, 1))


def _instruction(config: NavigationConfig, objects: tuple[Furniture, ...]) -> str:
    target = objects[0]
    kind = FURNITURE_KINDS[target.kind]
    fields = {"name": target.name, "use": kind.use, "appearance": kind.appearance.format(color=target.color)}
    return INSTRUCTIONS[config.eval_set].format(**fields, other=objects[1].name)
