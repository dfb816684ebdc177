"""State of the episodes of a batch of robots: rewards, ends and success, by the rules of RLinf's environments."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from quintet.config.native.envs import SimulatorConfig
from quintet.embodied_records import RobotEpisode, SimulatorStep
from quintet.records import Failure, Outcome


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
