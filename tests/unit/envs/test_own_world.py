"""If these fail, the world that `docs/faults.md` shows can't be played, or isn't one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quintet.config.native.worlds import CustomWorldConfig
from quintet.envs.catalogue import make_world, open_worlds
from quintet.envs.worlds import Moved, Opened
from quintet.registry import load_outside

PAGE = Path(__file__).parents[3] / "docs" / "faults.md"


@pytest.fixture
def file(tmp_path: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path / "guess.py"
    path.write_text(code)
    return f"{path}:Guess"


def test_the_world_of_the_page_is_played_as_it_says(file: str) -> None:
    worlds = open_worlds(CustomWorldConfig(name="custom", path=file, arguments={"highest": 9}))
    worlds.open(1, 3)
    (begun,) = worlds.answers(wait=True)
    assert isinstance(begun, Opened)
    assert begun.instruction == "Guess my number, 1 to 9."
    worlds.move(1, ["7", "3", "4", "5"])
    (moved,) = worlds.answers(wait=True)
    worlds.close()
    assert isinstance(moved, Moved)
    assert [step.observation.text for step in moved.steps] == ["Less.", "More.", "That is it."]
    assert (moved.steps[-1].reward, moved.steps[-1].info) == (1.0, {"success": True})


def test_it_is_made_with_its_arguments(file: str) -> None:
    config = CustomWorldConfig(name="custom", path=file, arguments={"highest": 2})
    assert make_world(config).actions == ("1", "2")
    assert load_outside(file, "world.path")().actions == ("1", "2", "3", "4", "5")
