"""Text grids and images as inline SVG; equal ones are drawn once and referenced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from string import Template

from quintet.envs.service.png import SIZE, SIZE_START, png_data_url
from quintet.package_files import read_yaml

DISPLAY = read_yaml(__file__, "episode_display.yaml")
LEGENDS: Mapping[str, Mapping[str, Sequence[str]]] = DISPLAY["legends"]
FLOORS: Mapping[str, str] = DISPLAY["floors"]

_TILE = 20
_BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_HIDDEN = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)} | {
    ord(mark): f"\\u{ord(mark):04x}" for mark in _BIDI
}


def visible(text: str) -> str:
    """Escape untrusted text for HTML; control and bidi characters become visible escapes."""
    return escape(text.translate(_HIDDEN).encode(errors="backslashreplace").decode())


def find_grid(env: str, text: str) -> list[list[str]] | None:
    """Return the largest rectangle of grid symbols in `text`, with or without spaces between them, or None."""
    legend = LEGENDS.get(env, {})
    best: list[list[str]] = []
    block: list[list[str]] = []
    for line in text.splitlines():
        words = line.split()
        cells = list(line) if len(words) == 1 else words
        if len(cells) < 2 or any(cell not in legend for cell in cells):
            block = []
            continue
        block = [*block, cells] if block and len(block[0]) == len(cells) else [cells]
        best = max(best, block, key=len)
    return best if len(best) >= 2 else None


def grid_svg(env: str, text: str) -> str | None:
    """Return the grid in an observation as an SVG that refers to the tiles of `tiles.svg`; None without a grid."""
    grid = find_grid(env, text)
    if grid is None:
        return None
    label = visible("\n".join(" ".join(row) for row in grid))
    box = f'viewBox="0 0 {len(grid[0]) * _TILE} {len(grid) * _TILE}"'
    return f'<svg class="board" {box} role="img" aria-label="{label}">{_grid_content(env, grid)}</svg>'


class GridSheet:
    """Grids and images of a page, each distinct one defined once."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str] | bytes, int] = {}
        self._symbols: list[str] = []

    def show(self, env: str, text: str) -> str:
        """Return HTML for the observation `text`: its grid, or the text if it contains none."""
        grid = find_grid(env, text)
        if grid is None:
            return f'<pre class="board text">{visible(text)}</pre>'
        rows = "\n".join(" ".join(row) for row in grid)
        size = len(grid[0]) * _TILE, len(grid) * _TILE
        return self._use((env, rows), _grid_content(env, grid), size, visible(rows))

    def show_image(self, png: bytes) -> str:
        """Return HTML for the PNG file of an image."""
        width, height = SIZE.unpack_from(png, SIZE_START)
        content = f'<image href="{png_data_url(png)}" width="{width}" height="{height}"/>'
        return self._use(png, content, (width, height), f"image of {width}×{height} pixels")

    def _use(self, key: tuple[str, str] | bytes, content: str, size: tuple[int, int], label: str) -> str:
        """Return the reference to a drawing, which is defined if it is new."""
        box = f'viewBox="0 0 {size[0]} {size[1]}"'
        number = self._numbers.setdefault(key, len(self._numbers))
        if number == len(self._symbols):
            self._symbols.append(f'<symbol id="b{number}" {box}>{content}</symbol>\n')
        return f'<svg class="board" {box} role="img" aria-label="{label}"><use href="#b{number}"/></svg>'

    def definitions(self, tiles: str) -> str:
        """Return the hidden SVG with all tile and grid definitions; `tiles` is the SVG template of the tiles."""
        return Template(tiles).substitute(boards="".join(self._symbols))


def _grid_content(env: str, grid: list[list[str]]) -> str:
    width, height = len(grid[0]) * _TILE, len(grid) * _TILE
    uses = [
        f'<use href="#t-{tile}" x="{column * _TILE}" y="{row * _TILE}" width="{_TILE}" height="{_TILE}"/>'
        for row, cells in enumerate(grid)
        for column, cell in enumerate(cells)
        for tile in LEGENDS[env][cell]
    ]
    return f'<rect width="{width}" height="{height}" fill="url(#{FLOORS[env]})"/>{"".join(uses)}'
