"""Simulators with an instance of their own for each robot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quintet.embodied_records import RobotObservation, SimulatorStep
from quintet.envs.vector_env import failure_from_error
from quintet.errors import ConfigError, did_you_mean
from quintet.records import Failure


class RobotInstance(Protocol):
    """Simulator of one robot that performs one task."""

    action_dim: int
    control_frequency: float

    def reset(self, trial: int) -> None:
        """Put the robot into a start state of the task, which follows from `trial` and the seed."""

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        """Move by an action, float32 [D]; return the reward, and whether the task is solved now."""

    def observe(self) -> tuple[np.ndarray, np.ndarray]:
        """Return images, uint8 [cameras, height, width, 3], and the state, float32 [S]."""

    def render(self) -> np.ndarray:
        """Return a picture for people, uint8 [height, width, 3]."""

    def close(self) -> None:
        """Free the simulator."""


@dataclass(frozen=True, slots=True)
class RobotTask:
    """A task of a suite."""

    name: str
    instruction: str
    num_trials: int
    """Number of its start states."""


def suite_choice(name: str | None, suites: Collection[str], default: str) -> str:
    """Return `env.task_suite`, in lower case.

    Raises:
        ConfigError: it is none of `suites`.
    """
    suite = (name or default).lower()
    if suite not in suites:
        raise ConfigError(
            f"env.task_suite={name} is unknown", key="env.task_suite", value=name, hint=f"valid: {', '.join(suites)}"
        )
    return suite


def select_tasks(tasks: Sequence[RobotTask], name: str | None, suite: str) -> tuple[RobotTask, ...]:
    """Return the task `name` (`env.task`), or all tasks of a suite for None.

    Raises:
        ConfigError: the suite has no such task.
    """
    selected = tuple(task for task in tasks if name in (None, task.name))
    if not selected:
        names = [task.name for task in tasks]
        hint = did_you_mean(str(name), names) or f"valid: {', '.join(names)}"
        raise ConfigError(f"env.task={name}: {suite} has no such task", key="env.task", value=name, hint=hint)
    return selected


class SeparateRobots:
    """Robots with an instance each.

    Start states are numbered as in RLinf: all of the first task, then all of the second. An instance performs one task,
    so it is built again when its robot starts another one. An error of an instance is a failure of its robot only.
    """

    def __init__(
        self, tasks: Sequence[RobotTask], build: Callable[[RobotTask], RobotInstance], num_robots: int
    ) -> None:
        """`build` returns an instance for a task. The first one is built at once, so that errors are
        reported early; the others when they are reset."""
        self.num_robots = num_robots
        self.tasks = tuple(task.name for task in tasks)
        self._tasks, self._build = tuple(tasks), build
        self._ends = np.cumsum([task.num_trials for task in tasks])
        self.num_start_states = int(self._ends[-1])
        first = build(self._tasks[0])
        self.action_dim, self.control_frequency = first.action_dim, first.control_frequency
        self._instances: dict[int, RobotInstance] = {0: first}
        self._task_of = np.zeros(num_robots, np.int64)
        self._blank: tuple[np.ndarray, np.ndarray] | None = None

    def task(self, start_state: int) -> str:
        return self.tasks[self._locate(start_state)[0]]

    def _locate(self, start_state: int) -> tuple[int, int]:
        """Return the task of a start state, and the number of the start state within the task."""
        task = int(np.searchsorted(self._ends, start_state, side="right"))
        return task, start_state - int(self._ends[task]) + self._tasks[task].num_trials

    def reset(self, robots: np.ndarray, start_states: np.ndarray) -> None:
        for robot, start_state in zip(robots.tolist(), start_states.tolist(), strict=True):
            task, trial = self._locate(start_state)
            if self._task_of[robot] != task:
                self._discard(robot)
            self._task_of[robot] = task
            if robot not in self._instances:
                self._instances[robot] = self._build(self._tasks[task])
            self._instances[robot].reset(trial)

    def step(self, robots: np.ndarray, actions: np.ndarray) -> SimulatorStep:
        rewards, success = np.zeros(len(robots), np.float32), np.zeros(len(robots), bool)
        failures: dict[int, Failure] = {}
        for row, robot in enumerate(robots.tolist()):
            result = self._step(robot, actions[row])
            if isinstance(result, Failure):
                failures[robot] = result
                self._discard(robot)
            else:
                rewards[row], success[row] = result
        return SimulatorStep(rewards, success, failures=failures)

    def _step(self, robot: int, action: np.ndarray) -> tuple[float, bool] | Failure:
        try:
            return self._instances[robot].step(action)
        except Exception as error:  # noqa: BLE001 - an error of one robot's instance is recorded as data
            return failure_from_error("step", error)

    def observe(self, robots: np.ndarray) -> RobotObservation:
        observed = [self._observe(robot) for robot in robots.tolist()]
        images, states = zip(*observed, strict=True)
        instructions = tuple(self._tasks[task].instruction for task in self._task_of[robots])
        return RobotObservation(np.stack(images), np.stack(states), instructions)

    def _observe(self, robot: int) -> tuple[np.ndarray, np.ndarray]:
        """Return images and state of a robot; black and 0 for one that has failed."""
        if robot in self._instances:
            observed = self._instances[robot].observe()
            self._blank = self._blank or (np.zeros_like(observed[0]), np.zeros_like(observed[1]))
            return observed
        if self._blank is None:
            raise RuntimeError("no robot was observed before this one failed")
        return self._blank

    def render(self, robots: np.ndarray) -> np.ndarray:
        frames = {robot: self._instances[robot].render() for robot in robots.tolist() if robot in self._instances}
        if not frames:
            raise RuntimeError("no robot can be rendered, since all have failed")
        black = np.zeros_like(next(iter(frames.values())))
        return np.stack([frames.get(robot, black) for robot in robots.tolist()])

    def close(self) -> None:
        for robot in tuple(self._instances):
            self._discard(robot)

    def _discard(self, robot: int) -> None:
        if robot in self._instances:
            self._instances.pop(robot).close()
