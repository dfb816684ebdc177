"""Objects in the rooms of the navigation env: their shapes, and words for them."""

from __future__ import annotations

from dataclasses import dataclass

from quintet.envs.ray_casting import Box, Color, Shape, Sphere

COLORS: dict[str, Color] = {
    "red": (214, 48, 49),
    "green": (46, 160, 67),
    "blue": (45, 105, 214),
    "yellow": (240, 200, 40),
    "purple": (142, 68, 173),
    "orange": (235, 126, 30),
}
DARK, WHITE, LEAVES = (40, 40, 44), (245, 245, 245), (38, 120, 52)
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


FURNITURE_KINDS: dict[str, FurnitureKind] = {
    "chair": FurnitureKind(
        (
            (0, 0, 0, 0.34, 0.34, 0.42, DARK),
            (0, 0, 0.42, 0.44, 0.44, 0.06, None),
            (0, 0.2, 0.48, 0.44, 0.05, 0.5, None),
        ),
        "a seat for one person",
        "low {color} seat with one upright board behind it",
    ),
    "table": FurnitureKind(
        ((0, 0, 0, 0.12, 0.12, 0.7, DARK), (0, 0, 0.7, 0.9, 0.7, 0.05, None)),
        "a surface to eat at",
        "wide, thin {color} plate on a dark post",
    ),
    "bed": FurnitureKind(
        ((0, 0, 0, 0.9, 1.3, 0.4, None), (0, 0.45, 0.4, 0.6, 0.3, 0.1, WHITE)),
        "a place to sleep",
        "large, flat {color} block with something white at one end",
    ),
    "lamp": FurnitureKind(
        ((0, 0, 0, 0.06, 0.06, 1.3, DARK), (0, 0, 1.25, 0.4, 0.4, 0, None)),
        "something that lights up the room",
        "thin, dark pole with a round {color} top",
    ),
    "ball": FurnitureKind(((0, 0, 0, 0.5, 0.5, 0, None),), "a toy that rolls", "round {color} thing on the floor"),
    "plant": FurnitureKind(
        ((0, 0, 0, 0.34, 0.34, 0.3, None), (0, 0, 0.25, 0.6, 0.6, 0, LEAVES)),
        "something that has to be watered",
        "green crown in a {color} pot",
    ),
    "crate": FurnitureKind(((0, 0, 0, 0.5, 0.5, 0.5, None),), "a container for moving house", "plain {color} cube"),
    "television": FurnitureKind(
        ((0, 0, 0, 0.7, 0.3, 0.4, None), (0, 0, 0.45, 0.8, 0.06, 0.5, DARK)),
        "something to watch the news on",
        "dark panel on a {color} stand",
    ),
    "bookshelf": FurnitureKind(
        ((0, 0, 0, 0.8, 0.3, 1.7, None), (0, 0, 0.5, 0.82, 0.2, 0.05, DARK), (0, 0, 1.1, 0.82, 0.2, 0.05, DARK)),
        "a place to look for a novel",
        "tall {color} cupboard with dark lines",
    ),
}
