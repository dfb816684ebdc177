"""What looks wrong in a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["warning", "critical"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that looks wrong, with the evidence and what to try."""

    rule: str
    """Name of the rule in `rules.yaml`."""
    severity: Severity
    title: str
    evidence: str
    """Values, steps, episodes or files."""
    metric: str | None
    """Metric whose curve shows it; None if none does."""
    first_step: int | None
    last_step: int | None
    suggestions: tuple[str, ...]
    """What to try, the first first: a sentence, and `KEY=VALUE` in the format of the user's configuration."""
