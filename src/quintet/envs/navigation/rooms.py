"""Agent in random furnished rooms, with collisions, images and an expert."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from quintet.config.native.embodied_envs import NavigationConfig
from quintet.envs.env import UnsolvableError
from quintet.envs.navigation.house import MOVES, TILTS, TURNS, VisibleObject, direction_of, floor_angle
from quintet.envs.navigation.layouts import (
    HEADINGS,
    WALL_HEIGHT,
    crosses,
    generate_layout,
    is_free,
    next_position,
    shortest_path,
)
from quintet.envs.ray_casting import Box, Camera, Shape, cast_rays

EYE_HEIGHT: Final = 1.4
"""Height of the camera, meters."""
MAX_TILT: Final = 60
"""Largest tilt of the camera up or down, degrees."""


class RoomsHouse:
    """See `House`."""

    num_tasks: int | None = None

    def __init__(self, config: NavigationConfig) -> None:
        self._config = config

    def start(self, task: int) -> None:
        """See `House.start`.

        Raises:
            ConfigError: see `generate_layout`.
        """
        self._layout = generate_layout(self._config, task)
        self._shapes = self._layout.shapes()
        self._obstacles = self._layout.obstacles
        self.instruction = self._layout.instruction
        (self._x, self._y) = self._layout.start
        self._heading = self._layout.heading
        self._tilt = 0
        self._path: list[tuple[int, int]] | None = None

    def act(self, action: str) -> bool:
        if action in TURNS:
            self._heading = (self._heading + TURNS[action]) % 360
            return True
        if action in TILTS:
            tilt = self._tilt + TILTS[action]
            self._tilt, is_possible = (tilt, True) if abs(tilt) <= MAX_TILT else (self._tilt, False)
            return is_possible
        step = HEADINGS[(self._heading + MOVES[action]) % 360]
        to = next_position(self._x, self._y, step, self._config.step_length)
        if not is_free(self._layout, self._obstacles, (self._x, self._y), to):
            return False
        self._x, self._y = to
        self._path = self._path[1:] if self._path and self._path[0] == step else None
        return True

    @property
    def distance(self) -> float:
        target = self._layout.objects[0]
        return math.hypot(target.x - self._x, target.y - self._y)

    def visible_objects(self) -> list[VisibleObject]:
        visible = []
        for furniture in self._layout.objects:
            dx, dy = furniture.x - self._x, furniture.y - self._y
            angle = (floor_angle(dx, dy) - self._heading + 180) % 360 - 180
            hidden = any(crosses(wall, (self._x, self._y), (furniture.x, furniture.y)) for wall in self._layout.walls)
            if abs(angle) <= self._config.fov / 2 and not hidden:
                visible.append(VisibleObject(furniture.name, direction_of(angle), math.hypot(dx, dy)))
        return sorted(visible, key=lambda visible_object: visible_object.distance)

    def render(self) -> np.ndarray:
        ahead, tilt = HEADINGS[self._heading], math.radians(self._tilt)
        level, down = math.cos(tilt), -math.sin(tilt)
        camera = Camera(
            (self._x, self._y, EYE_HEIGHT),
            (ahead[0] * level, ahead[1] * level, down),
            (-ahead[0] * down, -ahead[1] * down, level),
            self._config.fov,
        )
        return cast_rays(camera, self._shapes, self._config.resolution)

    def render_map(self) -> np.ndarray:
        layout = self._layout
        ahead = HEADINGS[self._heading]
        nose = (self._x + 0.2 * ahead[0], self._y + 0.2 * ahead[1])
        markers: list[Shape] = [
            Box((x - half, y - half, WALL_HEIGHT), (x + half, y + half, WALL_HEIGHT + 0.1), color)
            for (x, y), half, color in (((self._x, self._y), 0.2, (20, 20, 20)), (nose, 0.1, (255, 255, 255)))
        ]
        center = (layout.width / 2, layout.depth / 2, WALL_HEIGHT + 1)
        height = max(layout.width, layout.depth) + 0.2
        return cast_rays(
            Camera(center, (0, 0, -1), (0, 1, 0), height=height), [*self._shapes, *markers], self._config.resolution
        )

    def expert_action(self) -> str:
        if not self._path:
            self._path = shortest_path(self._config, self._layout, (self._x, self._y))
        if not self._path:
            raise UnsolvableError("the agent cannot reach the object from here")
        heading = next(heading for heading, step in HEADINGS.items() if step == self._path[0])
        return next(name for name, turn in MOVES.items() if (self._heading + turn) % 360 == heading)

    def close(self) -> None:
        """See `House.close`."""
