"""What a run plays, one world or several, as one list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from quintet.config.native.rollout import RolloutConfig
from quintet.config.native.worlds import MixedWorldConfig, WorldConfig

if TYPE_CHECKING:
    from quintet.config.native.experiment import Experiment

__all__ = ["ALL_WORLDS", "PlayedWorld", "apportioned", "played_worlds"]

ALL_WORLDS = "all"
"""In the names of metrics, what stands for several worlds together."""
OWN_RULES = ("think", "max_actions_per_turn", "action_separator")
"""Keys of `rollout` that a world may have for itself."""


@dataclass(frozen=True, slots=True)
class PlayedWorld:
    """One of the worlds of a run, with all that is said of it."""

    name: str
    """As it is called in metrics and stored games."""
    key: str
    """Where its configuration stands: `world`, or `worlds.lake.world`."""
    config: WorldConfig
    rollout: RolloutConfig
    """How it is played."""
    share: float
    start_states: int | None
    validation_games: int


def played_worlds(run: Experiment) -> tuple[PlayedWorld, ...]:
    """The worlds of a run, in the order in which they are written."""
    starts, games = run.training.start_states, run.validation.games
    if not run.worlds:
        return (PlayedWorld(run.world.name, "world", run.world, run.rollout, 1.0, starts, games),)
    held_out = _validation_games(run.worlds, games)
    return tuple(
        PlayedWorld(
            name,
            f"worlds.{name}.world",
            one.world,
            _rules(run.rollout, one),
            one.share,
            one.start_states or starts,
            held_out[name],
        )
        for name, one in run.worlds.items()
    )


def _validation_games(worlds: Mapping[str, MixedWorldConfig], games: int) -> dict[str, int]:
    parts = apportioned(games, [one.share for one in worlds.values()])
    own = zip(worlds.items(), parts, strict=True)
    return {name: one.validation_games or max(1, part) for (name, one), part in own}


def _rules(rollout: RolloutConfig, one: MixedWorldConfig) -> RolloutConfig:
    own = {key: getattr(one, key) for key in OWN_RULES if getattr(one, key) is not None}
    return rollout.model_copy(update=own) if own else rollout


def apportioned(total: int, shares: Sequence[float]) -> list[int]:
    """A number divided by shares into whole parts: what rounding down leaves goes to the largest remainders.

    >>> apportioned(10, [3, 1])
    [8, 2]
    """
    whole = sum(map(Fraction, shares))
    exact = [total * Fraction(share) / whole for share in shares]
    parts = [int(one) for one in exact]
    by_remainder = sorted(range(len(parts)), key=lambda place: (parts[place] - exact[place], place))
    for place in by_remainder[: total - sum(parts)]:
        parts[place] += 1
    return parts
