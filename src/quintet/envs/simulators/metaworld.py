"""Tasks of Meta-World (`metaworld` 3)."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Final, cast

import numpy as np

from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.robot_simulators import MetaWorldOptions
from quintet.envs.simulators.headless import select_renderer
from quintet.envs.simulators.registry import simulator_options
from quintet.envs.simulators.separate_robots import RobotTask, SeparateRobots, select_tasks, suite_choice
from quintet.package_files import read_yaml
from quintet.seeds import derive_seed

CAMERA = 2
"""`corner2`, which RLinf moves to `CAMERA_POSITION`, meters."""
CAMERA_POSITION = (0.75, 0.075, 0.7)
TASKS: Final = read_yaml(__file__)
"""Instructions by task, and suites."""


def build_metaworld(config: SimulatorConfig, num_robots: int, seed: int) -> SeparateRobots:
    """Return the tasks of `env.task_suite`, which is `metaworld_50` by default.

    Raises:
        ConfigError: the suite, the task or an option is unknown.
        MachineError: nothing renders without a display.
    """
    options = cast("MetaWorldOptions", simulator_options(config, MetaWorldOptions))
    name = suite_choice(config.task_suite, TASKS["suites"], "metaworld_50")
    suite, instructions = TASKS["suites"][name], TASKS["instructions"]
    trials = options.trials or suite["start_states"]
    tasks = [RobotTask(task, instructions[task], trials) for task in suite.get("tasks", instructions)]
    select_renderer()
    size = (config.camera_height, config.camera_width)

    def build(task: RobotTask) -> MetaWorldRobot:
        return MetaWorldRobot(task.name, options, seed, size)

    return SeparateRobots(select_tasks(tasks, config.task, name), build, num_robots)


class MetaWorldRobot:
    """A Sawyer arm: actions are the motion of the gripper, and its force, each -1 to 1."""

    action_dim = 4

    def __init__(self, task: str, options: MetaWorldOptions, seed: int, camera_size: tuple[int, int]) -> None:
        self._task, self._options, self._seed = task, options, seed
        height, width = camera_size
        env_class = importlib.import_module("metaworld.env_dict").ALL_V3_ENVIRONMENTS[task]
        self._env: Any = env_class(render_mode="rgb_array", camera_id=CAMERA, height=height, width=width)
        self._env.model.cam_pos[CAMERA] = CAMERA_POSITION
        # As Meta-World's own classes with observable goals do: the goal is drawn at each reset, by a seeded generator.
        self._env._partially_observable, self._env._set_task_called = False, True
        self._env._freeze_rand_vec, self._env.seeded_rand_vec = False, True
        # `env.max_steps` limits episodes.
        self._env.max_path_length = sys.maxsize
        self.control_frequency = 1 / self._env.dt
        self._observed = np.zeros(0)

    def reset(self, trial: int) -> None:
        self._env.seed(derive_seed("metaworld", self._task, self._seed, trial))
        self._observed, _ = self._env.reset()
        for _ in range(self._options.wait_steps):
            self._observed = self._env.step(np.zeros(4, np.float32))[0]

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        self._observed, reward, _, _, info = self._env.step(np.clip(action, -1, 1))
        success = bool(info["success"])
        return float(success if self._options.reward_mode == "success" else reward), success

    def observe(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the image, and the position of the gripper, meters, with its opening."""
        return self.render()[None], self._observed[:4].astype(np.float32)

    def render(self) -> np.ndarray:
        # Meta-World's images are upside down.
        return np.ascontiguousarray(self._env.render()[::-1, ::-1])

    def close(self) -> None:
        self._env.close()
