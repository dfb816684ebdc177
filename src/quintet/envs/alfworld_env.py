"""Household tasks of ALFWorld (Shridhar et al. 2021) in TextWorld or AI2-THOR, without downloads."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from quintet.config.native.alfworld_env import AlfWorldConfig
from quintet.envs.env import IMAGE, TEXT
from quintet.envs.start_states import Split, split_of
from quintet.errors import ConfigError
from quintet.records import Observation, Step

VARIABLE: Final = "ALFWORLD_DATA"
DOWNLOAD: Final = "`alfworld-download --data-dir DIRECTORY`, which Quintet never runs, puts the data there"
TYPES = {"text": "AlfredTWEnv", "vision": "AlfredThorEnv"}
GAME_LISTS = {"text": "game_files", "vision": "json_file_list"}
"""Attribute of ALFWorld's environments with the files of their games."""


class AlfWorld:
    """Task that one of the admissible commands per action is sent to."""

    actions = (TEXT,)

    def __init__(self, config: AlfWorldConfig) -> None:
        self._config = config
        self._env: Any = None

    @staticmethod
    def check_config(config: AlfWorldConfig) -> None:
        """Look for everything that the games need.

        Raises:
            ConfigError: ALFWorld, its configuration or its data are missing, or it has no games.
        """
        for split in (Split.TRAIN, Split.VALIDATION):
            _games(config, _train_eval(config, split))

    def instruction(self) -> str:
        return (
            "You are a robot that performs household tasks. The first observation names your task. Each observation"
            " lists the admissible commands. Answer with one of them, exactly as it is written."
        )

    def reset(self, seed: int) -> Observation:
        """See `Env.reset`. Seeds of validation have the games of `env.validation_games`.

        Raises:
            ConfigError: see `check_config`.
        """
        self.close()
        train_eval = _train_eval(self._config, split_of(seed))
        games = _games(self._config, train_eval)
        game = games[seed // len(Split) % len(games)]
        with redirect_stdout(sys.stderr):
            self._env = _environment(self._config, train_eval, game).init_env(batch_size=1)
            texts, infos = self._env.reset()
        return self._observation(texts, infos)

    def step(self, action: str) -> Step:
        """See `Env.step`; the reward is 1 for the solved task."""
        if action not in self._commands:
            info = {"success": False, "valid_format": False}
            return Step(self._last, -self._config.invalid_penalty, False, False, info)
        with redirect_stdout(sys.stderr):
            # the second value is the total score of the game, not a reward
            texts, _, ended, infos = self._env.step([action])
        won = bool(infos["won"][0])
        truncated = bool(ended[0]) and not won
        return Step(self._observation(texts, infos), float(won), won, truncated, {"success": won})

    def render(self) -> np.ndarray:
        """See `Env.render`.

        Raises:
            ConfigError: the game has no pictures.
        """
        if self._config.render != "vision":
            raise ConfigError("TextWorld has no pictures", key="env.render", value="text", hint="use env.render=vision")
        return np.ascontiguousarray(self._env.get_frames()[0], np.uint8)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env = None

    def _observation(self, texts: Sequence[str], infos: Mapping[str, Any]) -> Observation:
        self._commands = [str(command) for command in infos["admissible_commands"][0]]
        text = str(texts[0]).strip()
        commands = f"Admissible commands: {', '.join(self._commands)}"
        if self._config.render == "vision":
            task = [line for line in text.splitlines() if "task is" in line]
            self._last = Observation("\n".join([IMAGE, *task, commands]), (self.render(),))
        else:
            self._last = Observation(f"{text}\n{commands}")
        return self._last


def _train_eval(config: AlfWorldConfig, split: Split) -> str:
    """Return ALFWorld's name of the games of a split."""
    return config.validation_games if split is Split.VALIDATION else "train"


@lru_cache(maxsize=8)
def _games(config: AlfWorldConfig, train_eval: str) -> tuple[str, ...]:
    """Return the files of the games, in the same order on each machine.

    Raises:
        ConfigError: see `AlfWorld.check_config`.
    """
    data = _data_directory(config)
    with redirect_stdout(sys.stderr):
        games = sorted(getattr(_environment(config, train_eval), GAME_LISTS[config.render]))
    if not games:
        message = f"ALFWorld has no games of {train_eval} for {config.config_path} in {data}"
        hint = f"correct the section dataset of {config.config_path}, or complete the data: {DOWNLOAD}"
        raise ConfigError(message, key="env.data_path", value=str(data), hint=hint)
    return tuple(games)


def _environment(config: AlfWorldConfig, train_eval: str, game: str | None = None) -> Any:
    """Return ALFWorld's environment, which lists its games: all, or one."""
    # its import creates a directory if the variable is unset
    os.environ[VARIABLE] = str(_data_directory(config))
    settings = _settings(config)
    if game is not None:
        keys = {"train": "data_path", "eval_in_distribution": "eval_id_data_path"}
        settings["dataset"][keys.get(train_eval, "eval_ood_data_path")] = str(Path(game).parent)
    try:
        from alfworld.agents.environment import get_environment

        return get_environment(settings["env"]["type"])(settings, train_eval=train_eval)
    except ImportError as error:
        extra = "alfworld[vis]" if config.render == "vision" else "alfworld"
        message = f"env.name = 'alfworld': {error}"
        raise ConfigError(message, key="env.name", value="alfworld", hint=f"pip install '{extra}'") from error


def _data_directory(config: AlfWorldConfig) -> Path:
    """
    Raises:
        ConfigError: it is not set, or not there.
    """
    value = config.data_paths().get("data_path") or os.environ.get(VARIABLE)
    hint = f"set env.data_path or the variable {VARIABLE} to the directory with json_2.1.1; {DOWNLOAD}"
    if not value:
        message = f"env.data_path = null: the variable {VARIABLE} is not set either"
        raise ConfigError(message, key="env.data_path", hint=hint)
    directory = Path(value).expanduser().resolve()
    if not directory.is_dir():
        source = "env.data_path" if config.data_path else VARIABLE
        raise ConfigError(f"{source} = {value}: no such directory", key="env.data_path", value=value, hint=hint)
    return directory


def _settings(config: AlfWorldConfig) -> dict[str, Any]:
    """Return ALFWorld's own configuration.

    Raises:
        ConfigError: the file is missing, or lacks a section.
    """
    path = Path(config.data_paths()["config_path"]).expanduser()
    hint = "copy configs/base_config.yaml of ALFWorld's repository, and set env.config_path to the file"
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        settings["env"]["type"] = TYPES[config.render]
        settings["dataset"] = dict(settings["dataset"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        message = f"env.config_path = {config.config_path}: no configuration of ALFWorld: {error!r}"
        raise ConfigError(message, key="env.config_path", value=config.config_path, hint=hint) from error
    return dict(settings)
