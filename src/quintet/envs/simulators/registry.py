"""Registry of simulators, and their construction from the configuration.

Another package adds a simulator through an entry point of the group `quintet.simulators`. Users name their own as
`file.py:name` or `module:name`. A factory is called with the configuration, the number of robots and the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from pydantic import BaseModel

from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.registry_union import validate_options
from quintet.envs.simulators.simulator import Simulator
from quintet.errors import ConfigError
from quintet.registry import Registry, load_user_object, user_errors

KEY = "env.simulator"
METHODS = ("task", "reset", "step", "observe", "render", "close")
SIMULATORS: Registry[Simulator] = Registry("simulator", entry_points="quintet.simulators")
SIMULATORS.add_file(__file__, "simulators.yaml")


def build_simulator(config: SimulatorConfig, num_robots: int, seed: int) -> Simulator:
    """Return a simulator of `num_robots` robots, which are not reset yet.

    Raises:
        ConfigError: the simulator is unknown or lacks a package (the message says what to install), `env.options` are
            invalid, or a user's class raises.
    """
    build = load_simulator(config.simulator)
    if ":" not in config.simulator:
        return build(config, num_robots, seed)
    with user_errors(config.simulator, KEY):
        simulator = build(config, num_robots, seed)
    if missing := _missing_methods(simulator):
        methods = ", ".join(f"{name}()" for name in missing)
        message = f"{KEY} = {config.simulator!r} lacks {methods}"
        raise ConfigError(message, key=KEY, value=config.simulator, hint=f"see {Simulator.__module__}.Simulator")
    return simulator


def load_simulator(name: str) -> Callable[..., Simulator]:
    """Return the factory of a simulator: `name` is registered, or `file.py:name` or `module:name`.

    Raises:
        ConfigError: it is unknown, cannot be imported, or lacks a package.
    """
    if ":" not in name:
        return SIMULATORS.get(name).load()
    factory = load_user_object(name, KEY)
    if not callable(factory):
        raise ConfigError(f"{KEY} = {name!r} is {type(factory).__name__}, not a class", key=KEY, value=name)
    return cast("Callable[..., Simulator]", factory)


def is_simulator_class(value: object) -> bool:
    """Return whether a class or object has the methods of a simulator."""
    return not _missing_methods(value)


def _missing_methods(value: object) -> list[str]:
    return [name for name in METHODS if not callable(getattr(value, name, None))]


def simulator_module(name: str) -> str:
    """Return the module or `file.py:name` of a simulator, which fork servers import once."""
    if ":" in name:
        return name
    target = SIMULATORS.get(name).target
    return target.partition(":")[0] if isinstance(target, str) else target.__module__


def simulator_options(config: SimulatorConfig, options_class: type[BaseModel]) -> BaseModel:
    """Return `env.options` as an instance of the simulator's class of options.

    Raises:
        ConfigError: an option is unknown or invalid; the message names it.
    """
    return cast("BaseModel", validate_options(options_class, config.options, "env.options"))
