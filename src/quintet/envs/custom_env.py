"""Env classes from user files and other packages."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from quintet.config.native.envs import ENVS, CustomEnvConfig
from quintet.config.native.registry_union import validate_options
from quintet.envs.env import Env
from quintet.errors import ConfigError
from quintet.registry import load_user_object, user_errors

KEY = "env.path"
METHODS = ("instruction", "reset", "step", "close")


def build_custom_env(config: CustomEnvConfig) -> Env:
    """Return a custom env, not yet reset.

    Raises:
        ConfigError: the class raises, or see `load_custom_env`.
    """
    build = load_custom_env(config)
    with user_errors(config.path, KEY):
        return build()


def load_custom_env(config: CustomEnvConfig) -> Callable[[], Env]:
    """Return a function that builds the env of `config.path`.

    Raises:
        ConfigError: there is no such file, module or name, importing it fails, it lacks a method of `Env`, or it does
            not accept `env.arguments`.
    """
    factory = load_env_class(config.path)
    if hasattr(factory, "config_class"):
        options = validate_options(factory, config.arguments, "env.arguments")
        return lambda: cast("Env", factory(options))
    _check_arguments(factory, config)
    return lambda: cast("Env", factory(**config.arguments))


def load_env_class(path: str) -> Callable[..., Any]:
    """Return the env class or factory of a path, as `env.path` has it.

    Raises:
        ConfigError: there is no such file, module or name, importing it fails, or it lacks a method of `Env`.
    """
    is_registered = ":" not in path and path in ENVS
    factory: Callable[..., Any] = ENVS.get(path).load() if is_registered else load_user_object(path, KEY)
    _check_methods(factory, path)
    return factory


def _check_methods(factory: Any, path: str) -> None:
    if not callable(factory):
        raise ConfigError(f"{KEY} = {path!r} is {type(factory).__name__}, not a class", key=KEY, value=path)
    missing = [name for name in METHODS if isinstance(factory, type) and not callable(getattr(factory, name, None))]
    if missing:
        methods = ", ".join(f"{name}()" for name in missing)
        hint = "docs/envs.md lists the methods of an env"
        raise ConfigError(f"{KEY} = {path!r} lacks {methods}", key=KEY, value=path, hint=hint)


def _check_arguments(factory: Callable[..., Any], config: CustomEnvConfig) -> None:
    try:
        inspect.signature(factory).bind(**config.arguments)
    except ValueError:
        # classes of compiled code may have no signature
        return
    except TypeError as error:
        names = ", ".join(config.arguments) or "no arguments"
        message = f"{KEY} = {config.path!r} cannot be called with {names}: {error}"
        raise ConfigError(message, key="env.arguments", value=config.arguments) from error
