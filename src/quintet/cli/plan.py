"""`quintet plan`."""

from __future__ import annotations

from dataclasses import asdict

from quintet.cli.choices import check_choices
from quintet.cli.configuration import compose
from quintet.config import plan

__all__ = ["run"]


def run(config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str) -> None:
    """Check the configuration and print the arithmetic of the run."""
    composed = compose(config, overrides, dialect, unknown_keys)
    check_choices(composed)
    numbers = asdict(plan(composed))
    width = max(map(len, numbers))
    for name, value in numbers.items():
        print(f"{name.replace('_', ' '):<{width}}  {value:,}")
