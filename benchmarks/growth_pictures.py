"""Draw the results of `growth.py` and `growth_engine.py`: costs over sizes, both relative to the smallest size.

    python benchmarks/growth_pictures.py

Prints the tables of `docs/scaling.md`, and writes `docs/images/growth.svg` and `docs/images/growth_engine.svg`. Scales
are logarithmic; a grey line shows costs that grow as fast as the work.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.tracking.chart_svg import number_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
WIDTH, HEIGHT, GAP, COLUMNS = 200, 110, 34, 3
STYLE = "<style>text{font:11px sans-serif;fill:#333}.small{fill:#666}polyline{fill:none;stroke-width:2}</style>"
UNITS = {"cpu_seconds": "s of CPU", "seconds": "s", "peak_mb": "MB"}


@dataclass(frozen=True, slots=True)
class Growth:
    """Costs of a work at ascending sizes."""

    work: str
    unit: str
    sizes: Sequence[float]
    costs: Sequence[float]
    exponent: float

    def svg(self, left: float, top: float) -> str:
        """Return the chart with its upper left corner at a point."""
        frame = f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#ddd"/>'
        unit = f" {self.unit}" if self.unit else ""
        ends = [f"{number_text(size)}: {number_text(cost)}{unit}" for size, cost in self._ends()]
        return (
            f'{frame}<text x="{left}" y="{top - 6}">{self.work}, exponent {self.exponent}</text>'
            f'<text class="small" x="{left}" y="{top + HEIGHT + 13}">{", ".join(ends)}</text>'
            f"{self._line(self.sizes, '#bbb', left, top)}{self._line(self.costs, '#1f6feb', left, top)}"
        )

    def _ends(self) -> Iterator[tuple[float, float]]:
        pairs = list(zip(self.sizes, self.costs, strict=True))
        yield pairs[0]
        yield pairs[-1]

    def _line(self, values: Sequence[float], colour: str, left: float, top: float) -> str:
        scale = math.log(self.sizes[-1] / self.sizes[0])
        shares = [
            (math.log(size / self.sizes[0]) / scale, math.log(value / values[0]) / scale)
            for size, value in zip(self.sizes, values, strict=True)
        ]
        # costs that fall, or grow faster than the square, end at the frame
        points = [(left + WIDTH * x, top + HEIGHT * (1 - min(max(y, 0.0), 2.0) / 2)) for x, y in shares]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        return f'<polyline stroke="{colour}" points="{text}"/>'


def of_works(results: Mapping[str, Any]) -> list[Growth]:
    """Return the works in a file of `growth.py`."""
    return [
        Growth(
            work,
            UNITS[measured["cost"]],
            [result["size"] for result in measured["results"]],
            [result[measured["cost"]] for result in measured["results"]],
            measured["exponent"],
        )
        for work, measured in results.items()
    ]


def of_engine(results: Mapping[str, Any]) -> list[Growth]:
    """Return the cases in a file of `growth_engine.py`."""
    growths = []
    for case, entry in results["growth"].items():
        is_memory = case == "memory"
        costs = [row["cost"] / 1e6 if is_memory else row["cost"] for row in entry["rows"]]
        growths.append(Growth(case, "MB" if is_memory else "s", entry["sizes"], costs, entry["exponent"]))
    return growths


def picture(charts: Sequence[Growth]) -> str:
    """Return all charts as one SVG image."""
    places = [(GAP + i % COLUMNS * (WIDTH + GAP), GAP + i // COLUMNS * (HEIGHT + 2 * GAP)) for i in range(len(charts))]
    drawn = "\n".join(chart.svg(left, top) for chart, (left, top) in zip(charts, places, strict=True))
    rows = -(-len(charts) // COLUMNS)
    size = f"0 0 {COLUMNS * (WIDTH + GAP) + GAP} {rows * (HEIGHT + 2 * GAP)}"
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}">{STYLE}{background}\n{drawn}\n</svg>\n'


def table(results: Mapping[str, Any]) -> str:
    """Return the costs of all works in a file of `growth.py` at their sizes as a table of Markdown."""
    lines = ["| work | size | cost | exponent | load |", "| --- | --- | --- | --- | --- |"]
    for work, measured in results.items():
        sizes, costs = [], []
        for result in measured["results"]:
            sizes.append(number_text(result["size"]))
            costs.append(number_text(result[measured["cost"]]))
        unit, load = UNITS[measured["cost"]], measured["machine"]["load_before"]
        cells = [work, ", ".join(sizes), f"{', '.join(costs)} {unit}", measured["exponent"], load]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def engine_table(results: Mapping[str, Any]) -> str:
    """Return the ratios of the cases in a file of `growth_engine.py` at their sizes as a table of Markdown."""
    lines = ["| case | tokens | ratio |", "| --- | --- | --- |"]
    for case, entry in results["growth"].items():
        ratios = [f"{row.get('blocks_ratio', row['ratio']):.2f}" for row in entry["rows"]]
        lines.append(f"| {case} | {', '.join(map(number_text, entry['sizes']))} | {', '.join(ratios)} |")
    return "\n".join(lines)


def read(name: str) -> dict[str, Any]:
    """Return the results of a benchmark."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def pictures() -> dict[Path, str]:
    """Return the text of each image; none of a file without complete results."""
    works, engine = of_works(read("growth")), of_engine(read("growth_engine"))
    images = {IMAGES / "growth.svg": works, IMAGES / "growth_engine.svg": engine}
    return {path: picture(charts) for path, charts in images.items() if charts}


if __name__ == "__main__":
    for image, svg in pictures().items():
        image.write_text(svg)
    print(table(read("growth")), engine_table(read("growth_engine")), sep="\n\n")
