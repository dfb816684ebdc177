"""Table in ManiSkill (Tao et al. 2024), with the tasks and skills of VAGEN's package."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from PIL import Image

from quintet.config.native.embodied_envs import PrimitiveSkillConfig
from quintet.envs.env import UnsolvableError
from quintet.envs.primitive_skill.table import NUM_PARAMETERS, Limits, Position
from quintet.errors import ConfigError
from quintet.registry import load_user_object

KEY = "env.backend"
REQUIREMENTS: Final = (
    "ManiSkill needs Linux with a GPU and its Vulkan driver, `pip install mani_skill` (with SAPIEN), its assets ycb and"
    " partnet_mobility_cabinet for PutAppleInDrawer (`python -m mani_skill.utils.download_asset NAME`), and VAGEN's"
    " package for the tasks, or your own function in env.maniskill_builder; env.backend=kinematic needs none of them"
)
STAGE = re.compile(r"stage_?(\d+)_success")
"""VAGEN's tasks name their stages with and without the first underscore."""
INTERNAL = ("is_success", "num_timesteps", "elapsed_steps", "skill_success", "reward_components")
"""Entries of the simulation's info that observations omit."""

_idle: dict[PrimitiveSkillConfig, list[Any]] = {}
"""Simulations without an episode, which take seconds to build."""


class ManiSkillTable:
    """See `Table`. Its simulation is used for one episode after another."""

    def __init__(self, config: PrimitiveSkillConfig) -> None:
        """
        Raises:
            ConfigError: a package is missing, or the simulation cannot be built, for example without a GPU.
        """
        self._config = config
        idle = _idle.get(config)
        self._env: Any = idle.pop() if idle else _build(config)
        self._task: Any = self._env.unwrapped
        self.instruction = str(self._task.instruction())
        axes = (self._task.workspace_x, self._task.workspace_y, self._task.workspace_z)
        self.limits: Limits = tuple((round(low * 1000), round(high * 1000)) for low, high in axes)  # type: ignore[assignment]

    def reset(self, seed: int) -> None:
        _, self._info = self._env.reset(seed=seed)

    def execute(self, skill: str, parameters: Sequence[float]) -> None:
        """See `Table.execute`. VAGEN's action is one-hot for the skill, followed by six coordinates in meters."""
        action = np.zeros(len(NUM_PARAMETERS) + 6)
        action[list(NUM_PARAMETERS).index(skill)] = 1
        action[len(NUM_PARAMETERS) : len(NUM_PARAMETERS) + len(parameters)] = np.array(parameters) / 1000
        _, _, _, _, self._info = self._env.step(action)

    def positions(self) -> Mapping[str, Position]:
        positions = {}
        for key in self._task.state_keys:
            x, y, z = np.round(_array(self._info[key]).reshape(-1)[:3] * 1000).astype(int).tolist()
            positions[key.removesuffix("_position")] = (x, y, z)
        return positions

    def information(self, *, masked: bool) -> Mapping[str, Any]:
        keys = self._task.vlm_info_keys if masked else [key for key in self._info if key not in INTERNAL]
        return {key: _python_value(key, self._info[key]) for key in keys if not key.endswith("_position")}

    def stage(self) -> int:
        stages = ((STAGE.fullmatch(key), value) for key, value in self._info.items())
        return max((int(match[1]) + 1 for match, value in stages if match and _array(value).all()), default=0)

    def is_solved(self) -> bool:
        return bool(_array(self._info["success"]).all())

    def render(self) -> np.ndarray:
        frame = _array(self._env.render())
        image = Image.fromarray(np.ascontiguousarray(frame.reshape(frame.shape[-3:])[..., :3], np.uint8))
        side = self._config.resolution
        return np.asarray(image if image.size == (side, side) else image.resize((side, side), Image.Resampling.BOX))

    def expert_skill(self) -> str:
        raise UnsolvableError("ManiSkill has no expert: train an existing model without a warm start")

    def close(self) -> None:
        """Keep the simulation for another episode."""
        env, self._env = self._env, None
        if env is not None:
            _idle.setdefault(self._config, []).append(env)


def load_builder(config: PrimitiveSkillConfig) -> Callable[..., Any]:
    """Return the function of `env.maniskill_builder`.

    Raises:
        ConfigError: ManiSkill or that function is missing.
    """
    if importlib.util.find_spec("mani_skill") is None:
        raise ConfigError(
            "env.backend=maniskill: mani_skill is not installed", key=KEY, value="maniskill", hint=REQUIREMENTS
        )
    try:
        return load_user_object(config.maniskill_builder, "env.maniskill_builder")
    except ConfigError as error:
        raise ConfigError(error.message, key=error.key, value=error.value, hint=REQUIREMENTS) from error


def _build(config: PrimitiveSkillConfig) -> Any:
    build = load_builder(config)
    try:
        return build(config.task, record_dir=None)
    except (ImportError, OSError, RuntimeError) as error:
        message = f"env.backend=maniskill: {config.task} cannot be built: {error}"
        raise ConfigError(message, key=KEY, value="maniskill", hint=REQUIREMENTS) from error


def _array(value: Any) -> np.ndarray:
    """Return an array or tensor, possibly on another device, as an array."""
    return np.asarray(value.cpu() if hasattr(value, "cpu") else value)


def _python_value(key: str, value: Any) -> Any:
    """Return a value of the simulation's info in millimeters, or as Python numbers."""
    array = _array(value)
    if key.endswith(("_value", "_size")):
        array = np.round(array * 1000).astype(int)
    return array.item() if array.size == 1 else tuple(array.reshape(-1).tolist())
