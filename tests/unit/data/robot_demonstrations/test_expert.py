"""If these fail, demonstrations of a simulator's expert are unsolved, differ between machines, or never end."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from quintet.data.robot_demonstrations.expert import collect_expert_episodes
from quintet.embodied_records import RobotObservation, SimulatorStep
from quintet.errors import ConfigError
from quintet.records import Failure


class Line:
    """Robots on a line that are to reach 0 from their start state; those at start state 13 fail."""

    action_dim, num_start_states, control_frequency, tasks = 1, 100, 10.0, ("line",)
    speed = 1.0

    def __init__(self, num_robots: int) -> None:
        self.num_robots = num_robots
        self.positions = np.zeros(num_robots)
        self.broken = np.zeros(num_robots, dtype=bool)

    def task(self, start_state: int) -> str:
        return f"line {start_state}"

    def reset(self, robots: np.ndarray, start_states: np.ndarray) -> None:
        self.positions[robots] = start_states
        self.broken[robots] = start_states == 13

    def step(self, robots: np.ndarray, actions: np.ndarray) -> SimulatorStep:
        self.positions[robots] += actions[:, 0]
        failures: Mapping[int, Failure] = {
            int(robot): Failure("env", "crashed", "") for robot in robots if self.broken[robot]
        }
        success = (np.abs(self.positions[robots]) < 0.5) & ~self.broken[robots]
        return SimulatorStep(success.astype(np.float32), success, self.positions[robots] > 60, failures)

    def observe(self, robots: np.ndarray) -> RobotObservation:
        images = np.zeros((len(robots), 1, 2, 2, 3), np.uint8)
        images[:] = self.positions[robots].clip(0, 255).astype(np.uint8)[:, None, None, None, None]
        return RobotObservation(images, self.positions[robots, None].astype(np.float32), ("reach 0",) * len(robots))

    def render(self, robots: np.ndarray) -> np.ndarray:
        return self.observe(robots).images[:, 0]

    def close(self) -> None:
        pass

    def expert_actions(self, robots: np.ndarray) -> np.ndarray:
        return -np.clip(self.positions[robots, None], 0, self.speed).astype(np.float32)


def starts(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count) + 10


@pytest.mark.parametrize("epsilon", [0.0, 0.3])
def test_episodes_do_not_depend_on_the_number_of_robots(epsilon: float) -> None:
    collected = [
        list(collect_expert_episodes(Line(count), starts, 9, max_steps=40, epsilon=epsilon)) for count in (1, 4, 20)
    ]
    for episodes in collected[1:]:
        for one, other in zip(collected[0], episodes, strict=True):
            np.testing.assert_array_equal(one.actions, other.actions)
            np.testing.assert_array_equal(one.observations.state, other.observations.state)


def test_episodes_begin_with_the_start_state_and_contain_only_solved_ones() -> None:
    episodes = list(collect_expert_episodes(Line(4), starts, 5, max_steps=15))
    assert [episode.observations.state[0, 0] for episode in episodes] == [10, 11, 12, 14, 15]
    assert [len(episode.actions) for episode in episodes] == [10, 11, 12, 14, 15]
    assert episodes[0].observations.images[:, 0, 0, 0, 0].tolist() == list(range(10, 0, -1))


def test_random_actions_are_executed_but_not_demonstrated() -> None:
    (episode,) = collect_expert_episodes(Line(1), starts, 1, max_steps=100, epsilon=0.5)
    moves = np.diff(episode.observations.state[:, 0])
    assert (episode.actions <= 0).all()
    assert (moves > 0).any()


def test_a_task_that_is_hardly_ever_solved_ends_with_an_error() -> None:
    with pytest.raises(ConfigError, match="the expert solved 0 episodes in 40 tries of 5 actions"):
        list(collect_expert_episodes(Line(4), starts, 3, max_steps=5))


def test_a_simulator_without_expert_is_named() -> None:
    simulator = Line(1)
    simulator.expert_actions = None  # type: ignore[method-assign, assignment]
    with pytest.raises(ConfigError, match="the simulator has no expert"):
        list(collect_expert_episodes(simulator, starts, 1, max_steps=5))
