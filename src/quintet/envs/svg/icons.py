"""Simple icons, drawn from a seed: one or several shapes in few colours, on a coarse grid."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from quintet.envs.start_states import layout_split, split_of

SIDE: Final = 16
"""Width and height of the view box, in the units of the shapes."""
COLORS: Final = ("red", "blue", "green", "orange", "purple", "black")
MAX_ATTEMPTS: Final = 1_000


def icon_code(seed: int, max_shapes: int) -> str:
    """Return the SVG code of a seed's icon, with up to `max_shapes` shapes. Seeds of different splits have different
    icons."""
    rng, split = random.Random(seed), split_of(seed)  # noqa: S311 - a drawing, no secret
    for _ in range(MAX_ATTEMPTS):
        shapes = "".join(_shape(rng) for _ in range(rng.randint(1, max_shapes)))
        code = f'<svg viewBox="0 0 {SIDE} {SIDE}">{shapes}</svg>'
        if layout_split(code) is split:
            return code
    raise AssertionError("a third of all icons belongs to each split")


def _shape(rng: random.Random) -> str:
    draw = rng.choice(_SHAPES)
    return draw(rng, rng.choice(COLORS))


def _circle(rng: random.Random, color: str) -> str:
    radius = rng.randrange(2, 7, 2)
    x, y = (rng.randrange(radius, SIDE - radius + 1, 2) for _ in "xy")
    return f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{color}"/>'


def _rectangle(rng: random.Random, color: str) -> str:
    width, height = (rng.randrange(4, 13, 4) for _ in "xy")
    x, y = rng.randrange(0, SIDE - width + 1, 2), rng.randrange(0, SIDE - height + 1, 2)
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{color}"/>'


def _triangle(rng: random.Random, color: str) -> str:
    side = rng.randrange(4, 13, 4)
    x, y = rng.randrange(0, SIDE - side + 1, 2), rng.randrange(side, SIDE + 1, 2)
    return f'<path d="M{x} {y} h{side} l{-side // 2} {-side} z" fill="{color}"/>'


_SHAPES: Final[tuple[Callable[[random.Random, str], str], ...]] = (_circle, _rectangle, _triangle)
