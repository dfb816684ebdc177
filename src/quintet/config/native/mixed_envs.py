"""The envs of a run, one or several, as one list."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from quintet.config.native.envs import EnvConfig
from quintet.config.native.rollout import RolloutConfig

ALL_ENVS = "all"
"""Stands for all envs together in metric names."""


@dataclass(frozen=True, slots=True)
class RunEnv:
    """Settings of an env of a run."""

    name: str
    """Name in metrics and stored episodes."""
    key: str
    """Key of its configuration: `env`, or `envs.lake.env`."""
    config: EnvConfig
    rollout: RolloutConfig
    """The run's rollout settings with the overrides of this env."""
    share: float
    start_states: int | None
    validation_episodes: int


def apportion(total: int, shares: Sequence[float]) -> list[int]:
    """Divide a number by shares into whole parts (largest remainder method).

    >>> apportion(10, [3, 1])
    [8, 2]
    """
    divisor = sum(map(Fraction, shares))
    exact = [total * Fraction(share) / divisor for share in shares]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda index: (parts[index] - exact[index], index))
    for index in by_remainder[: total - sum(parts)]:
        parts[index] += 1
    return parts
