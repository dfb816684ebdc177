"""Image of a table with objects, targets, the drawer and the gripper."""

from __future__ import annotations

from typing import Final

import numpy as np

from quintet.envs.primitive_skill.tasks import Body, Drawer, Scene
from quintet.envs.ray_casting import Box, Camera, Color, Point, Shape, Sphere, cast_rays

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


def draw_scene(scene: Scene, resolution: int) -> np.ndarray:
    """Return the image, RGB `uint8[resolution, resolution, 3]`."""
    return cast_rays(CAMERA, _shapes(scene), resolution)


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
