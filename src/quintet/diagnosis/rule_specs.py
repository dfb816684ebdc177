"""Titles and limits of the rules, with the reasons for them, from `rules.yaml`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from quintet.package_files import read_yaml
from quintet.tracking.metrics import Side

Limits = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """Title, condition and limits of a rule."""

    name: str
    title: str
    limits: Limits
    when: str
    """Condition, with the limits filled in."""
    why: str
    side: Side | None
    """Whether the metric of a finding is too high or too low, so that its remedies are suggested."""
    remedies: Sequence[str]
    """What to try before the remedies of the metric."""
    metrics: Sequence[str]
    """Metrics of which it needs one; none if it needs other files, or judges every value by itself."""
    source: str
    """Publication or program from which the limits are taken; empty for limits from experience with Quintet."""

    @property
    def min_values(self) -> int:
        """Number of values of a metric from which it can judge."""
        return int(max(self.limits.get("steps", 1), self.limits.get("validations", 1)))

    @property
    def counts(self) -> str:
        """Unit of `min_values`: steps or validations."""
        return "validations" if "validations" in self.limits else "steps"


@cache
def rule_specs() -> Mapping[str, RuleSpec]:
    """Return all rules by name."""
    defaults: dict[str, Any] = {"limits": {}, "side": None, "remedies": (), "metrics": (), "source": ""}
    specs = [RuleSpec(name, **(defaults | entry)) for name, entry in read_yaml(__file__, "rules.yaml").items()]
    return {spec.name: replace(spec, when=spec.when.format(**spec.limits)) for spec in specs}


def markdown_table() -> str:
    """Return all rules as a Markdown table."""
    rows = ["| rule | reported if | why, and where the limits are from |", "| --- | --- | --- |"]
    for spec in rule_specs().values():
        why = f"{spec.why}. {spec.source}." if spec.source else f"{spec.why}."
        rows.append(f"| `{spec.name}`: {spec.title} | {spec.when} | {why} |")
    return "\n".join(rows) + "\n"
