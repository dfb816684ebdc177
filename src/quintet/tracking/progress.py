"""Progress display: a bar with rate and remaining time on a terminal, plain lines elsewhere.

Output goes only to the `rich` console that the command line passes in.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from quintet.tracking.metrics import describe

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

KEY_METRICS: Mapping[str, str] = {
    "trajectory/success_rate": "success",
    "critic/score/mean": "reward",
    "val/{env}/success_rate": "validation",
    "val/{env}/reward": "validation reward",
    "sft/loss": "loss",
    "sft/likely_tokens": "likely tokens",
    "train/loss": "loss",
    "train/likely_tokens": "likely tokens",
    "val/loss": "held-out loss",
}
"""Metrics shown beside the progress of a phase, with their labels."""
MIN_SECONDS = 0.5
"""Time after which a rate is shown: over a shorter time it measures the clock and single events."""


class Reporter(Protocol):
    """Display for the metrics of a step."""

    def report(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Phase(Protocol):
    """Phase of known length."""

    def advance(self, metrics: Mapping[str, float] | None = None, count: int = 1) -> None:
        """Advance by `count` units and show `metrics`."""


class Progress(Reporter, Protocol):
    """Display for nested phases and notes."""

    def phase(self, name: str, total: int, done: int = 0, unit: str = "step") -> AbstractContextManager[Phase]:
        """Start a phase of `total` units, of which `done` are already completed (in a resumed run)."""

    def note(self, text: str) -> None:
        """Print one permanent line."""


def build_progress(console: Console, every_seconds: float = 5.0) -> Progress:
    """Return a progress bar for a terminal, plain lines otherwise; in CI, one line at the end of each phase.

    Notebooks force colors (`FORCE_COLOR`), but cannot move the cursor.
    """
    if console.is_terminal and console.file.isatty():
        return BarProgress(console)
    return PlainProgress(console, math.inf if os.environ.get("CI") else every_seconds)


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(41.2), duration(125), duration(3900)
    ('41 s', '2 min', '1 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _rate(value: float) -> str:
    """Format a rate with at most three significant digits, without an exponent.

    >>> _rate(2263.1), _rate(150.2), _rate(12.34), _rate(0.0123)
    ('2,260', '150', '12.3', '0.0123')
    """
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


class _Pace:
    """Moving average of seconds per unit over at least `MIN_SECONDS`, without the first units as soon as there are
    others: they are slow, so that the overall mean misleads."""

    def __init__(self, total: int, done: int, unit: str, clock: Callable[[], float]) -> None:
        self.total, self.done, self.unit, self.clock = total, done, unit, clock
        self._start = (clock(), done)
        self._marks: deque[tuple[float, int]] = deque([self._start], maxlen=20)

    def advance(self, count: int) -> None:
        self.done += count
        now = self.clock()
        if len(self._marks) > 1 and now - self._marks[-2][0] < MIN_SECONDS / 8:
            self._marks.pop()  # 20 marks span at least 9 of these intervals
        self._marks.append((now, self.done))

    def seconds_per_unit(self, *, settled: bool = False) -> float | None:
        """Return the average over the last marks, None if they cover less than `MIN_SECONDS`; with `settled` None if
        only the first units are done, which take much longer than the others."""
        after_first = list(self._marks)[self._marks[0] == self._start :]
        average = _average(after_first)
        return average if settled or average is not None else _average(self._marks)

    def rate(self) -> str:
        pace = self.seconds_per_unit()
        if pace is None:
            return ""
        return f"{_rate(pace)} s/{self.unit}" if pace >= 1 else f"{_rate(1 / pace)} {self.unit}s/s"

    def remaining(self) -> str:
        pace = self.seconds_per_unit(settled=True)
        if pace is None or self.done >= self.total:
            return ""
        return f"{duration(pace * (self.total - self.done))} left"


def _average(marks: Sequence[tuple[float, int]]) -> float | None:
    """Return the seconds per unit from the first to the last mark, None if that is less than `MIN_SECONDS`."""
    if not marks:
        return None
    (start, first), (end, last) = marks[0], marks[-1]
    return (end - start) / (last - first) if last > first and end - start >= MIN_SECONDS else None


def _select_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are shown, in the order of `KEY_METRICS`. With several environments these are the metrics
    over all environments. The reward of a validation is shown if its success is not measured."""
    is_mixed = any(name.startswith("val/all/") for name in metrics)
    defined = [
        (describe(name).name, name, value)
        for name, value in metrics.items()
        if not (is_mixed and name.startswith("val/") and not name.startswith("val/all/"))
    ]
    if any(definition == "val/{env}/success_rate" for definition, _, _ in defined):
        defined = [entry for entry in defined if entry[0] != "val/{env}/reward"]
    return {name: value for selected in KEY_METRICS for definition, name, value in defined if definition == selected}


def _metrics_text(metrics: Mapping[str, float]) -> str:
    """Format the metrics that are shown.

    >>> _metrics_text({"critic/score/mean": 0.5347, "actor/entropy": 0.1})
    'reward 0.53'
    """
    return " · ".join(
        f"{KEY_METRICS[describe(name).name]} {value:.2f}" for name, value in _select_metrics(metrics).items()
    )


class NullProgress:
    """Progress that shows nothing."""

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0, unit: str = "step") -> Iterator[Phase]:
        yield self

    def advance(self, metrics: Mapping[str, float] | None = None, count: int = 1) -> None:
        pass

    def note(self, text: str) -> None:
        pass


class PlainProgress:
    """Lines such as `learning 12/100 · reward 0.53 · 1.6 s/step · 2 min left`.

    A line with the latest metrics is printed at most every `every_seconds`, and at the end of a phase.
    """

    def __init__(
        self, console: Console, every_seconds: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._clock, self.every_seconds = console, clock, every_seconds
        self._open: list[_PlainPhase] = []
        self._pending: dict[str, float] = {}
        """Metrics reported between two phases, which the next one shows."""

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        pending = self._open[-1].pending if self._open else self._pending
        pending.update(_select_metrics(metrics))

    def note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0, unit: str = "step") -> Iterator[Phase]:
        phase = _PlainPhase(self, name, _Pace(total, done, unit, self._clock), self._pending)
        self._open.append(phase)
        self._pending = {}
        try:
            yield phase
            phase.finish()
        finally:
            self._open.remove(phase)


class _PlainPhase:
    def __init__(self, owner: PlainProgress, name: str, pace: _Pace, pending: dict[str, float]) -> None:
        self._owner, self._name, self._pace, self.pending = owner, name, pace, pending
        self._shown, self._shown_at = pace.done, pace.clock()

    def advance(self, metrics: Mapping[str, float] | None = None, count: int = 1) -> None:
        self._pace.advance(count)
        self.pending.update(_select_metrics(metrics or {}))
        if self._pace.clock() - self._shown_at >= self._owner.every_seconds:
            self._show()

    def finish(self) -> None:
        """Print the last line, unless it is already shown. A phase that ended early is complete."""
        if self._pace.done > self._shown or 0 < self._pace.done < self._pace.total:
            self._pace.total = self._pace.done
            self._show()

    def _show(self) -> None:
        """Print the line of the phase."""
        pace = self._pace
        self._shown, self._shown_at = pace.done, pace.clock()
        parts = (f"{self._name} {pace.done}/{pace.total}", _metrics_text(self.pending), pace.rate(), pace.remaining())
        self.pending.clear()
        self._owner.note(" · ".join(part for part in parts if part))


class BarProgress:
    """Live bar per phase with completed share, rate, remaining time and key metrics."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._bars: RichProgress | None = None
        self._open: list[_BarPhase] = []

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._open:
            self._open[-1].show(metrics)

    def note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0, unit: str = "step") -> Iterator[Phase]:
        bars = self._bars or self._start()
        task = bars.add_task(name, total=total, completed=done, rate="", remaining="", metrics="")
        phase = _BarPhase(bars, task, _Pace(total, done, unit, self._clock))
        self._open.append(phase)
        try:
            yield phase
            phase.finish()
        finally:
            self._open.remove(phase)
            self._finish(bars, task)

    def _start(self) -> RichProgress:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        fields = [TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("rate", "remaining", "metrics")]
        self._bars = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            *fields,
            console=self._console,
        )
        self._bars.start()
        return self._bars

    def _finish(self, bars: RichProgress, task: TaskID) -> None:
        """Remove an inner phase's bar; the outermost stays on screen."""
        if self._open:
            bars.remove_task(task)
            return
        bars.stop()
        self._bars = None


class _BarPhase:
    def __init__(self, bars: RichProgress, task: TaskID, pace: _Pace) -> None:
        self._bars, self._task, self._pace = bars, task, pace
        self._latest: dict[str, float] = {}

    def advance(self, metrics: Mapping[str, float] | None = None, count: int = 1) -> None:
        self._pace.advance(count)
        self._bars.update(
            self._task, completed=self._pace.done, rate=self._pace.rate(), remaining=self._pace.remaining()
        )
        self.show(metrics or {})

    def show(self, metrics: Mapping[str, float]) -> None:
        self._latest.update(_select_metrics(metrics))
        self._bars.update(self._task, metrics=_metrics_text(self._latest))

    def finish(self) -> None:
        """Fill the bar: a phase that ended early is complete."""
        if self._pace.done > 0:
            self._bars.update(self._task, total=self._pace.done, remaining="")
