"""Objects in the rooms of the navigation env: their shapes, and words for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

from quintet.envs.ray_casting import Box, Color, Shape, Sphere
from quintet.package_files import read_yaml

TABLES: Final = read_yaml(__file__)
COLORS: dict[str, Color] = {name: tuple(color) for name, color in TABLES["colors"].items()}
FIXED_COLORS: dict[str, Color] = {name: tuple(color) for name, color in TABLES["fixed_colors"].items()}
Part = tuple[float, float, float, float, float, float, Color | None]
"""x and y of the center, lowest z, size in x, y and z, and color; None is the object's own. A sphere has size z 0."""


@dataclass(frozen=True, slots=True)
class FurnitureKind:
    """Shape and descriptions of one kind of furniture."""

    parts: tuple[Part, ...]
    use: str
    """What it is for."""
    appearance: str
    """What it looks like."""

    @property
    def half_size(self) -> float:
        """Half of the side of the square that the object covers, meters."""
        return max(max(abs(x) + dx / 2, abs(y) + dy / 2) for x, y, _, dx, dy, _, _ in self.parts)

    def shapes(self, x: float, y: float, color: Color) -> list[Shape]:
        """Return the shapes of an object at a place on the floor."""
        return [_shape(part, x, y, color) for part in self.parts]


def _shape(part: Part, x: float, y: float, color: Color) -> Shape:
    dx, dy, low, width, depth, height, own_color = part
    part_color = own_color or color
    if height == 0:
        return Sphere((x + dx, y + dy, low + width / 2), width / 2, part_color)
    corner = (x + dx - width / 2, y + dy - depth / 2, low)
    return Box(corner, (corner[0] + width, corner[1] + depth, low + height), part_color)


def _furniture_kind(parts: list[list[Any]], use: str, appearance: str) -> FurnitureKind:
    colored = [cast("Part", (*sizes, FIXED_COLORS.get(color))) for *sizes, color in parts]
    return FurnitureKind(tuple(colored), use, appearance)


FURNITURE_KINDS = {name: _furniture_kind(**kind) for name, kind in TABLES["kinds"].items()}
