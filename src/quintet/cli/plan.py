"""`quintet plan`."""

from __future__ import annotations

from dataclasses import asdict

from quintet.cli.choices import check_choices
from quintet.config import load_experiment, plan

__all__ = ["run"]


def run(config: str | None, overrides: list[str]) -> None:
    """Check the configuration and print the arithmetic of the run."""
    composed = load_experiment(config, overrides)
    check_choices(composed)
    numbers = asdict(plan(composed))
    width = max(map(len, numbers))
    for name, value in numbers.items():
        print(f"{name.replace('_', ' '):<{width}}  {value:,}")
