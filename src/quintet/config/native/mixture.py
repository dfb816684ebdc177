"""The envs of a run, one or several, as one list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from quintet.config.native.envs import EnvConfig, MixedEnvConfig
from quintet.config.native.rollout import RolloutConfig

ALL_ENVS = "all"
"""Stands for all envs together in metric names."""
ROLLOUT_OVERRIDES = ("think", "max_actions_per_turn", "action_separator")
"""Keys of `rollout` that an entry of `envs` may override."""


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


def run_envs(
    env: EnvConfig,
    envs: Mapping[str, MixedEnvConfig],
    rollout: RolloutConfig,
    start_states: int | None,
    validation_episodes: int,
) -> tuple[RunEnv, ...]:
    """Return the entries of `envs` in their order, or `env` alone if there are none."""
    if not envs:
        return (RunEnv(env.name, "env", env, rollout, 1.0, start_states, validation_episodes),)
    parts = apportion(validation_episodes, [entry.share for entry in envs.values()])
    return tuple(
        RunEnv(
            name,
            f"envs.{name}.env",
            entry.env,
            _override(rollout, entry),
            entry.share,
            entry.start_states or start_states,
            entry.validation_episodes or max(1, part),
        )
        for (name, entry), part in zip(envs.items(), parts, strict=True)
    )


def _override(rollout: RolloutConfig, entry: MixedEnvConfig) -> RolloutConfig:
    values = {key: getattr(entry, key) for key in ROLLOUT_OVERRIDES if getattr(entry, key) is not None}
    return rollout.model_copy(update=values) if values else rollout


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
