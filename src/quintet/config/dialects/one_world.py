"""Frameworks whose runs have one world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quintet.errors import ConfigError

if TYPE_CHECKING:
    from quintet.config.native import Experiment

__all__ = ["refuse_mixtures"]


def refuse_mixtures(experiment: Experiment, framework: str) -> None:
    """See that a run plays one world, or answers questions.

    Raises:
        ConfigError: it mixes worlds.
    """
    if experiment.worlds and experiment.evaluation is None:
        told = f"{framework}'s reference has one world in a run, and here are {', '.join(experiment.worlds)}"
        raise ConfigError(told, key="worlds", value=list(experiment.worlds), hint="vagen mixes worlds")
