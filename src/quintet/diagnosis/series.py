"""Values of a metric over the steps of a run, and robust statistics of them: medians of windows, not single values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

BLOCK = 5
"""Steps whose median stands for them."""
CERTAINTY = 4.0
"""Standard errors by which two medians differ if the difference is no noise."""
MIN_BLOCKS = 7
"""Blocks from whose medians noise can be estimated."""
MEDIAN_ERROR = 1.2533
"""Standard error of the median of normally distributed values, relative to that of the mean."""
DEVIATION = 1.4826
"""Standard deviation of a normal distribution, relative to its median absolute deviation."""


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive values and their median."""

    first_step: int
    last_step: int
    median: float


@dataclass(frozen=True, slots=True)
class Series:
    """The finite values of a metric, in the order of the steps."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def window(self) -> int:
        """Number of values at the beginning, or at the end, whose median is that of the beginning, or of the end."""
        return max(1, min(len(self) // 2, max(BLOCK, len(self) // 10)))

    @property
    def start(self) -> float:
        return median(self.values[: self.window])

    @property
    def end(self) -> float:
        return median(self.values[-self.window :])

    @property
    def error(self) -> float:
        """Standard error of the difference of `start` and `end` by noise alone, also by noise that lasts some steps."""
        medians = [block.median for block in self.blocks(self.window)]
        lasting = _noise(medians) if len(medians) >= MIN_BLOCKS else 0.0
        return math.sqrt(2) * max(MEDIAN_ERROR * self.noise / math.sqrt(self.window), lasting)

    @property
    def noise(self) -> float:
        """Standard deviation from step to step around a smooth curve."""
        return _noise(self.values)

    @property
    def rises(self) -> bool:
        """Whether the end is above the start by more than noise."""
        return self.end - self.start > max(CERTAINTY * self.error, _rounding(self))

    @property
    def falls(self) -> bool:
        """Whether the end is below the start by more than noise."""
        return self.start - self.end > max(CERTAINTY * self.error, _rounding(self))

    @property
    def is_constant(self) -> bool:
        return max(self.values) - min(self.values) <= _rounding(self)

    def since(self, step: int) -> Series:
        """Return the values from a step on."""
        later = np.flatnonzero(np.asarray(self.steps) >= step)
        first = int(later[0]) if len(later) else len(self)
        return Series(self.name, self.steps[first:], self.values[first:])

    def blocks(self, size: int = BLOCK) -> list[Block]:
        """Return the medians of consecutive values; the last block ends with the last value."""
        starts = range(len(self) % size, len(self) - size + 1, size)
        medians = np.median(np.asarray(self.values[len(self) % size :], np.float64).reshape(-1, size), axis=1).tolist()
        ends = zip(starts, medians, strict=True)
        return [Block(self.steps[first], self.steps[first + size - 1], middle) for first, middle in ends]

    def rolling_medians(self, size: int) -> list[float]:
        """Return the median of each `size` consecutive values."""
        windows = np.lib.stride_tricks.sliding_window_view(np.asarray(self.values, np.float64), size)
        medians: list[float] = np.median(windows, axis=1).tolist()
        return medians

    def above(self, limit: float) -> list[Block]:
        """Return the blocks at the end whose medians are all above a limit; empty if the last median is not."""
        return self._at_end(lambda block: block.median > limit)

    def below(self, limit: float) -> list[Block]:
        """Return the blocks at the end whose medians are all below a limit; empty if the last median is not."""
        return self._at_end(lambda block: block.median < limit)

    def _at_end(self, condition: Callable[[Block], bool]) -> list[Block]:
        return [*takewhile(condition, reversed(self.blocks()))][::-1]


def _noise(values: Sequence[float]) -> float:
    """Return the standard deviation of values around a smooth curve, from second differences."""
    numbers = np.asarray(values, np.float64)
    bends = np.abs(numbers[:-2] - 2 * numbers[1:-1] + numbers[2:])
    return DEVIATION * median(bends) / math.sqrt(6) if len(bends) else 0.0


def _rounding(series: Series) -> float:
    """Return the difference that rounding may cause."""
    return 1e-9 * max(1e-12, float(np.abs(np.asarray(series.values, np.float64)).max()))


def median(values: Sequence[float] | np.ndarray) -> float:
    """Return the median of at least one value."""
    return float(np.median(np.asarray(values, np.float64)))


def text(value: float) -> str:
    """Format a value.

    >>> text(0.00012345), text(12345.678), text(0.25)
    ('0.000123', '12,300', '0.25')
    """
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:g}"


def percent(share: float) -> str:
    """Format a share.

    >>> percent(0.052)
    '5.2 %'
    """
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"
