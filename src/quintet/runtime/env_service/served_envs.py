"""Environments that a service offers, and the configurations that clients may choose."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quintet.config.native.envs import ENVS, InteractiveEnvSection, SimulatorConfig
from quintet.envs.custom_env import load_env_class
from quintet.envs.factory import env_adapter
from quintet.envs.simulators.registry import SIMULATORS, is_simulator_class, load_simulator, simulator_module
from quintet.errors import ConfigError, did_you_mean
from quintet.registry import load_user_object
from quintet.runtime.env_service.schema import MAX_CONFIG_BYTES, MAX_DEPTH
from quintet.runtime.http_service.limits import check_depth
from quintet.runtime.http_service.request_error import RequestError

MAX_SHOWN_PROBLEMS = 8
"""Number of problems of a configuration that an error names."""


class ServedEnvs:
    """Named envs and simulators, and files with those of the server's owner; clients choose their options, but no other
    file."""

    def __init__(self, names: Sequence[str]) -> None:
        """
        Raises:
            ConfigError: a name is unknown, or a file cannot be loaded.
        """
        self.names = tuple(names)
        self._simulators = frozenset(filter(_is_simulator, names))
        for name in names:
            if name in self._simulators:
                load_simulator(name)
            elif ":" in name:
                load_env_class(name)
            elif name not in _names():
                raise _unknown_env(name)
        self.config_text = lru_cache(maxsize=256)(self._config_text)

    @property
    def modules(self) -> Iterator[str]:
        """Modules and files to load before worker processes are forked."""
        for name in self.names:
            if name in self._simulators:
                yield simulator_module(name)
                continue
            target = ENVS.get(name).target if ":" not in name else None
            if target is None:
                yield name
            else:
                yield target.partition(":")[0] if isinstance(target, str) else target.__module__

    def config(self, values: Mapping[str, Any]) -> str:
        """Return a client's configuration of an env as canonical JSON.

        Raises:
            RequestError: it is invalid or too large, or the server does not offer the env.
        """
        check_depth(values, MAX_DEPTH)
        text = json.dumps(values, sort_keys=True)
        if len(text) > MAX_CONFIG_BYTES:
            message = f"env: a configuration of {len(text)} bytes as JSON, the maximum is {MAX_CONFIG_BYTES}"
            raise RequestError(message, status=413, code="too_large")
        return self.config_text(text)

    def _config_text(self, text: str) -> str:
        values = json.loads(text)
        field = {"custom": "path", "simulator": "simulator"}.get(str(values.get("name")), "name")
        name = values.get(field, self.names[0])
        if name not in self.names:
            message = f"this server has no environment {name!r:.100}; it has {', '.join(self.names)}"
            raise RequestError(message, status=404, code="unknown_env")
        processes: int | None = None
        if name in self._simulators:
            values |= {"name": "simulator", "simulator": name}
            processes = 0
        elif ":" in name:
            values |= {"name": "custom", "path": name}
        values = {"name": name} | values | {"processes": processes, "service": None}
        try:
            config = env_adapter().validate_json(json.dumps(values))
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                for problem in error.errors()[:MAX_SHOWN_PROBLEMS]
            )
            raise RequestError(f"env: {problems}", code="invalid_env") from error
        if not isinstance(config, InteractiveEnvSection | SimulatorConfig):
            raise RequestError(f"{name} has no environment", code="invalid_env")
        for key, path in config.data_paths().items():
            _check_path(key, path)
        for key in config.server_keys():
            message = (
                f"env.{key} names a module, program or service of the server; start the server with your own class"
            )
            raise RequestError(message, status=403, code="forbidden_key")
        return config.model_dump_json()


def _check_path(key: str, path: str) -> None:
    """
    Raises:
        RequestError: a client names a file outside of the server's working directory.
    """
    if not Path(path).expanduser().resolve().is_relative_to(Path.cwd()):
        message = f"env.{key} = {path!r:.100} is outside of the directory of the server"
        raise RequestError(message, status=403, code="forbidden_path")


def _names() -> list[str]:
    return [entry.name for entry in ENVS if entry.name != "custom"]


def _is_simulator(name: str) -> bool:
    """Return whether a name or file is a simulator: it is registered as one, or its class has a simulator's methods."""
    if ":" not in name:
        return name in SIMULATORS and name not in ENVS
    return is_simulator_class(load_user_object(name, "--env"))


def _unknown_env(name: str) -> ConfigError:
    valid = [*_names(), *(entry.name for entry in SIMULATORS)]
    hint = f"{did_you_mean(name, valid, '{}')} it has {', '.join(valid)}; name your own as file.py:Class".lstrip()
    return ConfigError(f"--env {name}: there is no such environment", key="--env", value=name, hint=hint)
