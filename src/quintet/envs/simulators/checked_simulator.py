"""A simulator whose errors and invalid results become failures of its robots."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from quintet.embodied_records import RobotObservation, SimulatorStep
from quintet.envs.simulators.simulator import Simulator
from quintet.envs.validation import INVALID_OUTPUT, InvalidEnvOutputError
from quintet.envs.vector_env import failure_from_error
from quintet.errors import UserError
from quintet.records import Failure

T = TypeVar("T")


class CheckedSimulator:
    """Calls of a simulator, with checked results.

    An error of a call is a failure of all robots: nothing is known of the simulator's state. It is then built again
    before the next reset. Invalid values of single robots are failures of these robots.
    """

    def __init__(self, simulator: Simulator, rebuild: Callable[[], Simulator] | None = None) -> None:
        """`rebuild` replaces a simulator after an error; None keeps it."""
        self._simulator: Simulator | None = simulator
        self._rebuild = rebuild
        self.num_robots, self.action_dim = simulator.num_robots, simulator.action_dim
        self.tasks, self.num_start_states = tuple(simulator.tasks), simulator.num_start_states
        self.control_frequency = simulator.control_frequency
        self.failures: dict[int, Failure] = {}
        """Failure of each robot since its last reset."""
        self.error: Failure | None = None
        """Error of a call, after which the simulator is not used until a reset."""
        self._shapes: tuple[Any, ...] | None = None

    def task(self, start_state: int) -> str:
        """Return the task of a start state; empty if the simulator raises."""
        no_robots = np.empty(0, np.int64)
        return str(self._call("reset", no_robots, lambda simulator: simulator.task(start_state)) or "")

    def prepare(self) -> None:
        """Build the simulator again if it was freed or has failed."""
        if self._rebuild is not None and (self.error is not None or self._simulator is None):
            self.close()
            self.error = None
            self._simulator = self._guarded("start", np.empty(0, np.int64), self._rebuild)
        elif self._simulator is not None:
            self.error = None

    def reset(self, robots: np.ndarray, start_states: np.ndarray) -> None:
        """Put robots into start states, and forget their failures."""
        self.prepare()
        for robot in robots.tolist():
            self.failures.pop(robot, None)
        self.fail(robots)
        self._call("reset", robots, lambda simulator: simulator.reset(robots, start_states))

    def fail(self, robots: np.ndarray) -> None:
        """Record the failure of robots if the simulator has failed."""
        if self.error is not None:
            for robot in robots.tolist():
                self.failures.setdefault(robot, self.error)

    def have_failed(self, robots: np.ndarray) -> np.ndarray:
        """Return which robots have failed since their last reset, bool [n]."""
        return np.array([robot in self.failures for robot in robots.tolist()], bool)

    def step(self, robots: np.ndarray, actions: np.ndarray) -> SimulatorStep:
        """Move robots by one action each. The rows of robots that fail are 0."""
        step = self._call("step", robots, lambda simulator: _checked_step(simulator.step(robots, actions), len(robots)))
        if step is None:
            none = np.zeros(len(robots), bool)
            return SimulatorStep(np.zeros(len(robots), np.float32), none, none)
        self.failures.update({int(robot): failure for robot, failure in step.failures.items()})
        for robot in robots[~np.isfinite(step.rewards)]:
            self.failures.setdefault(int(robot), Failure("step", INVALID_OUTPUT, "the reward is not finite"))
        is_valid = ~self.have_failed(robots)
        failed = np.zeros(len(robots), bool) if step.failed is None else step.failed
        return SimulatorStep(np.where(is_valid, step.rewards, 0.0), step.success & is_valid, failed & is_valid)

    def observe(self, robots: np.ndarray) -> RobotObservation | None:
        """Return the observations of robots; None if the simulator has failed."""
        checked = lambda simulator: self._checked(simulator.observe(robots), len(robots))  # noqa: E731
        observation = self._call("observe", robots, checked)
        if observation is not None:
            for robot in robots[~np.isfinite(observation.state).all(1)]:
                failure = Failure("observe", INVALID_OUTPUT, "the state has values that are not finite")
                self.failures.setdefault(int(robot), failure)
        return observation

    def render(self, robots: np.ndarray) -> np.ndarray | None:
        """Return a picture of each robot, uint8 [n, height, width, 3]; None if the simulator has failed."""
        return self._call("render", robots, lambda simulator: _checked_images(simulator.render(robots), len(robots), 4))

    def offload(self) -> None:
        """Free the simulator until the next reset, if it can be built again."""
        if self._rebuild is not None:
            self.close()

    def close(self) -> None:
        """Free the simulator."""
        simulator, self._simulator = self._simulator, None
        if simulator is not None:
            with suppress(Exception):  # its episodes are over
                simulator.close()

    def _call(self, where: str, robots: np.ndarray, call: Callable[[Simulator], T]) -> T | None:
        """Return the result of a call for robots, or None if the simulator fails or has failed."""
        simulator = self._simulator
        if self.error is not None or simulator is None:
            return None
        return self._guarded(where, robots, lambda: call(simulator))

    def _guarded(self, where: str, robots: np.ndarray, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of a simulator is recorded as data
            self.error = failure_from_error(where, error)
            self.fail(robots)
            return None

    def _checked(self, value: Any, num_robots: int) -> RobotObservation:
        """
        Raises:
            InvalidEnvOutputError: it is no observation of this number of robots, or has other shapes than the first.
        """
        if not isinstance(value, RobotObservation):
            raise InvalidEnvOutputError(f"observe() returned {type(value).__name__}, not a RobotObservation")
        state = _checked_array(value.state, "the state", np.floating, (num_robots, None)).astype(np.float32, copy=False)
        images = _checked_images(value.images, num_robots, 5)
        instructions = tuple(value.instructions)
        if len(instructions) != num_robots or not all(isinstance(text, str) for text in instructions):
            raise InvalidEnvOutputError(f"the instructions of observe() are not {num_robots} texts")
        shapes = (images.shape[1:], state.shape[1:])
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            raise InvalidEnvOutputError(f"images and state have the shapes {shapes}, before {self._shapes}")
        return RobotObservation(images, state, instructions)


def _checked_step(value: Any, num_robots: int) -> SimulatorStep:
    """
    Raises:
        InvalidEnvOutputError: it is no step of this number of robots.
    """
    if not isinstance(value, SimulatorStep):
        raise InvalidEnvOutputError(f"step() returned {type(value).__name__}, not a SimulatorStep")
    rewards = _checked_array(value.rewards, "the rewards", np.number, (num_robots,)).astype(np.float32, copy=False)
    success = _checked_array(value.success, "`success`", np.bool_, (num_robots,))
    failed = None if value.failed is None else _checked_array(value.failed, "`failed`", np.bool_, (num_robots,))
    return SimulatorStep(rewards, success, failed, value.failures)


def _checked_images(value: Any, num_robots: int, num_dimensions: int) -> np.ndarray:
    return _checked_array(value, "the images", np.uint8, (num_robots, *[None] * (num_dimensions - 2), 3))


def _checked_array(value: Any, name: str, kind: Any, shape: tuple[int | None, ...]) -> np.ndarray:
    """
    Raises:
        InvalidEnvOutputError: it is no array of this type and shape; None allows any size.
    """
    if not isinstance(value, np.ndarray) or not np.issubdtype(value.dtype, kind):
        actual = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise InvalidEnvOutputError(f"{name}: an array of {kind.__name__} is expected, not {actual}")
    sizes = zip(value.shape, shape, strict=False)
    if value.ndim != len(shape) or any(expected not in (None, size) for size, expected in sizes):
        expected_text = ", ".join("any" if size is None else str(size) for size in shape)
        raise InvalidEnvOutputError(f"{name} have the shape {value.shape}, not [{expected_text}]")
    return value
