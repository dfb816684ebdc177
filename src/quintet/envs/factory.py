"""Construction of envs from their configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import cast

from pydantic import TypeAdapter

from quintet.config.native.envs import ENVS, CustomEnvConfig, EnvConfig, InteractiveEnvSection
from quintet.config.native.rollout import RolloutConfig
from quintet.envs.custom_env import load_custom_env
from quintet.envs.env import Env
from quintet.envs.vector_env import LocalVectorEnv, VectorEnv
from quintet.errors import ConfigError


@cache
def env_adapter() -> TypeAdapter[EnvConfig]:
    """Return what validates the configuration of an env; it is slow to build."""
    return TypeAdapter(EnvConfig)


def build_env(config: EnvConfig) -> Env:
    """Return an env, not yet reset."""
    return _with_instruction(cast("Env", ENVS.get(config.name).load()(config)), config)


def _with_instruction(env: Env, config: EnvConfig) -> Env:
    """Replace the system message of an env by the configured one, if any."""
    instruction = getattr(config, "instruction", None)
    if instruction is not None:
        vars(env)["instruction"] = lambda: instruction
    return env


def env_factory(config: EnvConfig) -> Callable[[], Env]:
    """Return a function that builds an env, to be called once per episode.

    Raises:
        ConfigError: a custom env cannot be loaded, or an env's `check_config` refuses its configuration.
    """
    if isinstance(config, CustomEnvConfig):
        build_custom = load_custom_env(config)
        return lambda: _with_instruction(build_custom(), config)
    build = ENVS.get(config.name).load()
    check_config = getattr(build, "check_config", None)
    if check_config is not None:
        check_config(config)
    return lambda: _with_instruction(build(config), config)


def build_vector_env(config: EnvConfig, rollout: RolloutConfig | None = None) -> VectorEnv:
    """Return a vector env that runs in this process, in worker processes if `config.processes` is set, or on an
    environment service if `config.service` is set. VAGEN's protocol also needs the format of responses, `rollout`.

    Raises:
        ConfigError: the env cannot be loaded.
        MachineError: no worker process can be started, or no server reached.
    """
    if isinstance(config, InteractiveEnvSection) and config.service is not None:
        from quintet.envs.service.vector_env import service_vector_env

        return service_vector_env(config, config.service, rollout or RolloutConfig())
    if not isinstance(config, InteractiveEnvSection) or config.processes is None:
        return LocalVectorEnv(env_factory(config))
    from quintet.envs.subprocess_env import SubprocessVectorEnv

    envs = SubprocessVectorEnv(config, config.processes)
    if config.runs_external_code:
        envs.check()
    return envs


@contextmanager
def env_errors_under_key(key: str) -> Iterator[None]:
    """Raise config errors of an env under its key in this run: `envs.mine.env.path` for `env.path`."""
    try:
        yield
    except ConfigError as error:
        if key == "env" or not (error.key or "").startswith("env."):
            raise
        old, new = str(error.key), key + str(error.key).removeprefix("env")
        message, hint = error.message.replace(old, new), error.hint and error.hint.replace(old, new)
        raise ConfigError(message, key=new, value=error.value, source=error.source, hint=hint) from error
