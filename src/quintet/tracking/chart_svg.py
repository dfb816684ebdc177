"""Learning curves as inline SVG.

Curves stretch with the page but text does not: lines are in an SVG without a fixed aspect ratio, labels are HTML
around it. A point is a zero-length line with round caps, so it stays round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

_MAX_POINTS = 800
_SIDE = 1000.0


@dataclass(frozen=True, slots=True)
class Series:
    """Curve of a chart: `points` are (step, value), steps ascending; NaN leaves a gap."""

    label: str
    points: tuple[Point, ...]
    tone: str = "main"
    """Colour role: `main` or `second`."""
    dots: bool = False
    """Mark each point; for metrics that are not logged every step."""

    def finite(self) -> list[Point]:
        return [point for point in self.points if math.isfinite(point[1])]


def number_text(value: float | None, percent: bool = False) -> str:
    """Format a number for the page.

    >>> number_text(0.875, percent=True), number_text(-0.04567), number_text(12345.0), number_text(None)
    ('87.5 %', '−0.0457', '12,345', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    if percent:
        text = f"{100 * value:.1f}".removesuffix(".0") + " %"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.3g}"
    return text.replace("-", "−")


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round tick values within the bounds, in steps of 1, 2 or 5 times a power of ten.

    >>> ticks(0.0, 1.0), ticks(0.0, 100.0)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.0, 20.0, 40.0, 60.0, 80.0, 100.0])
    """
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda size: abs(size - raw))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Chart:
    """Figure with curves; curves without a finite value are omitted."""

    title: str
    caption: str
    series: tuple[Series, ...]
    percent: bool = False
    wide: bool = False
    bounds: tuple[float, float] | None = None
    """Bounds of the vertical axis (default: the bounds of the values)."""

    def html(self) -> str:
        """Return the figure as HTML, empty if no curve has a value."""
        shown = [series for series in self.series if series.finite()]
        if not shown:
            return ""
        x = _bounds([point[0] for series in shown for point in series.finite()])
        y = self.bounds or _padded_bounds(_bounds([point[1] for series in shown for point in series.finite()]))
        return (
            f'<figure class="chart{" wide" if self.wide else ""}" data-chart="{escape(self._data(shown, x, y))}">'
            f"<figcaption><h3>{escape(self.title)}</h3>{self._legend(shown)}</figcaption>"
            f'<div class="plot">{self._axis_y(y)}<div class="area">{_drawing(shown, x, y)}'
            f'<i class="cursor"></i></div>{_axis_x(x)}</div>'
            f'<p class="note">{escape(self.caption)}</p></figure>'
        )

    def _data(self, shown: Sequence[Series], x: Point, y: Point) -> str:
        """Return the JSON from which the script shows values under the pointer."""
        curves = [[[step, float(f"{value:.6g}")] for step, value in _thin(series.finite())] for series in shown]
        return json.dumps({"x": x, "y": y, "percent": self.percent, "curves": curves})

    def _legend(self, shown: Sequence[Series]) -> str:
        items = (
            f'<li class="{series.tone}">{escape(series.label)} '
            f"<output>{number_text(series.finite()[-1][1], self.percent)}</output></li>"
            for series in shown
        )
        return f'<ul class="legend">{"".join(items)}<li class="at"></li></ul>'

    def _axis_y(self, bounds: Point) -> str:
        marks = (
            f'<span style="bottom:{100 * _share(tick, bounds):.2f}%">{number_text(tick, self.percent)}</span>'
            for tick in ticks(*bounds)
        )
        return f'<div class="y" aria-hidden="true">{"".join(marks)}</div>'


def _axis_x(bounds: Point) -> str:
    marks = (
        f'<span style="left:{100 * _share(tick, bounds):.2f}%">{number_text(tick)}</span>'
        for tick in ticks(*bounds)
        if tick == int(tick)
    )
    return f'<div class="x" aria-hidden="true">{"".join(marks)}</div>'


def _bounds(values: Sequence[float]) -> Point:
    """Return minimum and maximum, widened if they are equal."""
    low, high = min(values), max(values)
    margin = 0.0 if low < high else abs(low) * 0.1 or 1.0
    return low - margin, high + margin


def _padded_bounds(bounds: Point) -> Point:
    """Return bounds with a margin; axes that nearly reach 0 start at 0."""
    low, high = bounds
    margin = 0.08 * (high - low)
    return (0.0 if 0.0 <= low < 0.3 * high else low - margin), high + margin


def _share(value: float, bounds: Point) -> float:
    return (value - bounds[0]) / (bounds[1] - bounds[0])


def _thin(points: Sequence[Point]) -> list[Point]:
    """Reduce to about `_MAX_POINTS` points, preserving the minimum and maximum of each interval."""
    if len(points) <= _MAX_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / _MAX_POINTS)
    thinned: list[Point] = []
    for start in range(0, len(points), size):
        interval = points[start : start + size]
        ends = {min(interval, key=lambda point: point[1]), max(interval, key=lambda point: point[1])}
        thinned.extend(sorted(ends))
    return thinned


def _runs(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield contiguous segments between gaps."""
    run: list[Point] = []
    for point in points:
        if math.isfinite(point[1]):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _drawing(shown: Sequence[Series], x: Point, y: Point) -> str:
    grid = "".join(f'<path class="grid" d="M0 {_y_coordinate(tick, y):.1f}H{_SIDE:.0f}"/>' for tick in ticks(*y))
    curves = "".join(_curve(series, x, y) for series in shown)
    return (
        f'<svg viewBox="0 0 {_SIDE:.0f} {_SIDE:.0f}" preserveAspectRatio="none" aria-hidden="true">{grid}{curves}</svg>'
    )


def _y_coordinate(value: float, bounds: Point) -> float:
    """Return the SVG y coordinate (pointing down), clamped to the axis."""
    return _SIDE * (1.0 - min(max(_share(value, bounds), 0.0), 1.0))


def _curve(series: Series, x: Point, y: Point) -> str:
    runs = [_thin(run) for run in _runs(series.points)]
    placed = [[(_SIDE * _share(step, x), _y_coordinate(value, y)) for step, value in run] for run in runs]
    line = "".join("M" + "L".join(f"{x_coordinate:.1f} {down:.1f}" for x_coordinate, down in run) for run in placed)
    drawn = f'<path class="line {series.tone}" d="{line}"/>'
    if series.dots:
        dots = "".join(f"M{x_coordinate:.1f} {down:.1f}h0" for run in placed for x_coordinate, down in run)
        drawn += f'<path class="dots {series.tone}" d="{dots}"/>'
    return drawn
