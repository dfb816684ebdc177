"""A user's own world."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from quintet.config.native.worlds import CustomWorldConfig
from quintet.envs.world import World
from quintet.errors import ConfigError
from quintet.registry import load_outside

__all__ = ["custom_world", "load_custom"]

KEY = "world.path"
METHODS = ("instruction", "reset", "step", "close")


def custom_world(config: CustomWorldConfig) -> World:
    """A new one, not yet reset.

    Raises:
        ConfigError: see `load_custom`.
    """
    return load_custom(config)()


def load_custom(config: CustomWorldConfig) -> Callable[[], World]:
    """What makes such worlds.

    Raises:
        ConfigError: there is no such file, module or name, importing it fails, it lacks a method of a world, or it
            can't be called with `world.arguments`.
    """
    registered = None if ":" in config.path else "quintet.worlds"
    make = load_outside(config.path, KEY, entry_points=registered)
    _check(make, config)
    return lambda: cast("World", make(**config.arguments))


def _check(make: Callable[..., Any], config: CustomWorldConfig) -> None:
    told = f"{KEY} = {config.path!r}"
    if not callable(make):
        raise ConfigError(f"{told} is {type(make).__name__}, not a class", key=KEY, value=config.path)
    missing = [name for name in METHODS if isinstance(make, type) and not callable(getattr(make, name, None))]
    if missing:
        lacks = ", ".join(f"{name}()" for name in missing)
        raise ConfigError(
            f"{told} lacks {lacks}", key=KEY, value=config.path, hint="docs/faults.md says what a world has"
        )
    try:
        inspect.signature(make).bind(**config.arguments)
    except ValueError:
        # a class of compiled code may not say what it takes
        return
    except TypeError as error:
        names = ", ".join(config.arguments) or "nothing"
        message = f"{told} can't be called with {names}: {error}"
        raise ConfigError(message, key="world.arguments", value=config.arguments) from error
