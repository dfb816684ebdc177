"""Tasks of Gymnasium-Robotics with goals (`gymnasium_robotics` 1.4)."""

from __future__ import annotations

import importlib
import re
from typing import Any, Final, cast

import gymnasium
import numpy as np

from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.robot_simulators import GymnasiumRoboticsOptions
from quintet.envs.simulators.headless import select_renderer
from quintet.envs.simulators.registry import simulator_options
from quintet.envs.simulators.separate_robots import RobotTask, SeparateRobots
from quintet.errors import ConfigError, did_you_mean
from quintet.package_files import read_yaml
from quintet.seeds import derive_seed

INSTRUCTIONS: Final = read_yaml(__file__, "instructions.yaml")["gymnasium_robotics"]


def build_gymnasium_robotics(config: SimulatorConfig, num_robots: int, seed: int) -> SeparateRobots:
    """Return `env.task`, which is `FetchReach-v4` by default.

    Raises:
        ConfigError: the task or an option is unknown, or the task has no goals.
        MachineError: nothing renders without a display.
    """
    options = cast("GymnasiumRoboticsOptions", simulator_options(config, GymnasiumRoboticsOptions))
    select_renderer()
    name = _registered_name(config.task or "FetchReach-v4")
    task = RobotTask(name, _instruction(name), options.start_states)
    size = (config.camera_height, config.camera_width)

    def build(task: RobotTask) -> GoalRobot:
        return GoalRobot(task.name, options, seed, size)

    return SeparateRobots([task], build, num_robots)


def _registered_name(name: str) -> str:
    """
    Raises:
        ConfigError: Gymnasium-Robotics registers no such task.
    """
    package = importlib.import_module("gymnasium_robotics")
    gymnasium.register_envs(package)
    names = [spec.id for spec in gymnasium.registry.values() if str(spec.entry_point).startswith("gymnasium_robotics.")]
    if name not in names:
        hint = did_you_mean(name, names) or "FetchReach-v4, FetchPush-v4 and FetchPickAndPlace-v4 are valid"
        raise ConfigError(
            f"env.task={name}: Gymnasium-Robotics has no such task", key="env.task", value=name, hint=hint
        )
    return name


def _instruction(name: str) -> str:
    """Return the instruction of a task: by default the words of its name."""
    base = re.sub(r"(Dense)?-v\d+$", "", name)
    return INSTRUCTIONS.get(base) or re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", base).lower()


class GoalRobot:
    """A robot with a goal; actions are -1 to 1."""

    def __init__(self, task: str, options: GymnasiumRoboticsOptions, seed: int, camera_size: tuple[int, int]) -> None:
        """
        Raises:
            ConfigError: the task has no goals.
        """
        self._task, self._options, self._seed = task, options, seed
        height, width = camera_size
        # `env.max_steps` limits episodes, not a wrapper.
        self._env: Any = gymnasium.make(
            task, render_mode="rgb_array", height=height, width=width, max_episode_steps=-1, disable_env_checker=True
        )
        if (
            not hasattr(self._env.observation_space, "spaces")
            or "desired_goal" not in self._env.observation_space.spaces
        ):
            raise ConfigError(
                f"env.task={task}: the task has no goals",
                key="env.task",
                value=task,
                hint="FetchReach-v4, FetchPush-v4 and FetchPickAndPlace-v4 are valid",
            )
        self.action_dim = int(self._env.action_space.shape[0])
        self.control_frequency = 1 / float(self._env.unwrapped.dt)
        self._observed: dict[str, np.ndarray] = {}

    def reset(self, trial: int) -> None:
        seed = derive_seed("gymnasium_robotics", self._task, self._seed, trial) % 2**32
        self._observed, _ = self._env.reset(seed=seed)

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        self._observed, reward, _, _, info = self._env.step(action)
        return float(reward), bool(info["is_success"])

    def observe(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the image, and the observation of the task with the goal."""
        parts = [self._observed["observation"]]
        if self._options.goal_state:
            parts.append(self._observed["desired_goal"])
        return self.render()[None], np.concatenate(parts).astype(np.float32)

    def render(self) -> np.ndarray:
        return np.asarray(self._env.render())

    def close(self) -> None:
        self._env.close()
