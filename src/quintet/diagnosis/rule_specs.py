"""Titles and limits of the rules, with the reasons for them, from `rules.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml

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
    source: str
    """Publication or program from which the limits are taken; empty for those of experience with Quintet."""


@cache
def rule_specs() -> Mapping[str, RuleSpec]:
    """Return all rules by name."""
    text = (resources.files("quintet.diagnosis") / "rules.yaml").read_text(encoding="utf-8")
    return {name: _spec(name, **entry) for name, entry in yaml.safe_load(text).items()}


def _spec(name: str, title: str, when: str, why: str, limits: Limits | None = None, source: str = "") -> RuleSpec:
    return RuleSpec(name, title, limits or {}, when.format(**(limits or {})), why, source)


def markdown_table() -> str:
    """Return all rules as a Markdown table."""
    rows = ["| rule | reported if | why, and where the limits are from |", "| --- | --- | --- |"]
    for spec in rule_specs().values():
        why = f"{spec.why}. {spec.source}." if spec.source else f"{spec.why}."
        rows.append(f"| `{spec.name}`: {spec.title} | {spec.when} | {why} |")
    return "\n".join(rows) + "\n"
