"""`quintet plan`."""

from __future__ import annotations

from dataclasses import asdict

from quintet.config import load_experiment, plan

__all__ = ["run"]


def run(config: str | None, overrides: list[str]) -> None:
    """Print the arithmetic of a run."""
    numbers = asdict(plan(load_experiment(config, overrides)))
    width = max(map(len, numbers))
    for name, value in numbers.items():
        print(f"{name.replace('_', ' '):<{width}}  {value:,}")
