"""Images of boxes and spheres by ray casting in NumPy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

Color = tuple[int, int, int]
Point = tuple[float, float, float]
"""x and y on the floor, z upward, meters."""
Pattern = Literal["plain", "tiles", "bricks"]

NEAR: Final = 0.02
"""Surfaces closer to the camera are not drawn, meters."""
SKY: Final[Color] = (214, 226, 238)
AXIS_BRIGHTNESS: Final = np.array([0.82, 0.92, 1.0], np.float32)
"""Brightness of a face by the axis of its normal."""
FADE: Final = 0.03
"""Loss of brightness per meter."""
BRICK_HEIGHT, BRICK_WIDTH, TILE = 0.3, 0.6, 0.5
"""Meters."""


@dataclass(frozen=True, slots=True)
class Box:
    """Box parallel to the axes; `inside` draws it as a room around the camera, with floor and ceiling."""

    low: Point
    high: Point
    color: Color
    pattern: Pattern = "plain"
    inside: bool = False
    floor: Color = (150, 120, 90)
    ceiling: Color = (235, 235, 230)


@dataclass(frozen=True, slots=True)
class Sphere:
    """Sphere."""

    center: Point
    radius: float
    color: Color

    @property
    def low(self) -> Point:
        x, y, z = self.center
        return x - self.radius, y - self.radius, z - self.radius

    @property
    def high(self) -> Point:
        x, y, z = self.center
        return x + self.radius, y + self.radius, z + self.radius


Shape = Box | Sphere


@dataclass(frozen=True, slots=True)
class Camera:
    """Pinhole camera with a square image; with `height`, parallel rays over so many meters instead."""

    position: Point
    forward: Point
    up: Point
    fov: float = 60.0
    """Field of view, degrees."""
    height: float | None = None


@dataclass(slots=True)
class _RayBuffer:
    """Rays of all pixels, and the depth and color of the nearest surface on each."""

    origins: np.ndarray
    """float32 [3, 1 or pixels]."""
    directions: np.ndarray
    """float32 [3, pixels]; their length along the camera's direction is 1."""
    depth: np.ndarray = field(init=False)
    color: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        count = self.directions.shape[1]
        self.depth = np.full(count, np.inf, np.float32)
        self.color = np.tile(_column(SKY), (1, count))

    def origins_of(self, pixels: np.ndarray) -> np.ndarray:
        return self.origins if self.origins.shape[1] == 1 else self.origins[:, pixels]


def _column(values: Iterable[float]) -> np.ndarray:
    return np.array(tuple(values), np.float32)[:, None]


def cast_rays(camera: Camera, shapes: Iterable[Shape], size: int) -> np.ndarray:
    """Return the image as RGB `uint8[size, size, 3]`."""
    axes = _camera_axes(camera)
    buffer = _rays(camera, axes, size)
    for shape in shapes:
        pixels = _pixels(camera, axes, shape, size)
        if len(pixels):
            if isinstance(shape, Sphere):
                _draw_sphere(buffer, shape, pixels)
            else:
                _draw_box(buffer, shape, pixels)
    return np.ascontiguousarray(buffer.color.clip(0, 255).astype(np.uint8).T).reshape(size, size, 3)


def _camera_axes(camera: Camera) -> np.ndarray:
    """Return right, up and forward as the rows of a float32 [3, 3]."""
    forward = np.array(camera.forward, np.float64)
    forward /= np.linalg.norm(forward)
    right = np.cross(forward, np.array(camera.up, np.float64))
    right /= np.linalg.norm(right)
    return np.stack([right, np.cross(right, forward), forward]).astype(np.float32)


def _rays(camera: Camera, axes: np.ndarray, size: int) -> _RayBuffer:
    steps = (np.arange(size, dtype=np.float32) + 0.5) * 2 / size - 1
    right, down = np.meshgrid(steps, steps)
    half = np.float32(np.tan(np.radians(camera.fov) / 2) if camera.height is None else camera.height / 2)
    offsets = half * (axes[0][:, None] * right.reshape(1, -1) - axes[1][:, None] * down.reshape(1, -1))
    position, forward = _column(camera.position), axes[2][:, None]
    if camera.height is None:
        return _RayBuffer(position, forward + offsets)
    return _RayBuffer(position + offsets, np.tile(forward, (1, size * size)))


def _pixels(camera: Camera, axes: np.ndarray, shape: Shape, size: int) -> np.ndarray:
    """Return the numbers of the pixels that a shape may cover: the rectangle around its projected corners."""
    corners = np.array(
        [[(a, b)[i] for a, b, i in zip(shape.low, shape.high, which, strict=True)] for which in np.ndindex(2, 2, 2)]
    )
    right, up, depth = axes @ (corners - np.array(camera.position)).T
    if camera.height is None:
        if depth.max() <= NEAR:
            return np.arange(0)
        if depth.min() <= NEAR:
            return np.arange(size * size)
        half = depth * np.tan(np.radians(camera.fov) / 2)
    else:
        half = np.full(8, camera.height / 2)
    columns, rows = ((np.stack([right, -up]) / half + 1) * size / 2).clip(-1, size + 1)
    first_row, last_row = max(0, int(rows.min()) - 1), min(size, int(rows.max()) + 2)
    first, last = max(0, int(columns.min()) - 1), min(size, int(columns.max()) + 2)
    numbers = np.arange(first_row, last_row)[:, None] * size + np.arange(first, last)
    return numbers.reshape(-1)


def _draw_box(buffer: _RayBuffer, box: Box, pixels: np.ndarray) -> None:
    origins, directions = buffer.origins_of(pixels), buffer.directions[:, pixels]
    with np.errstate(divide="ignore", invalid="ignore"):
        first = (_column(box.low) - origins) / directions
        second = (_column(box.high) - origins) / directions
    near, far = np.fmin(first, second), np.fmax(first, second)
    entry = np.maximum(np.maximum(near[0], near[1]), near[2])
    leave = np.minimum(np.minimum(far[0], far[1]), far[2])
    distance, sides = (leave, far) if box.inside else (entry, near)
    visible = np.flatnonzero((entry <= leave) & (distance > NEAR) & (distance < buffer.depth[pixels]))
    if not len(visible):
        return
    distance, directions = distance[visible], directions[:, visible]
    axis = np.where(sides[0, visible] == distance, 0, np.where(sides[1, visible] == distance, 1, 2))
    points = (origins if origins.shape[1] == 1 else origins[:, visible]) + directions * distance
    buffer.depth[pixels[visible]] = distance
    buffer.color[:, pixels[visible]] = _box_colors(box, points, axis, directions[2] > 0) * _brightness(axis, distance)


def _box_colors(box: Box, points: np.ndarray, axis: np.ndarray, is_upward: np.ndarray) -> np.ndarray:
    """Return the colors of points on faces with normals along `axis`, float32 [3, points]."""
    is_wall = axis != 2
    colors = np.repeat(_column(box.color), len(axis), axis=1)
    if box.inside:
        level = np.where(is_upward, _column(box.ceiling), _column(box.floor))
        colors = np.where(is_wall, colors, level)
    if box.pattern == "plain":
        return colors
    across, rows = np.where(axis == 0, points[1], points[0]), points[2] / np.float32(BRICK_HEIGHT)
    offset = (rows // 1 % 2) / 2
    is_joint = is_wall & ((rows % 1 < 0.08) | ((across / np.float32(BRICK_WIDTH) + offset) % 1 < 0.04))
    is_dark = ~is_wall & ((points[0] // TILE + points[1] // TILE) % 2 > 0)
    shaded: np.ndarray = colors * np.where(
        is_joint, np.float32(0.8), np.where(is_dark, np.float32(0.88), np.float32(1))
    )
    return shaded


def _brightness(axis: np.ndarray, distance: np.ndarray) -> np.ndarray:
    shade: np.ndarray = AXIS_BRIGHTNESS[axis] * np.maximum(1 - np.float32(FADE) * distance, np.float32(0.4))
    return shade


def _draw_sphere(buffer: _RayBuffer, sphere: Sphere, pixels: np.ndarray) -> None:
    directions, offset = buffer.directions[:, pixels], buffer.origins_of(pixels) - _column(sphere.center)
    a, b = (directions * directions).sum(axis=0), (directions * offset).sum(axis=0)
    root = b * b - a * ((offset * offset).sum(axis=0) - np.float32(sphere.radius) ** 2)
    distance = (-b - np.sqrt(np.maximum(root, 0))) / a
    visible = np.flatnonzero((root > 0) & (distance > NEAR) & (distance < buffer.depth[pixels]))
    distance = distance[visible]
    height = (offset if offset.shape[1] == 1 else offset[:, visible])[2] + directions[2, visible] * distance
    shade = (0.8 + 0.2 * height / sphere.radius) * np.maximum(1 - FADE * distance, 0.4)
    buffer.depth[pixels[visible]] = distance
    buffer.color[:, pixels[visible]] = _column(sphere.color) * shade
