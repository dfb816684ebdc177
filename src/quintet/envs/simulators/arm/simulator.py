"""The simulator `arm`: a batch of arms whose physics is computed by MuJoCo."""

from __future__ import annotations

from typing import Final, cast

import mujoco
import numpy as np
from mujoco.rollout import Rollout

from quintet.config.native.arm_simulator import ArmOptions
from quintet.config.native.envs import SimulatorConfig
from quintet.embodied_records import RobotObservation, SimulatorStep
from quintet.envs.simulators.arm.rendering import Renderer, Scenes, build_renderer
from quintet.envs.simulators.arm.scene import (
    SUBSTEPS,
    TIMESTEP,
    WORKSPACE_HIGH,
    WORKSPACE_LOW,
    arm_xml,
    joint_angles,
    tip_positions,
)
from quintet.envs.simulators.arm.tasks import TASKS
from quintet.envs.simulators.registry import simulator_options
from quintet.errors import ConfigError, did_you_mean
from quintet.records import Failure
from quintet.seeds import derive_seed

TIP_LIMIT: Final = 0.03
"""How far an action moves the tip along each axis, meters."""
JOINT_LIMIT: Final = 0.2
"""How far an action turns a joint, rad."""
JOINTS: Final = slice(1, 3)
"""Columns of MuJoCo's state: the time, positions (joints, then x and y of a movable object), velocities."""
MOVABLE: Final = slice(3, 5)


def build_arm(config: SimulatorConfig, num_robots: int, seed: int) -> ArmSimulator:
    """Return the simulator of `env.task`, which is `reach` by default.

    Raises:
        ConfigError: the task or an option is unknown or invalid.
        MachineError: see `ArmSimulator`.
    """
    task = config.task or "reach"
    if task not in TASKS:
        hint = did_you_mean(task, TASKS) or f"valid: {', '.join(TASKS)}"
        raise ConfigError(
            f"env.task={task}: the simulator `arm` has no such task", key="env.task", value=task, hint=hint
        )
    options = cast("ArmOptions", simulator_options(config, ArmOptions))
    return ArmSimulator(task, options, num_robots, seed, (config.camera_height, config.camera_width))


class ArmSimulator:
    """Arms that perform one task.

    Robots share the model and are simulated one after the other from their own states, so that what happens to one does
    not depend on the others.
    """

    action_dim = 2
    control_frequency = 1 / (TIMESTEP * SUBSTEPS)

    def __init__(
        self, task: str, options: ArmOptions, num_robots: int, seed: int, camera_size: tuple[int, int] = (64, 64)
    ) -> None:
        """`camera_size` is the height and width of observed images, pixels.

        Raises:
            MachineError: the options ask for EGL, which does not work.
        """
        self.num_robots = num_robots
        self.num_start_states = options.start_states
        self.tasks = (task,)
        self._task = TASKS[task]
        self._options = options
        self._seed = seed
        self._camera_size = camera_size
        self._model = mujoco.MjModel.from_xml_string(arm_xml(self._task.bodies))
        self._data = mujoco.MjData(self._model)
        self._rollout = Rollout(nthread=0)
        size = mujoco.mj_stateSize(self._model, mujoco.mjtState.mjSTATE_FULLPHYSICS)
        self._states = np.zeros((num_robots, size))
        self._objects = np.zeros((num_robots, len(self._task.bodies), 2))
        self._start_states = np.zeros(num_robots, np.int64)
        self._renderer: Renderer | None = None

    def task(self, start_state: int) -> str:
        del start_state
        return self.tasks[0]

    def reset(self, robots: np.ndarray, start_states: np.ndarray) -> None:
        self._start_states[robots] = start_states
        self._states[robots] = 0
        for robot, start_state in zip(robots, start_states, strict=True):
            rng = np.random.default_rng(derive_seed("arm", self.tasks[0], self._seed, int(start_state)))
            tip, self._objects[robot] = self._task.draw(rng)
            self._states[robot, JOINTS] = joint_angles(tip[None])[0]
        if self._task.bodies[0].movable:
            self._states[robots, MOVABLE] = self._objects[robots, 0]

    def step(self, robots: np.ndarray, actions: np.ndarray) -> SimulatorStep:
        valid = np.isfinite(actions).all(axis=1)
        before = self._distances(robots)
        moves = np.where(valid[:, None], np.clip(actions.astype(np.float64), -1, 1), 0)
        self._simulate(robots, self._controls(robots, moves))
        after, start_states = self._distances(robots), self._start_states[robots]
        success = after == 0
        progress = self._options.progress_reward * (before - after) / 0.1
        failed = self._task.failed(self._tips(robots), self._objects[robots], start_states)
        failures = {int(robot): Failure("step", "ValueError", "an action is not a number") for robot in robots[~valid]}
        return SimulatorStep((success + progress).astype(np.float32), success, failed, failures)

    def _controls(self, robots: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Return the angles that the joints are driven to, rad [n, 2]."""
        if self._options.control == "joint":
            angles = self._states[robots, JOINTS] + JOINT_LIMIT * actions
            return joint_angles(_clip_to_workspace(tip_positions(angles)))
        return joint_angles(_clip_to_workspace(self._tips(robots) + TIP_LIMIT * actions))

    def _simulate(self, robots: np.ndarray, controls: np.ndarray) -> None:
        states, number = self._states[robots], len(robots)
        after = np.empty((number, SUBSTEPS, states.shape[1]))
        self._rollout.rollout(
            [self._model] * number,
            [self._data],
            states,
            np.repeat(controls[:, None], SUBSTEPS, axis=1),
            skip_checks=True,
            nstep=SUBSTEPS,
            # Without it the solver would start from the previous robot's forces.
            initial_warmstart=np.zeros((number, self._model.nv)),
            state=after,
            sensordata=np.empty((number, SUBSTEPS, 0)),
        )
        self._states[robots] = after[:, -1]
        if self._task.bodies[0].movable:
            self._objects[robots, 0] = after[:, -1, MOVABLE]

    def observe(self, robots: np.ndarray) -> RobotObservation:
        height, width = self._camera_size
        images = np.zeros((len(robots), height, width, 3), np.uint8)
        if not self._options.blank_images:
            images = self._render(robots, height, width)
        instructions = tuple(self._task.instruction(int(start)) for start in self._start_states[robots])
        return RobotObservation(images[:, None], self._proprioception(robots), instructions)

    def _proprioception(self, robots: np.ndarray) -> np.ndarray:
        """Return the position of the tip in the workspace, -1 to 1, joint angles, rad, and velocities, 10 rad/s."""
        states, velocities = self._states[robots], 1 + self._model.nq
        parts = [_scaled(self._tips(robots)), states[:, JOINTS], states[:, velocities : velocities + 2] / 10]
        if self._options.privileged_state:
            objects = self._task.ordered_objects(self._objects[robots], self._start_states[robots])
            parts.append(_scaled(objects).reshape(len(robots), -1))
        return np.concatenate(parts, axis=1, dtype=np.float32)

    def render(self, robots: np.ndarray) -> np.ndarray:
        return self._render(robots, self._options.video_size, self._options.video_size)

    def _render(self, robots: np.ndarray, height: int, width: int) -> np.ndarray:
        if self._renderer is None:
            largest = tuple(max(size, self._options.video_size) for size in self._camera_size)
            self._renderer = build_renderer(
                self._options.renderer, self._model, self._task.bodies, (largest[0], largest[1])
            )
        return self._renderer.render(Scenes(self._states[robots, JOINTS], self._objects[robots]), height, width)

    def expert_actions(self, robots: np.ndarray) -> np.ndarray:
        """Return the actions of an expert that knows the positions of the objects, float32 [n, 2]."""
        tips, start_states = self._tips(robots), self._start_states[robots]
        waypoints = _clip_to_workspace(self._task.waypoints(tips, self._objects[robots], start_states))
        actions = (waypoints - tips) / TIP_LIMIT
        if self._options.control == "joint":
            actions = (joint_angles(waypoints) - self._states[robots, JOINTS]) / JOINT_LIMIT
        largest = np.abs(actions).max(axis=1, keepdims=True)
        return np.asarray(actions / np.maximum(largest, 1), np.float32)

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self._rollout.close()

    def _tips(self, robots: np.ndarray) -> np.ndarray:
        return tip_positions(self._states[robots, JOINTS])

    def _distances(self, robots: np.ndarray) -> np.ndarray:
        return self._task.distances(self._tips(robots), self._objects[robots], self._start_states[robots])


def _clip_to_workspace(points: np.ndarray) -> np.ndarray:
    return np.asarray(np.clip(points, WORKSPACE_LOW, WORKSPACE_HIGH))


def _scaled(points: np.ndarray) -> np.ndarray:
    return np.asarray((2 * points - WORKSPACE_LOW - WORKSPACE_HIGH) / (WORKSPACE_HIGH - WORKSPACE_LOW))
