"""The worlds that come with Quintet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quintet.config.native import FrozenLakeConfig, SokobanConfig, WorldConfig
from quintet.config.native.worlds import CustomWorldConfig, PlayedConfig
from quintet.envs.custom import load_custom
from quintet.envs.world import WORLDS, World
from quintet.envs.worlds import LocalWorlds, Worlds
from quintet.errors import ConfigError

__all__ = ["make_world", "open_worlds", "under_key", "world_maker"]

WORLDS.add(
    "frozenlake", "quintet.envs.frozenlake:FrozenLake", help="cross the ice to the goal", config=FrozenLakeConfig
)
WORLDS.add("sokoban", "quintet.envs.sokoban:Sokoban", help="push boxes onto targets", config=SokobanConfig)
WORLDS.add("custom", "quintet.envs.custom:custom_world", help="a world of your own", config=CustomWorldConfig)


def make_world(config: WorldConfig) -> World:
    """A world of that configuration, not yet reset."""
    return WORLDS.get(config.name).load()(config)


def world_maker(config: WorldConfig) -> Callable[[], World]:
    """What makes worlds of that configuration, one for each game.

    Raises:
        ConfigError: a user's own world can't be loaded.
    """
    if isinstance(config, CustomWorldConfig):
        return load_custom(config)
    made = WORLDS.get(config.name).load()
    return lambda: made(config)


def open_worlds(config: WorldConfig) -> Worlds:
    """Where games of that configuration are played: in this process, or in processes of their own.

    Raises:
        ConfigError: a user's own world can't be loaded.
        MachineError: no process can be started.
    """
    if not isinstance(config, PlayedConfig) or config.processes is None:
        return LocalWorlds(world_maker(config))
    from quintet.envs.processes import ProcessWorlds

    worlds = ProcessWorlds(config, config.processes)
    if isinstance(config, CustomWorldConfig):
        worlds.check()
    return worlds


@contextmanager
def under_key(key: str) -> Iterator[None]:
    """Have faults of a world told by the key under which it stands: `worlds.mine.world.path` for `world.path`."""
    try:
        yield
    except ConfigError as error:
        if key == "world" or not (error.key or "").startswith("world."):
            raise
        old, own = str(error.key), key + str(error.key).removeprefix("world")
        message = error.message.replace(old, own)
        raise ConfigError(message, key=own, value=error.value, source=error.source, hint=error.hint) from error
