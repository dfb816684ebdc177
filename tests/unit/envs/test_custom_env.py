"""If these fail, the env that `docs/envs.md` shows can't be played, or isn't one."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.config.native.envs import CustomEnvConfig
from quintet.envs.factory import build_env, build_vector_env
from quintet.envs.vector_env import ActionsExecuted, EpisodeStarted
from quintet.errors import ConfigError
from quintet.registry import load_user_object

PATH = f"{Path(__file__).parents[3] / 'examples/custom/treasure.py'}:Treasure"


def test_the_env_of_the_page_is_played_as_it_says() -> None:
    envs = build_vector_env(CustomEnvConfig(name="custom", path=PATH, arguments={"size": 4}))
    envs.start(1, 3)
    (begun,) = envs.poll(wait=True)
    assert isinstance(begun, EpisodeStarted)
    assert begun.instruction == "Walk to the treasure: Left, Right, Down or Up."
    assert begun.observation.text == "you 1 3 treasure 4 3"
    envs.step(1, ["Left", "Right", "Right", "Right", "Up"])
    (moved,) = envs.poll(wait=True)
    envs.close()
    assert isinstance(moved, ActionsExecuted)
    assert [step.observation.text[:7] for step in moved.steps] == ["you 1 3", "you 2 3", "you 3 3", "you 4 3"]
    assert (moved.steps[-1].reward, moved.steps[-1].info) == (1.0, {"success": True})


def test_a_class_that_raises_is_reported_with_its_line() -> None:
    config = CustomEnvConfig(name="custom", path=PATH, arguments={"size": "four"})
    with pytest.raises(ConfigError, match=r"env\.path = .* raised TypeError: .*\n.*treasure\.py:16: "):
        build_env(config)


def test_it_is_made_with_its_arguments() -> None:
    config = CustomEnvConfig(name="custom", path=PATH, arguments={"size": 2})
    assert vars(build_env(config))["size"] == 2
    assert load_user_object(PATH, "env.path")().size == 4
