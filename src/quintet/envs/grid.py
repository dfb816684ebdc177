"""Rendering of symbol grids as text and as images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from PIL import Image

TILE: Final = 32
"""Pixels per side."""


def grid_text(rows: Sequence[Sequence[str]]) -> str:
    """Return the grid with a space before each symbol, so that tokenizers separate them: ` P _ O`."""
    return "\n".join("".join(f" {symbol}" for symbol in row) for row in rows)


def neighbors_text(rows: Sequence[Sequence[str]], row: int, column: int, moves: Mapping[str, tuple[int, int]]) -> str:
    """Return the neighbors of a cell as moves and symbols, # beyond the edge: `Left _ Down O Right # Up _`."""
    neighbors = []
    for name, (down, right) in moves.items():
        r, c = row + down, column + right
        inside = 0 <= r < len(rows) and 0 <= c < len(rows[0])
        neighbors.append(f"{name} {rows[r][c] if inside else '#'}")
    return " ".join(neighbors)


def coordinates_text(positions: Mapping[str, Sequence[tuple[int, int]]], height: int, width: int) -> str:
    """Return the size of a grid and the row and column of everything in it, by name, from 0 at the top left."""
    lines = [f"Board size: {height} rows x {width} cols (zero-indexed)."]
    lines += [
        f"{name}: {', '.join(f'({row}, {column})' for row, column in at)}" for name, at in positions.items() if at
    ]
    return "\n".join(lines)


def positions_of(rows: Sequence[Sequence[str]], symbols: str) -> list[tuple[int, int]]:
    """Return row and column of the cells that have one of the symbols, row by row."""
    return [(r, c) for r, row in enumerate(rows) for c, symbol in enumerate(row) if symbol in symbols]


def state_text(
    observation: str,
    rows: Sequence[Sequence[str]],
    positions: Mapping[str, Sequence[tuple[int, int]]],
    position: tuple[int, int],
    moves: Mapping[str, tuple[int, int]],
) -> str:
    """Return a state in the format `env.observation`. Formats with coordinates are RAGEN's texts, with their spaces."""
    if observation in ("coordinates", "grid_coordinates"):
        coordinates = coordinates_text(positions, len(rows), len(rows[0]))
        if observation == "coordinates":
            return coordinates
        return f"Coordinates: \n{coordinates}\nGrid Map: \n" + "\n".join("".join(row) for row in rows)
    text = grid_text(rows)
    return text if observation == "grid" else f"{text}\n{neighbors_text(rows, *position, moves)}"


def resize_tiles(tiles: Mapping[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """Return the tiles with `size` pixels per side."""
    return {
        symbol: np.asarray(Image.fromarray(tile).resize((size, size), Image.Resampling.BOX))
        for symbol, tile in tiles.items()
    }


def draw_tiles(rows: Sequence[Sequence[str]], tiles: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return RGB `uint8[height * tile, width * tile, 3]` with one tile image per symbol."""
    return np.concatenate([np.concatenate([tiles[symbol] for symbol in row], axis=1) for row in rows], axis=0)


def _distance(row: float, column: float) -> np.ndarray:
    y, x = np.mgrid[0:TILE, 0:TILE] + 0.5
    distance: np.ndarray = np.hypot(y - row * TILE, x - column * TILE)
    return distance


def plain(color: tuple[int, int, int], border: tuple[int, int, int] = (203, 213, 225)) -> np.ndarray:
    """Return a tile of one color with a thin border."""
    tile = np.empty((TILE, TILE, 3), np.uint8)
    tile[:] = border
    tile[1:-1, 1:-1] = color
    return tile


def disc(tile: np.ndarray, color: tuple[int, int, int], radius: float, row: float = 0.5) -> np.ndarray:
    """Return the tile with a disc; `radius` and `row` are shares of the tile."""
    out = tile.copy()
    out[_distance(row, 0.5) < radius * TILE] = color
    return out


def square(tile: np.ndarray, color: tuple[int, int, int], share: float) -> np.ndarray:
    """Return the tile with a centered square; `share` is its side relative to the tile."""
    out = tile.copy()
    margin = round(TILE * (1 - share) / 2)
    out[margin : TILE - margin, margin : TILE - margin] = color
    return out


def agent(tile: np.ndarray, *, in_hole: bool = False) -> np.ndarray:
    """Return the tile with the agent on it, or only its head if `in_hole`."""
    if in_hole:
        return disc(tile, (234, 88, 12), 0.16, row=0.6)
    return disc(disc(tile, (234, 88, 12), 0.30, row=0.6), (254, 215, 170), 0.14, row=0.28)
