"""Tasks of robosuite (1.5)."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any, Final, cast

import numpy as np

from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.robot_simulators import RobosuiteOptions
from quintet.envs.simulators.headless import select_renderer
from quintet.envs.simulators.registry import simulator_options
from quintet.envs.simulators.separate_robots import RobotTask, SeparateRobots, select_tasks
from quintet.seeds import derive_seed

INSTRUCTIONS: Final = {
    "Lift": "lift the red cube",
    "Stack": "stack the red cube on the green cube",
    "Door": "open the door",
    "Wipe": "wipe the table",
    "PickPlaceCan": "put the can into its bin",
    "PickPlaceMilk": "put the milk into its bin",
    "PickPlaceBread": "put the bread into its bin",
    "PickPlaceCereal": "put the cereal into its bin",
    "NutAssemblySquare": "put the square nut onto the square peg",
    "NutAssemblyRound": "put the round nut onto the round peg",
    "ToolHang": "assemble the stand and hang the tool on it",
}
GRIPPER_POSITION: Final = re.compile(r"(robot\d+_(?:right_|left_)?)eef_pos")
"""Name of the position of an arm's gripper; positions of objects relative to it end like this, too."""


def build_robosuite(config: SimulatorConfig, num_robots: int, seed: int) -> SeparateRobots:
    """Return `env.task`, which is `Lift` by default.

    Raises:
        ConfigError: the task or an option is unknown.
        MachineError: nothing renders without a display.
    """
    options = cast("RobosuiteOptions", simulator_options(config, RobosuiteOptions))
    select_renderer()
    names = sorted(importlib.import_module("robosuite").ALL_ENVIRONMENTS)
    tasks = select_tasks(
        [RobotTask(name, _instruction(name), options.start_states) for name in names],
        config.task or "Lift",
        "robosuite",
    )
    size = (config.camera_height, config.camera_width)

    def build(task: RobotTask, robot: int) -> RobosuiteRobot:
        del robot
        return RobosuiteRobot(task.name, options, seed, size)

    return SeparateRobots(tasks, build, num_robots)


def _instruction(name: str) -> str:
    """Return the instruction of a task: by default the words of its name."""
    return INSTRUCTIONS.get(name) or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()


class RobosuiteRobot:
    """A robot of robosuite; actions are its controller's, -1 to 1."""

    def __init__(self, task: str, options: RobosuiteOptions, seed: int, camera_size: tuple[int, int]) -> None:
        self._task, self._seed = task, seed
        self._cameras, self._camera_size = options.cameras, camera_size
        robosuite = importlib.import_module("robosuite")
        controller: dict[str, Any] = {}
        if options.controller is not None:
            load = robosuite.load_composite_controller_config
            controller = {"controller_configs": load(controller=options.controller, robot=options.robots)}
        self._env: Any = robosuite.make(
            task,
            robots=options.robots,
            has_renderer=False,
            has_offscreen_renderer=True,
            # Cameras are rendered when the policy observes, not after each action.
            use_camera_obs=False,
            control_freq=options.control_frequency,
            # `env.max_steps` limits episodes.
            ignore_done=True,
            reward_shaping=options.reward_shaping,
            seed=seed,
            **controller,
        )
        self.action_dim = int(self._env.action_dim)
        self.control_frequency = options.control_frequency
        self._observed: Mapping[str, np.ndarray] = {}

    def reset(self, trial: int) -> None:
        generator = np.random.default_rng(derive_seed("robosuite", self._task, self._seed, trial))
        # Samplers of robosuite share the generator, so that its state is set, not the generator.
        self._env.rng.bit_generator.state = generator.bit_generator.state
        self._observed = self._env.reset()

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        self._observed, reward, _, _ = self._env.step(np.clip(action, -1, 1))
        return float(reward), bool(self._env._check_success())

    def observe(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the cameras, and the proprioception of each arm."""
        images = np.stack([camera_image(self._env.sim, camera, self._camera_size) for camera in self._cameras])
        return images, proprioception(self._observed)

    def render(self) -> np.ndarray:
        return camera_image(self._env.sim, "frontview", self._camera_size)

    def close(self) -> None:
        self._env.close()


def camera_image(sim: Any, camera: str, size: tuple[int, int]) -> np.ndarray:
    """Return the image of a camera, uint8 [height, width, 3], upright."""
    height, width = size
    return np.ascontiguousarray(sim.render(camera_name=camera, height=height, width=width)[::-1])


def proprioception(observed: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the position, m, and the axis-angle, rad, of each arm's gripper, and the joints of its fingers."""
    parts = []
    for arm in sorted(match[1] for name in observed if (match := GRIPPER_POSITION.fullmatch(name))):
        fingers = observed.get(f"{arm}gripper_qpos", np.zeros(0))
        parts += [observed[f"{arm}eef_pos"], axis_angle(observed[f"{arm}eef_quat"]), fingers]
    return np.concatenate(parts, dtype=np.float32)


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Return the axis times the angle, rad [3], of a unit quaternion x, y, z, w."""
    cosine = float(np.clip(quaternion[3], -1, 1))
    sine = float(np.sqrt(1 - cosine * cosine))
    if sine < 1e-9:
        return np.zeros(3)
    return np.asarray(quaternion[:3] * 2 * np.arccos(cosine) / sine)
