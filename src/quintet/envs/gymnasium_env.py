"""Environments of Gymnasium by name, with discrete or text actions."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from PIL import Image

from quintet.config.native.package_envs import GymnasiumConfig
from quintet.envs.env import IMAGE, TEXT
from quintet.envs.frozenlake_solver import Table, slippery_policy
from quintet.errors import ConfigError, did_you_mean
from quintet.records import Observation, Step
from quintet.reward_sum import sum_rewards

MAX_NUMBERS: Final = 64
"""Largest array of an observation that is written as text."""
MAX_ACTIONS: Final = 1024
HIGHLIGHT = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", re.DOTALL)
"""Text in a color of a terminal."""


class GymnasiumEnv:
    """Env of Gymnasium. It has an expert if the unwrapped env has a transition table `P`."""

    def __init__(self, config: GymnasiumConfig) -> None:
        """
        Raises:
            ConfigError: there is no such env, it cannot be built, or its spaces cannot be shown to a policy.
        """
        self._config = config
        self._env = _make(config)
        self._by_word = _actions_by_word(config, self._env.action_space)
        self.actions = tuple(self._by_word) or (TEXT,)
        _check_observations(config, self._env.observation_space)
        table = getattr(self._env.unwrapped, "P", None)
        self._policy: list[int] | None = None
        if isinstance(table, Mapping):
            self.expert_action = lambda: self._expert_action(table)
            self.expert_thought = str

    @staticmethod
    def check_config(config: GymnasiumConfig) -> None:
        """Build the env once.

        Raises:
            ConfigError: see `GymnasiumEnv`.
        """
        env = GymnasiumEnv(config)
        try:
            env.reset(0)
        except DependencyNotInstalled as error:
            raise _missing_package(config, error) from error
        finally:
            env.close()

    def instruction(self) -> str:
        if self._config.instruction is not None:
            return self._config.instruction
        form = "a picture" if self._config.render == "vision" else _space_text(self._env.observation_space)
        if self._config.render == "text" and self._config.observation == "ansi":
            form = "a drawing"
        actions = self._config.actions or self.actions
        answer = "a text" if actions == (TEXT,) else ", ".join(actions)
        return f"{self._config.id}. Each observation is {form}. Answer with one of: {answer}."

    def reset(self, seed: int) -> Observation:
        self._state, _ = self._env.reset(seed=seed)
        self._return = 0.0
        return self._observation()

    def step(self, action: str) -> Step:
        """See `Env.step`. A text outside of the action space changes nothing."""
        value = self._by_word.get(action, action)
        if isinstance(value, str) and not self._env.action_space.contains(value):
            return Step(self._observation(), 0.0, False, False, {"success": False, "valid_format": False})
        self._state, reward, terminated, truncated, info = self._env.step(value)
        self._return = sum_rewards((self._return, float(reward)))
        scalars = {name: value for name, value in info.items() if isinstance(value, bool | int | float | str)}
        success = {"success": self._is_success(info)}
        return Step(self._observation(), float(reward), bool(terminated), bool(truncated), scalars | success)

    def render(self) -> np.ndarray:
        """See `Env.render`.

        Raises:
            ConfigError: the env renders no image.
        """
        frame = self._env.render()
        if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.shape[2] != 3:
            problem = f"its image is {type(frame).__name__}, not an RGB array"
            raise _config_error(self._config, problem, "use env.render=text")
        return _resized(np.ascontiguousarray(frame, np.uint8), self._config.image_size)

    def close(self) -> None:
        self._env.close()

    def _observation(self) -> Observation:
        if self._config.render == "vision":
            return Observation(IMAGE, (self.render(),))
        if self._config.observation == "ansi":
            return Observation(HIGHLIGHT.sub(r"[\1]", str(self._env.render())).strip("\n"))
        return Observation(_value_text(self._env.observation_space, self._state))

    def _is_success(self, info: Mapping[str, Any]) -> bool:
        config, spec = self._config, self._env.spec
        if config.success_key is not None:
            return bool(info.get(config.success_key, False))
        threshold = config.success_return
        if threshold is None and spec is not None:
            threshold = spec.reward_threshold
        return self._return > 0 if threshold is None else self._return >= threshold

    def _expert_action(self, table: Table) -> str:
        """Return an optimal action by value iteration."""
        if self._policy is None:
            self._policy = slippery_policy(table)
        return self.actions[self._policy[int(self._state)]]


def _make(config: GymnasiumConfig) -> gymnasium.Env[Any, Any]:
    mode = {"vision": "rgb_array", "text": "ansi" if config.observation == "ansi" else None}[config.render]
    module, _, name = config.id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        options = {} if mode is None else {"render_mode": mode}
        env = gymnasium.make(name, disable_env_checker=True, **options, **config.kwargs)
    except ModuleNotFoundError as error:
        hint = f"install the package that has the module {error.name}, or correct the part before the colon"
        raise _config_error(config, f"the module {error.name} cannot be imported", hint) from error
    except DependencyNotInstalled as error:
        raise _missing_package(config, error) from error
    except gymnasium.error.Error as error:
        close = did_you_mean(name, gymnasium.registry, "{}")
        hint = f"{close} name an environment of another package as MODULE:ID".lstrip()
        raise _config_error(config, " ".join(str(error).split()), hint) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise _config_error(config, f"it cannot be built: {error}", "correct env.kwargs", key="env.kwargs") from error
    modes = env.metadata.get("render_modes", ())
    if mode is not None and mode not in modes:
        env.close()
        hint = f"it has {', '.join(map(str, modes)) or 'none'}; use env.render=text env.observation=space"
        raise _config_error(config, f"it has no render mode {mode}", hint)
    return env


def _config_error(config: GymnasiumConfig, problem: str, hint: str, key: str = "env.id") -> ConfigError:
    return ConfigError(f"env.id = {config.id!r}: {problem}", key=key, value=config.id, hint=hint)


def _missing_package(config: GymnasiumConfig, error: Exception) -> ConfigError:
    text = " ".join(str(error).split())
    return _config_error(config, f"a package is missing: {text}", "install what the message names")


def _actions_by_word(config: GymnasiumConfig, space: spaces.Space[Any]) -> dict[str, int]:
    """Return the numbers of discrete actions by their words; none for a space of texts.

    Raises:
        ConfigError: the space is neither, or `env.actions` does not have one name for each action.
    """
    if isinstance(space, spaces.Text) and config.actions is None:
        return {}
    if not isinstance(space, spaces.Discrete) or int(space.n) > MAX_ACTIONS:
        hint = "use an environment with a Discrete or Text action space, or wrap it in your own class (docs/envs.md)"
        raise _config_error(config, f"its actions are {space}, which cannot be named in a response", hint)
    numbers = [int(space.start) + index for index in range(int(space.n))]
    names = config.actions or ()
    if names and len(names) != len(numbers):
        message = f"env.actions has {len(names)} names, and {config.id} has {len(numbers)} actions"
        raise ConfigError(message, key="env.actions", value=list(names), hint="give each action a name")
    return dict(zip(names, numbers, strict=False)) | {str(number): number for number in numbers}


def _check_observations(config: GymnasiumConfig, space: spaces.Space[Any]) -> None:
    if config.render == "text" and config.observation == "space" and not _is_text(space):
        hint = "use env.render=vision, or env.observation=ansi if it draws text"
        raise _config_error(config, f"its observations are {space}, which cannot be written as text", hint)


def _is_text(space: spaces.Space[Any]) -> bool:
    if isinstance(space, spaces.Tuple):
        return all(map(_is_text, space.spaces))
    if isinstance(space, spaces.Dict):
        return all(map(_is_text, space.spaces.values()))
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return int(np.prod(space.shape)) <= MAX_NUMBERS
    return isinstance(space, spaces.Discrete | spaces.Text)


def _space_text(space: spaces.Space[Any]) -> str:
    """Describe a space in a few words."""
    if isinstance(space, spaces.Discrete):
        return f"a number from {int(space.start)} to {int(space.start + space.n) - 1}"
    if isinstance(space, spaces.Tuple):
        return ", ".join(map(_space_text, space.spaces))
    if isinstance(space, spaces.Dict):
        return ", ".join(f"{name}: {_space_text(part)}" for name, part in space.spaces.items())
    return "a text" if isinstance(space, spaces.Text) else f"{int(np.prod(space.shape or ()))} numbers"


def _value_text(space: spaces.Space[Any], value: Any) -> str:
    """Write a value of a space: `14 10 0` for a tuple of numbers, one line per entry of a Dict."""
    if isinstance(space, spaces.Tuple):
        return " ".join(_value_text(part, entry) for part, entry in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{name}: {_value_text(part, value[name])}" for name, part in space.spaces.items())
    if isinstance(space, spaces.Text):
        return str(value)
    return " ".join(f"{number:.4g}" for number in np.ravel(value).tolist())


def _resized(image: np.ndarray, longer_side: int | None) -> np.ndarray:
    if longer_side is None:
        return image
    scale = longer_side / max(image.shape[:2])
    height, width = (max(1, round(side * scale)) for side in image.shape[:2])
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BOX))
