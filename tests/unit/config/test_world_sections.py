"""If these fail, a world isn't played where the configuration says, or its limits are others."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.cli.configuration import compose
from quintet.config.keys import keys, legal_keys
from quintet.config.native.worlds import CustomWorldConfig, FrozenLakeConfig, WorldProcessesConfig
from quintet.errors import ConfigError


def world(*words: str) -> Any:
    return compose(None, list(words), None, "refuse").experiment.world


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ("world.processes=true", 256),
        ("world.processes=12", 12),
        ("world.processes.most=3", 3),
        ("world.processes={most: 5}", 5),
        ("world.processes=false", None),
        ("world.processes=null", None),
    ],
)
def test_processes_are_a_section_a_number_or_a_yes(given: str, most: int | None) -> None:
    processes = world(given).processes
    assert (processes and processes.most) == most


def test_our_own_worlds_are_played_here_and_others_elsewhere() -> None:
    assert FrozenLakeConfig().processes is None
    custom = world("world.name=custom", "world.path=mine.py:World", "world.arguments={size: 3}")
    assert isinstance(custom, CustomWorldConfig)
    assert (custom.processes, custom.arguments) == (WorldProcessesConfig(), {"size": 3})
    assert world("world.name=custom", "world.path=mine.py:World", "world.processes=null").processes is None


@pytest.mark.parametrize(
    "given", ["world.processes=0", "world.processes.step_timeout_seconds=0", "world.max_actions=0"]
)
def test_limits_are_positive(given: str) -> None:
    with pytest.raises(ConfigError):
        world(f"world.{given}")


def test_what_a_custom_world_needs_is_named() -> None:
    with pytest.raises(ConfigError, match=r"world\.path"):
        world("world.name=custom")


def test_every_played_world_has_the_same_limits() -> None:
    shared = {"max_actions", "max_tokens", "max_failed_share", "processes"}
    for name in ("frozenlake", "sokoban", "custom"):
        legal = {key.name for key in legal_keys({"world": {"name": name}})}
        assert {f"world.{limit}" for limit in shared} <= legal
        assert "world.processes.step_timeout_seconds" in legal
    prompts = {key.name for key in legal_keys({"world": {"name": "prompts"}})}
    assert not {name for name in prompts if name.startswith("world.") and name != "world.name"}
    assert {key.takes for key in keys() if key.name == "world.processes"} == {"a section or null"}
