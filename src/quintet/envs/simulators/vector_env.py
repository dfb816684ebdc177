"""Episodes of robots in a simulator, moved by chunks of actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from quintet.config.native.envs import SimulatorConfig
from quintet.embodied_records import ChunkResult, RobotEpisode, RobotObservation, SimulatorStep
from quintet.envs.simulators.checked_simulator import CheckedSimulator
from quintet.envs.simulators.registry import build_simulator
from quintet.envs.simulators.simulator import Simulator
from quintet.errors import MachineError
from quintet.records import Failure, Outcome


@dataclass(frozen=True, slots=True)
class _ChunkArrays:
    """Results of the actions of a chunk, [B, C]."""

    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    executed: np.ndarray

    @classmethod
    def zeros(cls, num_robots: int, num_actions: int) -> _ChunkArrays:
        shape = (num_robots, num_actions)
        return cls(np.zeros(shape, np.float32), np.zeros(shape, bool), np.zeros(shape, bool), np.zeros(shape, bool))

    @property
    def ended(self) -> np.ndarray:
        """Robots whose episode ended without a failure, bool [B]."""
        ended: np.ndarray = (self.terminated | self.truncated).any(1)
        return ended

    def with_dones_at_end(self) -> _ChunkArrays:
        """Return the arrays with all dones at the last action."""
        terminated, truncated = np.zeros_like(self.terminated), np.zeros_like(self.truncated)
        terminated[:, -1], truncated[:, -1] = self.terminated.any(1), self.truncated.any(1)
        return replace(self, terminated=terminated, truncated=truncated)


class RobotVectorEnv:
    """Episodes of B robots: step limits, automatic resets, rewards and dones of chunks.

    As in RLinf, a robot is only reset at the end of a chunk, and with `auto_reset` or `ignore_terminations` the done of
    a chunk is at its last action. Unlike there, a robot does not move after the end of its episode, not even to the end
    of the chunk, so that these actions give no rewards and do not count for `max_steps`. Images are rendered once per
    chunk. A failure of the simulator ends the episodes of its robots, which wait for the next `reset`.
    """

    def __init__(
        self, simulator: Simulator, config: SimulatorConfig, rebuild: Callable[[], Simulator] | None = None
    ) -> None:
        """`rebuild` replaces the simulator after an error; None keeps it."""
        self.simulator = CheckedSimulator(simulator, rebuild)
        self.num_robots = simulator.num_robots
        self.record_frames = False
        """Render a picture after each action, for videos."""
        self._config = config
        self._episodes = RobotEpisodes(self.num_robots, config)
        self._observation: RobotObservation | None = None
        self._frame: np.ndarray | None = None
        self._tasks: dict[int, str] = {}
        self._unreported: set[int] = set()
        """Robots whose failed episode is not in a result yet."""

    def reset(self, start_states: np.ndarray) -> RobotObservation:
        """Start an episode of each robot from `start_states`, int64 [B] or [B, K]; the automatic resets of a robot use
        the next column, and the last one repeatedly.

        Raises:
            MachineError: the simulator fails for all robots and has never worked.
        """
        states = start_states.reshape(self.num_robots, -1)
        self.simulator.prepare()
        self._tasks = {state: self.simulator.task(state) for state in np.unique(states).tolist()}
        self._episodes.set_start_states(states)
        self._frame = None
        return self._start(np.arange(self.num_robots))

    def tasks(self, start_states: np.ndarray) -> list[str]:
        """Return the tasks of start states of the last reset."""
        return [self._tasks[state] for state in start_states.tolist()]

    def step_chunk(self, actions: np.ndarray) -> ChunkResult:
        """Move the robots by `actions`, float32 [B, C, D].

        Raises:
            ValueError: `actions` has another shape.
        """
        if actions.ndim != 3 or actions.shape[::2] != (self.num_robots, self.simulator.action_dim):
            expected = f"[{self.num_robots}, C, {self.simulator.action_dim}]"
            raise ValueError(f"actions of the shape {actions.shape}, not {expected}")
        moved = np.flatnonzero(self._episodes.running)
        chunk = _ChunkArrays.zeros(*actions.shape[:2])
        frames = []
        for index in range(actions.shape[1]):
            robots = np.flatnonzero(self._episodes.running)
            if robots.size:
                self._move(robots, actions[robots, index], chunk, index)
            if self.record_frames and (frame := self._render(robots)) is not None:
                frames.append(frame)
        is_recorded = len(frames) == actions.shape[1]
        return self._result(moved, chunk, np.stack(frames, 1) if is_recorded else None)

    def offload(self) -> None:
        """Free the simulator until the next reset; running episodes end without a record."""
        self._episodes.running[:] = False
        self.simulator.offload()

    def close(self) -> None:
        """Free the simulator."""
        self.simulator.close()

    def _move(self, robots: np.ndarray, actions: np.ndarray, chunk: _ChunkArrays, index: int) -> None:
        step = self.simulator.step(robots, actions)
        is_valid = self._stop_failed(robots)
        robots, step = robots[is_valid], _select(step, is_valid)
        rewards, terminated, truncated = self._episodes.record(robots, step)
        chunk.rewards[robots, index] = rewards
        chunk.terminated[robots, index], chunk.truncated[robots, index] = terminated, truncated
        chunk.executed[robots, index] = True

    def _stop_failed(self, robots: np.ndarray) -> np.ndarray:
        """End the episodes of running robots and of `robots`, [n], if they have failed; return which of `robots` have
        not, bool [n]."""
        running = np.flatnonzero(self._episodes.running)
        # after an error of the simulator nothing is known of the other robots
        self.simulator.fail(running)
        candidates = np.union1d(running, robots)
        failed = candidates[self.simulator.have_failed(candidates)]
        self._unreported.update(failed.tolist())
        self._episodes.running[failed] = False
        return ~self.simulator.have_failed(robots)

    def _result(self, moved: np.ndarray, chunk: _ChunkArrays, frames: np.ndarray | None) -> ChunkResult:
        observation, final_observation = self._observe(moved), None
        self._stop_failed(moved)
        ended = np.flatnonzero(chunk.ended | np.isin(np.arange(self.num_robots), list(self._unreported)))
        failures = {robot: self.simulator.failures[robot] for robot in self._unreported}
        self._unreported = set()
        episodes = tuple(self._finished(ended[row : row + 1], failures) for row in range(len(ended)))
        if self._config.auto_reset and (restarted := ended[~np.isin(ended, list(failures))]).size:
            final_observation, observation = observation, self._start(restarted)
        if self._config.auto_reset or self._config.ignore_terminations:
            chunk = chunk.with_dones_at_end()
        return ChunkResult(
            observation,
            chunk.rewards,
            chunk.terminated,
            chunk.truncated,
            chunk.executed,
            final_observation,
            episodes,
            frames,
        )

    def _finished(self, robot: np.ndarray, failures: dict[int, Failure]) -> RobotEpisode:
        return self._episodes.finished(robot, self._tasks, failures)

    def _start(self, robots: np.ndarray) -> RobotObservation:
        """Start the next episode of robots, and return the observations of all."""
        self._unreported.difference_update(robots.tolist())
        self.simulator.reset(robots, self._episodes.start(robots))
        observation = self._observe(robots)
        self._stop_failed(robots)
        return observation

    def _observe(self, robots: np.ndarray) -> RobotObservation:
        """Return the observations of all robots; `robots` are rendered anew.

        Raises:
            MachineError: the simulator fails, and there is no earlier observation.
        """
        rows = robots[~self.simulator.have_failed(robots)]
        changed = self.simulator.observe(rows) if rows.size else None
        if changed is not None:
            is_valid = ~self.simulator.have_failed(rows)
            self._observation = _with_rows(self._observation, self.num_robots, rows, changed, is_valid)
        if self._observation is None:
            failure = next(iter(self.simulator.failures.values()))
            message = f"the simulator {self._config.simulator} does not start: {failure.message}"
            raise MachineError(f"{message} ({failure.where}, {failure.error_type})")
        return self._observation

    def _render(self, moved: np.ndarray) -> np.ndarray | None:
        """Return a picture of all robots, of which `moved` are rendered anew; None if the simulator has failed."""
        robots = np.arange(self.num_robots) if self._frame is None else moved
        rows = robots[~self.simulator.have_failed(robots)]
        frame = self.simulator.render(rows) if rows.size else None
        if frame is not None:
            previous = np.zeros((self.num_robots, *frame.shape[1:]), np.uint8) if self._frame is None else self._frame
            self._frame = previous.copy()
            self._frame[rows] = frame
        return self._frame


def _select(step: SimulatorStep, rows: np.ndarray) -> SimulatorStep:
    """Return the rows of a step, bool [n]."""
    failed = None if step.failed is None else step.failed[rows]
    return SimulatorStep(step.rewards[rows], step.success[rows], failed)


def _with_rows(
    previous: RobotObservation | None, num_robots: int, rows: np.ndarray, changed: RobotObservation, valid: np.ndarray
) -> RobotObservation:
    """Return an observation of all robots with new rows where they are valid, bool [n]; rows that never were are 0."""
    if len(rows) == num_robots and valid.all():
        return changed
    if previous is None:
        images, state = (
            np.zeros((num_robots, *array.shape[1:]), array.dtype) for array in (changed.images, changed.state)
        )
        instructions = [""] * num_robots
    else:
        images = previous.images.copy()
        state = previous.state.copy()
        instructions = list(previous.instructions)
    images[rows[valid]], state[rows[valid]] = changed.images[valid], changed.state[valid]
    for row in np.flatnonzero(valid).tolist():
        instructions[rows[row]] = changed.instructions[row]
    return RobotObservation(images, state, tuple(instructions))


def build_vector_env(config: SimulatorConfig, num_robots: int) -> RobotVectorEnv:
    """Return robots whose simulator is built again after an error; raises as `build_simulator` does."""
    build = partial(build_simulator, config, num_robots, config.seed)
    return RobotVectorEnv(build(), config, build)


class RobotEpisodes:
    """The current episode of each of B robots."""

    def __init__(self, num_robots: int, config: SimulatorConfig) -> None:
        self._config = config
        self.running = np.zeros(num_robots, bool)
        """Robots whose episode has begun and not ended."""
        self.num_actions = np.zeros(num_robots, np.int64)
        self._start_states = np.zeros((num_robots, 1), np.int64)
        self._num_resets = np.zeros(num_robots, np.int64)
        self._returns = np.zeros(num_robots)
        self._previous_rewards = np.zeros(num_robots)
        self._success_once = np.zeros(num_robots, bool)
        self._success_now = np.zeros(num_robots, bool)
        self._failed_once = np.zeros(num_robots, bool)

    def set_start_states(self, start_states: np.ndarray) -> None:
        """Set the start states of each robot's successive episodes, int64 [B, K]; the last one repeats."""
        self._start_states = start_states
        self._num_resets[:] = -1

    def start(self, robots: np.ndarray) -> np.ndarray:
        """Start the next episode of robots, [n]; return the start states, int64 [n]."""
        self._num_resets[robots] += 1
        self.running[robots] = True
        for array in (self.num_actions, self._returns, self._previous_rewards):
            array[robots] = 0
        for array in (self._success_once, self._success_now, self._failed_once):
            array[robots] = False
        return self._current_start_states(robots)

    def record(self, robots: np.ndarray, step: SimulatorStep) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Record one action of robots, [n]; return its rewards, and whether it terminated or truncated the episodes."""
        config = self._config
        failed = np.zeros(len(robots), bool) if step.failed is None else step.failed
        self.num_actions[robots] += 1
        rewards = config.reward_coefficient * step.rewards.astype(np.float64) - config.step_penalty
        if config.relative_reward:
            rewards, self._previous_rewards[robots] = rewards - self._previous_rewards[robots], rewards
        self._returns[robots] += rewards
        self._success_now[robots] = step.success
        self._success_once[robots] |= step.success
        self._failed_once[robots] |= failed
        truncated = self.num_actions[robots] >= config.max_steps
        terminated = (step.success | failed) & (not config.ignore_terminations)
        self.running[robots] = ~(terminated | truncated)
        return rewards, terminated, truncated

    def finished(self, robots: np.ndarray, tasks: Mapping[int, str], failures: Mapping[int, Failure]) -> RobotEpisode:
        """Return the record of a finished episode of one robot, [1]; `tasks` by start state."""
        (robot,) = robots.tolist()
        (start_state,) = self._current_start_states(robots).tolist()
        failure = failures.get(robot)
        return RobotEpisode(
            robot,
            start_state,
            tasks[start_state],
            float(self._returns[robot]),
            int(self.num_actions[robot]),
            bool(self._success_once[robot]),
            bool(self._success_now[robot]),
            self._outcome(robot) if failure is None else Outcome.FAILED,
            failure,
        )

    def _outcome(self, robot: int) -> Outcome:
        if self._success_once[robot]:
            return Outcome.SUCCESS
        return Outcome.TERMINATED if self._failed_once[robot] else Outcome.TRUNCATED

    def _current_start_states(self, robots: np.ndarray) -> np.ndarray:
        columns = np.minimum(self._num_resets[robots], self._start_states.shape[1] - 1)
        states: np.ndarray = self._start_states[robots, columns]
        return states
