"""The worlds that come with Quintet."""

from __future__ import annotations

from quintet.config.native import FrozenLakeConfig, SokobanConfig, WorldConfig
from quintet.envs.world import WORLDS, World

__all__ = ["make_world"]

WORLDS.add(
    "frozenlake", "quintet.envs.frozenlake:FrozenLake", help="cross the ice to the goal", config=FrozenLakeConfig
)
WORLDS.add("sokoban", "quintet.envs.sokoban:Sokoban", help="push boxes onto targets", config=SokobanConfig)


def make_world(config: WorldConfig) -> World:
    """A world of that configuration, not yet reset."""
    return WORLDS.get(config.name).load()(config)
