"""What the rules read of a run: its metrics by name and, of a run directory, configuration and episodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from quintet.config.composed import ComposedConfig
from quintet.diagnosis.episode_files import EpisodeFile, latest_files
from quintet.diagnosis.findings import Finding, Severity
from quintet.diagnosis.rule_specs import rule_specs
from quintet.diagnosis.series import Series
from quintet.diagnosis.suggestions import suggest
from quintet.tracking.metric_columns import MetricColumns
from quintet.tracking.metrics import Side, describe

SUCCESS = ("trajectory/success_rate", "env/success_once")
SCORES = ("critic/score/mean", "env/return")
"""Reward of the training episodes: of language models, of robots."""
MAX_SUGGESTIONS = 4


class RunData:
    """Metrics of a run and, if they are given, its configuration and directory."""

    def __init__(
        self, metrics: MetricColumns, composed: ComposedConfig | None = None, directory: Path | None = None
    ) -> None:
        self.metrics = metrics
        self.composed = composed
        self.directory = directory
        self._series: dict[str, Series] = {}

    @cached_property
    def names(self) -> list[str]:
        """Names of the logged metrics, sorted."""
        return self.metrics.names

    @cached_property
    def files(self) -> list[EpisodeFile]:
        """Last trajectory files of the run.

        Raises:
            MachineError: a file cannot be read.
        """
        return [] if self.directory is None else latest_files(self.directory)

    @property
    def last_steps(self) -> list[int]:
        """The last step; an empty list if there is none."""
        return list(self.metrics.steps[-1:])

    def series(self, name: str) -> Series:
        """Return the values of a metric; steps without a finite value are left out."""
        if name not in self._series:
            self._series[name] = Series(name, *self.metrics.points(name))
        return self._series[name]

    def matching(self, *definitions: str) -> Iterator[Series]:
        """Yield the logged metrics of definitions, whose names may have placeholders."""
        metrics = [describe(name) for name in definitions]
        yield from (self.series(name) for name in self.names if any(metric.matches(name) for metric in metrics))

    def first_of(self, names: Sequence[str], length: int = 1) -> Series | None:
        """Return the first of the metrics that has so many values."""
        return next((self.series(name) for name in names if len(self.series(name)) >= length), None)

    @property
    def success(self) -> Series | None:
        """Share of the training episodes that are solved; None if no step has it."""
        return self.first_of(SUCCESS)

    @property
    def score(self) -> Series | None:
        """Mean reward of the training episodes; None if no step has it."""
        return self.first_of(SCORES)

    def total(self, name: str) -> float:
        """Return the sum of a metric over the steps."""
        return sum(self.series(name).values)

    def finding(
        self,
        rule: str,
        evidence: str,
        *,
        metric: str | None = None,
        steps: Sequence[int] = (),
        critical: bool = False,
        remedies: Sequence[str] = (),
        title: str | None = None,
    ) -> Finding:
        """Return a finding from the first to the last of `steps`. Its suggestions are `remedies`, then the remedies of
        the rule, then the metric's, if the rule says that it is too high or too low."""
        spec = rule_specs()[rule]
        of_metric = () if metric is None or spec.side is None else _remedies(metric, spec.side)
        names = dict.fromkeys((*remedies, *spec.remedies, *of_metric))
        suggestions = suggest(names, self.composed, MAX_SUGGESTIONS)
        severity: Severity = "critical" if critical else "warning"
        first, last = (steps[0], steps[-1]) if steps else (None, None)
        return Finding(rule, severity, title or spec.title, evidence, metric, first, last, suggestions)


def _remedies(metric: str, side: Side) -> tuple[str, ...]:
    """Return the remedies for the value of a metric; none for a metric of another version, which has no definition."""
    try:
        return describe(metric).remedies.get(side, ())
    except KeyError:
        return ()
