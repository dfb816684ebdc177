"""If these fail, rewards, ends of episodes or success of robots differ from what the configuration says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scripted_simulator import REFERENCE, ScriptedSimulator

from quintet.config.native.envs import SimulatorConfig
from quintet.embodied_records import ChunkResult
from quintet.envs.simulators.vector_env import RobotVectorEnv
from quintet.errors import MachineError
from quintet.records import Outcome


def build(num_robots: int, *, rebuild: bool = False, **values: Any) -> tuple[RobotVectorEnv, ScriptedSimulator]:
    config = SimulatorConfig(simulator=REFERENCE, **({"max_steps": 6} | values))
    simulator = ScriptedSimulator(config, num_robots, 0)
    replacement = (lambda: ScriptedSimulator(config, num_robots, 0)) if rebuild else None
    return RobotVectorEnv(simulator, config, replacement), simulator


def chunk(num_robots: int, num_actions: int, value: float = 0.5) -> np.ndarray:
    return np.full((num_robots, num_actions, 2), value, np.float32)


def states(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def marked(array: np.ndarray) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in array]


SOLVED_AT_2 = {"success": {1: [2]}}


def test_an_episode_ends_with_the_action_that_solves_the_task_and_the_robot_stops() -> None:
    env, simulator = build(2, options=SOLVED_AT_2)
    env.reset(states(1, 2))
    first, second = env.step_chunk(chunk(2, 4)), env.step_chunk(chunk(2, 4))
    assert marked(first.terminated) == [[1], []]
    assert marked(first.executed) == [[0, 1], [0, 1, 2, 3]]
    assert first.rewards.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert simulator.num_actions.tolist() == [2, 6]
    assert marked(second.truncated) == [[], [1]]
    assert marked(second.executed) == [[], [0, 1]]
    assert first.final_observation is None
    assert second.final_observation is None
    assert first.observation.state.tolist() == [[1, 2, 2.0], [2, 4, 4.0]]
    assert second.observation.state.tolist() == [[1, 2, 2.0], [2, 6, 6.0]]


def test_the_records_of_episodes_say_how_they_ended() -> None:
    env, _ = build(3, options={"success": {1: [2]}, "failed": {4: [3]}}, reward_coefficient=5.0)
    env.reset(states(1, 4, 6))
    episodes = (*env.step_chunk(chunk(3, 4)).episodes, *env.step_chunk(chunk(3, 4)).episodes)
    solved, failed, truncated = episodes
    assert (solved.robot, solved.start_state, solved.task, solved.outcome) == (0, 1, "push", Outcome.SUCCESS)
    assert (solved.episode_return, solved.num_actions, solved.success_once, solved.success_at_end) == (5, 2, True, True)
    assert (failed.robot, failed.task, failed.outcome, failed.num_actions) == (1, "reach", Outcome.TERMINATED, 3)
    assert (truncated.robot, truncated.outcome, truncated.num_actions) == (2, Outcome.TRUNCATED, 6)
    assert not truncated.success_once
    assert env.step_chunk(chunk(3, 4)).episodes == ()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [0, 1, 1, 0, 0, 1]),
        ({"reward_coefficient": 5.0}, [0, 5, 5, 0, 0, 5]),
        ({"relative_reward": True, "reward_coefficient": 5.0}, [0, 5, 0, -5, 0, 5]),
        ({"step_penalty": 1.0, "reward_coefficient": 5.0}, [-1, 4, 4, -1, -1, 4]),
        ({"step_penalty": 1.0, "reward_coefficient": 5.0, "relative_reward": True}, [-1, 5, 0, -5, 0, 5]),
    ],
)
def test_rewards_have_the_coefficient_the_penalty_and_the_difference(values: Any, expected: list[float]) -> None:
    env, _ = build(1, options={"success": {1: [2, 3, 6]}}, ignore_terminations=True, **values)
    env.reset(states(1))
    rewards = np.concatenate([env.step_chunk(chunk(1, 3)).rewards for _ in range(2)], 1)
    assert rewards.tolist() == [expected]


def test_an_episode_continues_after_success_if_terminations_are_ignored() -> None:
    env, _ = build(2, options={"success": {1: [2], 2: [6]}}, ignore_terminations=True)
    env.reset(states(1, 2))
    first, second = env.step_chunk(chunk(2, 3)), env.step_chunk(chunk(2, 3))
    assert not first.terminated.any()
    assert not second.terminated.any()
    assert marked(second.truncated) == [[2], [2]]
    assert [(episode.success_once, episode.success_at_end) for episode in second.episodes] == [
        (True, False),
        (True, True),
    ]
    assert {episode.num_actions for episode in second.episodes} == {6}


def test_an_automatic_reset_is_at_the_end_of_the_chunk_with_the_final_observation() -> None:
    env, simulator = build(2, options=SOLVED_AT_2, auto_reset=True, relative_reward=True)
    env.reset(np.array([[1, 3], [2, 5]]))
    result = env.step_chunk(chunk(2, 4))
    assert marked(result.terminated) == [[3], []]
    assert marked(result.executed) == [[0, 1], [0, 1, 2, 3]]
    assert result.final_observation is not None
    assert result.final_observation.state.tolist() == [[1, 2, 2.0], [2, 4, 4.0]]
    assert result.observation.state.tolist() == [[3, 0, 0.0], [2, 4, 4.0]]
    assert result.observation.instructions == ("push 3", "reach 2")
    assert result.observation.images[0].max() == 60
    assert result.final_observation.images[0].max() == 22
    second = env.step_chunk(chunk(2, 4))
    assert marked(second.truncated) == [[], [3]]
    assert simulator.num_actions.tolist() == [4, 0]
    third = env.step_chunk(chunk(2, 4))
    assert [(episode.start_state, episode.outcome) for episode in third.episodes] == [(3, Outcome.TRUNCATED)]
    assert third.observation.state[0].tolist() == [3, 0, 0.0]  # the last start state repeats


def test_a_step_limit_inside_a_chunk_is_moved_to_its_end_with_automatic_resets() -> None:
    env, _ = build(1, auto_reset=True, max_steps=2)
    env.reset(states(1))
    result = env.step_chunk(chunk(1, 3))
    assert marked(result.truncated) == [[2]]
    assert result.episodes[0].num_actions == 2


def test_images_are_rendered_once_per_chunk_and_not_for_robots_that_stand() -> None:
    env, simulator = build(2, options=SOLVED_AT_2)
    env.reset(states(1, 2))
    simulator.calls.clear()
    env.step_chunk(chunk(2, 3))
    env.step_chunk(chunk(2, 3))
    observed = [robots for name, robots in simulator.calls if name == "observe"]
    assert observed == [(0, 1), (1,)]
    simulator.calls.clear()
    env.step_chunk(chunk(2, 3))
    assert simulator.calls == []


def test_a_video_has_a_picture_of_every_action() -> None:
    env, _ = build(2, options=SOLVED_AT_2)
    env.record_frames = True
    env.reset(states(1, 2))
    frames = env.step_chunk(chunk(2, 4)).frames
    assert frames is not None
    assert frames.shape == (2, 4, 4, 4, 3)
    assert frames[:, :, 0, 0, 0].tolist() == [[21, 22, 22, 22], [41, 42, 43, 44]]


def test_results_of_a_robot_do_not_depend_on_the_others() -> None:
    generator = np.random.default_rng(0)
    options = {"success": {1: [5], 3: [2], 7: [4, 9]}, "failed": {5: [3]}}
    starts = generator.integers(0, 12, (6, 4))
    actions = generator.normal(size=(5, 6, 3, 2)).astype(np.float32)
    for auto_reset in (False, True):
        together, _ = build(6, options=options, auto_reset=auto_reset, relative_reward=True)
        together.reset(starts)
        expected = [together.step_chunk(action) for action in actions]
        for robot in range(6):
            alone, _ = build(1, options=options, auto_reset=auto_reset, relative_reward=True)
            alone.reset(starts[robot : robot + 1])
            for index, result in enumerate(expected):
                _assert_same_row(alone.step_chunk(actions[index, robot : robot + 1]), result, robot)


def _assert_same_row(alone: ChunkResult, result: ChunkResult, robot: int) -> None:
    for name in ("rewards", "terminated", "truncated", "executed"):
        np.testing.assert_array_equal(getattr(alone, name)[0], getattr(result, name)[robot])
    np.testing.assert_array_equal(alone.observation.state[0], result.observation.state[robot])
    np.testing.assert_array_equal(alone.observation.images[0], result.observation.images[robot])
    expected = [
        (episode.episode_return, episode.start_state, episode.outcome)
        for episode in result.episodes
        if episode.robot == robot
    ]
    assert [(episode.episode_return, episode.start_state, episode.outcome) for episode in alone.episodes] == expected


class RLinfRules:
    """Rules of RLinf 0.2's environments for one robot: LIBERO's rewards, and dones of a chunk.

    They move a robot to the end of a chunk even if its episode has ended. The tests compare them where this makes no
    difference: a solved task remains solved, and rewards are relative.
    """

    def __init__(self, config: SimulatorConfig) -> None:
        self.config = config
        self.elapsed, self.previous, self.total, self.success_once = 0, 0.0, 0.0, False

    def step_chunk(self, success: list[bool]) -> tuple[list[float], list[bool], list[bool]]:
        config = self.config
        rewards, terminations, truncations = [], [], []
        for solved in success:
            self.elapsed += 1
            reward = config.reward_coefficient * solved - config.step_penalty
            rewards.append(reward - self.previous if config.relative_reward else reward)
            self.previous = reward
            self.success_once |= solved
            self.total += rewards[-1]
            terminations.append(solved and not config.ignore_terminations)
            truncations.append(self.elapsed >= config.max_steps)
        if config.auto_reset or config.ignore_terminations:
            last = [False] * (len(success) - 1)
            return rewards, [*last, any(terminations)], [*last, any(truncations)]
        return rewards, terminations, truncations


@pytest.mark.parametrize("auto_reset", [False, True])
@pytest.mark.parametrize("ignore_terminations", [False, True])
@pytest.mark.parametrize("solved_at", [1, 2, 3, 4, 6, 7])
def test_rewards_and_dones_are_those_of_rlinf_up_to_the_end_of_the_episode(
    auto_reset: bool, ignore_terminations: bool, solved_at: int
) -> None:
    table = list(range(solved_at, 7))
    env, _ = build(
        1,
        options={"success": {1: table}},
        auto_reset=auto_reset,
        ignore_terminations=ignore_terminations,
        relative_reward=True,
        reward_coefficient=5.0,
    )
    env.reset(states(1))
    rules = RLinfRules(env._config)
    for first in (1, 4):
        result = env.step_chunk(chunk(1, 3))
        rewards, terminations, truncations = rules.step_chunk([action in table for action in range(first, first + 3)])
        assert result.rewards[0].tolist() == rewards
        done = np.flatnonzero(np.array(terminations) | np.array(truncations))
        ours = np.flatnonzero(result.terminated[0] | result.truncated[0])
        assert ours[:1].tolist() == done[:1].tolist()
        if done.size:
            episode_ends_at = 6 if ignore_terminations else min(solved_at, 6)
            assert result.terminated[0, ours[0]] == terminations[done[0]]
            # RLinf counts on after a success and would also mark it as truncated if the limit is in this chunk
            assert result.truncated[0, ours[0]] == (truncations[done[0]] and episode_ends_at == 6)
            (episode,) = result.episodes
            assert (episode.episode_return, episode.success_once) == (rules.total, rules.success_once)
            break


def test_an_error_of_the_simulator_costs_the_running_episodes_and_it_is_built_again(tmp_path: Any) -> None:
    options = {"success": {1: [1]}, "fault": "raise", "at": 2, "of": 2, "once": str(tmp_path / "done")}
    env, broken = build(3, options=options, rebuild=True)
    env.reset(states(1, 2, 3))
    result = env.step_chunk(chunk(3, 4))
    assert [(episode.robot, episode.outcome) for episode in result.episodes] == [
        (0, Outcome.SUCCESS),
        (1, Outcome.FAILED),
        (2, Outcome.FAILED),
    ]
    failure = result.episodes[1].failure
    assert failure is not None
    assert (failure.where, failure.error_type) == ("step", "RuntimeError")
    assert marked(result.executed) == [[0], [0], [0]]
    assert np.isfinite(result.observation.state).all()
    assert env.step_chunk(chunk(3, 4)).episodes == ()
    assert env.reset(states(1, 2, 3)).state[:, 1].tolist() == [0, 0, 0]
    assert broken.calls[-1] == ("close", ())
    assert marked(env.step_chunk(chunk(3, 4)).executed) == [[0], [0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(("fault", "at", "executed"), [("nan_reward", 2, [0]), ("nan", 3, [0, 1, 2])])
def test_values_that_are_not_finite_cost_the_episode_of_their_robot(fault: str, at: int, executed: list[int]) -> None:
    env, _ = build(2, options={"fault": fault, "at": at, "of": 2})
    env.reset(states(1, 2))
    result = env.step_chunk(chunk(2, 3))
    (episode,) = result.episodes
    assert (episode.robot, episode.outcome) == (1, Outcome.FAILED)
    assert episode.failure is not None
    assert episode.failure.error_type == "InvalidOutput"
    assert marked(result.executed) == [[0, 1, 2], executed]
    assert np.isfinite(result.rewards).all()
    assert np.isfinite(result.observation.state).all()
    assert marked(env.step_chunk(chunk(2, 3)).executed) == [[0, 1, 2], []]


def test_images_of_another_shape_are_a_failure() -> None:
    env, _ = build(2, options={"fault": "shape", "at": 3, "of": 2}, rebuild=True)
    first = env.reset(states(1, 2))
    result = env.step_chunk(chunk(2, 3))
    assert {episode.outcome for episode in result.episodes} == {Outcome.FAILED}
    assert "shape" in str(result.episodes[0].failure)
    assert result.observation.images.shape == first.images.shape


def test_a_robot_that_fails_in_an_automatic_reset_is_reported_with_the_next_chunk() -> None:
    options = {"success": {1: [1], 3: [2]}, "fault": "nan", "at": 0, "of": 2}
    env, _ = build(2, options=options, auto_reset=True)
    env.reset(np.array([[1, 2], [3, 3]]))
    assert [episode.outcome for episode in env.step_chunk(chunk(2, 2)).episodes] == [Outcome.SUCCESS, Outcome.SUCCESS]
    second = env.step_chunk(chunk(2, 2))
    assert [(episode.robot, episode.outcome) for episode in second.episodes] == [
        (0, Outcome.FAILED),
        (1, Outcome.SUCCESS),
    ]
    assert marked(second.executed) == [[], [0, 1]]


def test_a_simulator_that_never_works_is_an_error_of_the_user() -> None:
    env, _ = build(1, options={"fault": "raise", "at": 0, "of": 2})
    with pytest.raises(MachineError, match=r"simulator is broken \(scripted_simulator.py:\d+\) \(reset, Runtime"):
        env.reset(states(2))


def test_an_offloaded_simulator_is_built_again_at_the_next_reset() -> None:
    env, simulator = build(2, rebuild=True)
    before = env.reset(states(1, 2))
    env.offload()
    assert simulator.calls[-1] == ("close", ())
    after = env.reset(states(1, 2))
    np.testing.assert_array_equal(after.images, before.images)
    assert env.step_chunk(chunk(2, 2)).executed.all()


def test_actions_of_another_shape_are_refused() -> None:
    env, _ = build(2)
    env.reset(states(1, 2))
    with pytest.raises(ValueError, match=r"not \[2, C, 2\]"):
        env.step_chunk(np.zeros((2, 3, 7), np.float32))
