"""Progress display: a bar with rate and remaining time on a terminal, plain lines elsewhere.

Output goes only to the `rich` console that the command line passes in.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
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
    "sft/loss": "loss",
    "sft/token_accuracy": "accuracy",
    "train/loss": "loss",
    "train/token_accuracy": "accuracy",
    "val/loss": "held-out loss",
}
"""Metrics shown next to a bar, with their labels."""

PLAIN_METRICS = (*KEY_METRICS, "actor/entropy", "actor/ppo_kl", "response_length/mean")
"""Metrics shown in a plain line."""


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


def build_progress(console: Console, every_steps: int = 1, every_seconds: float = 5.0) -> Progress:
    """Return a progress bar for a terminal, plain lines otherwise."""
    return BarProgress(console) if console.is_terminal else PlainProgress(console, every_steps, every_seconds)


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(41.2), duration(125), duration(3900)
    ('41 s', '2 min', '1 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class _Pace:
    """Moving average of seconds per unit; the first steps are slow, so the overall mean misleads."""

    def __init__(self, total: int, done: int, unit: str, clock: Callable[[], float]) -> None:
        self.total, self.done, self.unit, self.clock = total, done, unit, clock
        self._marks: deque[tuple[float, int]] = deque([(clock(), done)], maxlen=20)

    def advance(self, count: int) -> None:
        self.done += count
        self._marks.append((self.clock(), self.done))

    def seconds_per_unit(self) -> float | None:
        (start, first), (end, last) = self._marks[0], self._marks[-1]
        return (end - start) / (last - first) if last > first and end > start else None

    def rate(self) -> str:
        pace = self.seconds_per_unit()
        if pace is None:
            return ""
        return f"{pace:.2g} s/{self.unit}" if pace >= 1 else f"{1 / pace:.3g} {self.unit}s/s"

    def remaining(self) -> str:
        pace = self.seconds_per_unit()
        return "" if pace is None else f"{duration(pace * max(self.total - self.done, 0))} left"


def _select_metrics(metrics: Mapping[str, float], names: tuple[str, ...]) -> dict[str, float]:
    """Return the metrics whose definition is in `names`, in that order."""
    defined = [(describe(name).name, name, value) for name, value in metrics.items()]
    return {name: value for selected in names for definition, name, value in defined if definition == selected}


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
    """Lines such as `step:12/100 - critic/score/mean:0.53 - 1.6 s/step - 2 min left`.

    A line is printed at most every `every_steps` units and `every_seconds` seconds, and at the end of a phase. It
    shows the latest value of each metric.
    """

    def __init__(
        self,
        console: Console,
        every_steps: int = 1,
        every_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._clock = console, clock
        self._every_steps, self._every_seconds = every_steps, every_seconds
        self._pending: dict[str, float] = {}

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        self._pending.update(_select_metrics(metrics, PLAIN_METRICS))

    def note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0, unit: str = "step") -> Iterator[Phase]:
        phase = _PlainPhase(self, name, _Pace(total, done, unit, self._clock))
        yield phase
        phase.finish()

    def due(self, steps: int, seconds: float) -> bool:
        """Return whether a new line is due after that many units and seconds."""
        return steps >= self._every_steps and seconds >= self._every_seconds

    def line(self, name: str, pace: _Pace) -> None:
        """Print the line of one phase."""
        selected = _select_metrics(self._pending, PLAIN_METRICS)
        self._pending.clear()
        parts = [f"{name}:{pace.done}/{pace.total}", *(f"{key}:{value:.4g}" for key, value in selected.items())]
        self.note(" - ".join(part for part in (*parts, pace.rate(), pace.remaining()) if part))


class _PlainPhase:
    def __init__(self, owner: PlainProgress, name: str, pace: _Pace) -> None:
        self._owner, self._name, self._pace = owner, name, pace
        self._shown, self._shown_at = pace.done, pace.clock()

    def advance(self, metrics: Mapping[str, float] | None = None, count: int = 1) -> None:
        self._pace.advance(count)
        self._owner.report(self._pace.done, metrics or {})
        if self._owner.due(self._pace.done - self._shown, self._pace.clock() - self._shown_at):
            self._show()

    def finish(self) -> None:
        if self._pace.done > self._shown:
            self._show()

    def _show(self) -> None:
        self._shown, self._shown_at = self._pace.done, self._pace.clock()
        self._owner.line(self._name, self._pace)


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
        self._latest.update(_select_metrics(metrics, tuple(KEY_METRICS)))
        selected = _select_metrics(self._latest, tuple(KEY_METRICS))
        text = " · ".join(f"{KEY_METRICS[describe(name).name]} {value:.2f}" for name, value in selected.items())
        self._bars.update(self._task, metrics=text)
