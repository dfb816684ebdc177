"""If these fail, an env isn't played where the configuration says, or its limits are others."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.cli.configuration import load_config
from quintet.config.native.envs import CustomEnvConfig, EnvProcessesConfig, FrozenLakeConfig
from quintet.config.schema import keys, valid_keys
from quintet.errors import ConfigError


def env(*words: str) -> Any:
    return load_config(None, list(words), None, "refuse").experiment.env


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ("env.processes=true", 256),
        ("env.processes=12", 12),
        ("env.processes.max_processes=3", 3),
        ("env.processes={max_processes: 5}", 5),
        ("env.processes=false", None),
        ("env.processes=null", None),
    ],
)
def test_processes_are_a_section_a_number_or_a_yes(given: str, most: int | None) -> None:
    processes = env(given).processes
    assert (processes and processes.max_processes) == most


def test_our_own_envs_are_played_here_and_others_elsewhere() -> None:
    assert FrozenLakeConfig().processes is None
    custom = env("env.name=custom", "env.path=mine.py:Env", "env.arguments={size: 3}")
    assert isinstance(custom, CustomEnvConfig)
    assert (custom.processes, custom.arguments) == (EnvProcessesConfig(), {"size": 3})
    assert env("env.name=custom", "env.path=mine.py:Env", "env.processes=null").processes is None


@pytest.mark.parametrize("given", ["env.processes=0", "env.processes.step_timeout_seconds=0", "env.max_actions=0"])
def test_limits_are_positive(given: str) -> None:
    with pytest.raises(ConfigError):
        env(f"env.{given}")


def test_what_a_custom_env_needs_is_named() -> None:
    with pytest.raises(ConfigError, match=r"env\.path"):
        env("env.name=custom")


def test_every_played_env_has_the_same_limits() -> None:
    shared = {"max_actions", "max_tokens", "max_failed_share", "processes"}
    for name in ("frozenlake", "sokoban", "custom"):
        legal = {key.name for key in valid_keys({"env": {"name": name}})}
        assert {f"env.{limit}" for limit in shared} <= legal
        assert "env.processes.step_timeout_seconds" in legal
    prompts = {key.name for key in valid_keys({"env": {"name": "prompts"}})}
    assert not {name for name in prompts if name.startswith("env.") and name != "env.name"}
    played = [key for key in keys() if key.name == "env.processes" and key.choice != ("env.name", "simulator")]
    assert {key.value_type for key in played} == {"a section or null"}
