"""If these fail, ALFWorld's tasks are played wrongly, or a missing part of it is reported late or without a remedy."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from quintet.config.native.envs import AlfWorldConfig
from quintet.envs.alfworld_env import AlfWorld, _games
from quintet.envs.factory import env_factory
from quintet.envs.start_states import Split, split_seed
from quintet.errors import ConfigError

GAMES = {"train": 3, "valid_seen": 2, "valid_unseen": 1}
SETTINGS = {
    "env": {"type": "AlfredHybrid"},
    "dataset": {
        "data_path": "$ALFWORLD_DATA/json_2.1.1/train",
        "eval_id_data_path": "$ALFWORLD_DATA/json_2.1.1/valid_seen",
        "eval_ood_data_path": "$ALFWORLD_DATA/json_2.1.1/valid_unseen",
    },
}


class FakeGame:
    """A task that `take mug 1` and then `put mug 1 in fridge 1` solve, within three commands; lists are batches."""

    def __init__(self, file: str, calls: list[Any]) -> None:
        self.file, self.calls, self.commands = file, calls, 0
        self.held = self.won = False

    def infos(self) -> dict[str, Any]:
        put = ["put mug 1 in fridge 1"] if self.held else []
        return {"admissible_commands": [["look", "take mug 1", *put]], "won": [self.won]}

    def reset(self) -> tuple[list[str], dict[str, Any]]:
        print("Welcome")
        self.calls.append(("reset", self.file))
        return [
            f"-= Welcome =-\n\nA kitchen.\n\nYour task is to: cool a mug ({Path(self.file).parent.name})."
        ], self.infos()

    def step(self, commands: list[str]) -> tuple[list[str], Any, list[bool], dict[str, Any]]:
        self.calls.append(("step", commands))
        (command,), self.commands = commands, self.commands + 1
        self.won = self.held and command.startswith("put")
        self.held = self.held or command.startswith("take")
        return [f"You {command}."], [float(self.won)], [self.won or self.commands == 3], self.infos()

    def get_frames(self) -> np.ndarray:
        return np.full((1, 6, 8, 3), self.commands, np.uint8)

    def close(self) -> None:
        self.calls.append(("close", self.file))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of ALFWorld's environments, which a fake of the package records."""
    recorded: list[Any] = []

    def environment(kind: str, settings: Mapping[str, Any], *, train_eval: str) -> SimpleNamespace:
        key = {"train": "data_path", "eval_in_distribution": "eval_id_data_path"}.get(train_eval, "eval_ood_data_path")
        files = sorted(map(str, Path(os.path.expandvars(settings["dataset"][key])).rglob("traj_data.json")))
        recorded.append((kind, train_eval, len(files)))
        listed = {"game_files" if kind == "AlfredTWEnv" else "json_file_list": files}
        return SimpleNamespace(**listed, init_env=lambda batch_size: FakeGame(files[batch_size - 1], recorded))

    module = ModuleType("alfworld.agents.environment")
    module.get_environment = lambda kind: lambda *args, **kwargs: environment(kind, *args, **kwargs)  # type: ignore[attr-defined]
    for name in ("alfworld", "alfworld.agents"):
        package = ModuleType(name)
        package.__spec__ = ModuleSpec(name, None, is_package=True)
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    _games.cache_clear()
    return recorded


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., AlfWorldConfig]:
    """A function that returns a configuration whose files exist, with other fields."""
    for split, number in GAMES.items():
        for game in range(number):
            directory = tmp_path / "data/json_2.1.1" / split / f"{split}-{game}"
            directory.mkdir(parents=True)
            (directory / "traj_data.json").write_text("{}")
    (tmp_path / "alf-config.yaml").write_text(yaml.safe_dump(SETTINGS))
    fields = {"config_path": str(tmp_path / "alf-config.yaml"), "data_path": str(tmp_path / "data"), "processes": None}
    return lambda **changes: AlfWorldConfig.model_validate(fields | changes)


def test_a_task_is_solved_by_admissible_commands(
    calls: list[Any], config: Callable[..., AlfWorldConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    env = env_factory(config())()
    assert calls == [("AlfredTWEnv", "train", 3), ("AlfredTWEnv", "eval_in_distribution", 2)]
    first = env.reset(split_seed(Split.TRAIN, 1))
    assert first.text.endswith("cool a mug (train-1).\nAdmissible commands: look, take mug 1")
    taken, put = env.step("take mug 1"), env.step("put mug 1 in fridge 1")
    assert (taken.reward, taken.terminated, taken.info["success"]) == (0.0, False, False)
    assert "put mug 1 in fridge 1" in taken.observation.text
    assert (put.reward, put.terminated, put.truncated, put.info["success"]) == (1.0, True, False, True)
    assert [call for call in calls if call[0] == "step"] == [
        ("step", ["take mug 1"]),
        ("step", ["put mug 1 in fridge 1"]),
    ]
    env.close()
    assert calls[-1][0] == "close"
    assert capsys.readouterr().out == ""


def test_a_command_that_is_not_listed_is_not_sent(calls: list[Any], config: Callable[..., AlfWorldConfig]) -> None:
    env = AlfWorld(config(invalid_penalty=0.25))
    first = env.reset(0)
    step = env.step("put mug 1 in fridge 1")
    assert (step.observation, step.reward, step.info["valid_format"]) == (first, -0.25, False)
    assert not [call for call in calls if call[0] == "step"]


def test_the_games_own_limit_truncates_the_episode(calls: list[Any], config: Callable[..., AlfWorldConfig]) -> None:
    env = AlfWorld(config())
    env.reset(0)
    *_, last = (env.step("look") for _ in range(3))
    assert (last.terminated, last.truncated, last.info["success"]) == (False, True, False)


def test_validation_plays_other_games_than_training(calls: list[Any], config: Callable[..., AlfWorldConfig]) -> None:
    def games(split: Split, **changes: str) -> set[str]:
        env = AlfWorld(config(**changes))
        return {env.reset(split_seed(split, index)).text.split("(")[1].split(")")[0] for index in range(6)}

    assert games(Split.TRAIN) == {"train-0", "train-1", "train-2"}
    assert games(Split.VALIDATION) == {"valid_seen-0", "valid_seen-1"}
    assert games(Split.VALIDATION, validation_games="eval_out_of_distribution") == {"valid_unseen-0"}


def test_a_picture_replaces_the_text_but_not_the_task(calls: list[Any], config: Callable[..., AlfWorldConfig]) -> None:
    env = AlfWorld(config(render="vision"))
    first = env.reset(0)
    assert first.text == ("<image>\nYour task is to: cool a mug (train-0).\nAdmissible commands: look, take mug 1")
    assert ("AlfredThorEnv", "train", 3) in calls
    (image,) = env.step("look").observation.images
    assert (image.shape, int(image[0, 0, 0])) == ((6, 8, 3), 1)
    text = AlfWorld(config())
    text.reset(0)
    with pytest.raises(ConfigError, match=r"no pictures\n.*env\.render=vision"):
        text.render()
    env.render()


def test_a_missing_part_is_named_with_its_remedy(
    calls: list[Any],
    config: Callable[..., AlfWorldConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(match: str, **changes: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            env_factory(config(**changes))

    refused(r"env\.data_path = null: .*ALFWORLD_DATA is not set.*\n.*env\.data_path.*alfworld-download", data_path=None)
    refused(r"env\.data_path = /nowhere: no such directory\n.*alfworld-download", data_path="/nowhere")
    refused(r"env\.config_path = /no\.yaml.*\n.*configs/base_config\.yaml", config_path="/no.yaml")
    (tmp_path / "empty").mkdir()
    refused(r"no games of train .*empty\n.*section dataset", data_path=str(tmp_path / "empty"))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "data"))
    env_factory(config(data_path=None))
    monkeypatch.setitem(sys.modules, "alfworld.agents.environment", None)
    _games.cache_clear()
    refused(r"env\.name = 'alfworld'.*\n.*pip install 'alfworld\[vis\]'", render="vision")


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.hardware.is_installed", lambda name: name != "alfworld")
    with pytest.raises(ConfigError, match=r"'alfworld' requires alfworld.*\n.*pip install alfworld"):
        env_factory(AlfWorldConfig())
