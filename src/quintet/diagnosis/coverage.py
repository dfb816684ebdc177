"""Which rules could judge a run, and which need more steps: without it, silence would look like health."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class WaitingRule:
    """A rule that needs more values of its metric."""

    rule: str
    title: str
    needed: int
    """Number of values that it needs."""
    unit: str
    """`steps` or `validations`."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which rules about metrics could judge a run, as far as it logs the metrics that they need."""

    steps: int
    """Last step of the metrics, 0 if there is none."""
    judged: Sequence[str]
    """Names of the rules that could."""
    waiting: Sequence[WaitingRule]
    """Rules that need more values, those first that need the fewest."""

    @property
    def verdict(self) -> str:
        """Sentence about a run without findings."""
        if not self.judged:
            return "nothing could be judged: no metrics have been logged"
        if self.waiting:
            rules = _count(len(self.waiting), "rule")
            return f"nothing looks wrong so far, after {_count(self.steps, 'step')}; {rules} cannot judge yet"
        return "nothing looks wrong"

    def waiting_lines(self) -> list[str]:
        """Return what is not judged yet, one line for each number of steps from which it is."""
        by_need = groupby(self.waiting, lambda each: (each.needed, each.unit))
        return [
            f"from {needed} {unit} on: {'; '.join(each.title for each in rules)}" for (needed, unit), rules in by_need
        ]


def _count(number: int, unit: str) -> str:
    return f"{number} {unit}{'' if number == 1 else 's'}"
