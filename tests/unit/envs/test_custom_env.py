"""If these fail, the env that `docs/faults.md` shows can't be played, or isn't one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quintet.config.native.envs import CustomEnvConfig
from quintet.envs.factory import build_env, build_vector_env
from quintet.envs.vector_env import ActionsExecuted, EpisodeStarted
from quintet.registry import load_user_object

PAGE = Path(__file__).parents[3] / "docs" / "faults.md"


@pytest.fixture
def file(tmp_path: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "guess.py"
    path.write_text(code)
    return f"{path}:Guess"


def test_the_env_of_the_page_is_played_as_it_says(file: str) -> None:
    envs = build_vector_env(CustomEnvConfig(name="custom", path=file, arguments={"highest": 9}))
    envs.start(1, 3)
    (begun,) = envs.poll(wait=True)
    assert isinstance(begun, EpisodeStarted)
    assert begun.instruction == "Guess my number, 1 to 9."
    envs.step(1, ["7", "3", "4", "5"])
    (moved,) = envs.poll(wait=True)
    envs.close()
    assert isinstance(moved, ActionsExecuted)
    assert [step.observation.text for step in moved.steps] == ["Less.", "More.", "That is it."]
    assert (moved.steps[-1].reward, moved.steps[-1].info) == (1.0, {"success": True})


def test_it_is_made_with_its_arguments(file: str) -> None:
    config = CustomEnvConfig(name="custom", path=file, arguments={"highest": 2})
    assert build_env(config).actions == ("1", "2")
    assert load_user_object(file, "env.path")().actions == ("1", "2", "3", "4", "5")
