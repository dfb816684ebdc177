"""If these fail, the episodes of robots that people see have the pictures, actions or rewards of others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quintet.embodied_records import ChunkResult, RobotEpisode, RobotObservation
from quintet.records import Failure, Outcome
from quintet.runtime.embodied.recording import RobotTrajectories


def observation(values: Sequence[int]) -> RobotObservation:
    """One camera of one pixel, which has the value."""
    images = np.array(values, np.uint8)[:, None, None, None, None].repeat(3, axis=-1)
    return RobotObservation(images, np.zeros((len(values), 0), np.float32), tuple(f"task {value}" for value in values))


def episode(robot: int, outcome: Outcome = Outcome.SUCCESS) -> RobotEpisode:
    failure = Failure("step", "ProcessDied", "killed") if outcome is Outcome.FAILED else None
    succeeds = outcome is Outcome.SUCCESS
    return RobotEpisode(robot, 7, "reach", 3.0, 4, succeeds, succeeds, outcome, failure)


def result(
    after: Sequence[int],
    rewards: Sequence[float],
    *episodes: RobotEpisode,
    final: Sequence[int] | None = None,
) -> ChunkResult:
    flags = np.zeros((len(after), 2), bool)
    per_action = np.stack([np.array(rewards, np.float32), np.zeros(len(after), np.float32)], 1)
    final_observation = None if final is None else observation(final)
    return ChunkResult(observation(after), per_action, flags, flags, ~flags, final_observation, episodes)


def pixel(images: Sequence[np.ndarray]) -> int:
    (image,) = images
    return int(image[0, 0, 0])


def actions(*values: float) -> np.ndarray:
    """Chunks of two actions of one dimension, the second of which is negative."""
    return np.array([[[value], [-value]] for value in values], np.float32)


def test_turns_are_the_chunks_of_the_first_episode_of_the_chosen_robots() -> None:
    recorded = RobotTrajectories(range(2))
    recorded.record_actions([0, 1, 2], observation([10, 20, 30]), actions(0.1, 0.2, 0.3))
    recorded.record_result([0, 1, 2], result([11, 21, 31], [1.0, 2.0, 3.0], episode(1), episode(2)))
    # robot 1 waits for the end of the pass
    recorded.record_actions([0, 2], observation([11, 31]), actions(0.4, 0.5))
    recorded.record_result([0, 1, 2], result([12, 21, 32], [0.5, 9.0, 9.0], episode(0, Outcome.TERMINATED)))
    first, second = recorded.trajectories("arm")
    assert [(turn.reward, pixel(turn.images), pixel(turn.images_after)) for turn in first.turns] == [
        (1.0, 10, 11),
        (0.5, 11, 12),
    ]
    assert [turn.actions for turn in first.turns] == [([0.1], [-0.1]), ([0.4], [-0.4])]
    assert first.turns[0].text == "+0.100\n-0.100"
    assert [turn.observation for turn in first.turns] == ["task 10", "task 11"]
    assert (first.env, first.seed, first.env_type, first.outcome) == ("arm", 7, "reach", Outcome.TERMINATED)
    assert [(turn.reward, pixel(turn.images_after)) for turn in second.turns] == [(2.0, 21)]


def test_with_automatic_resets_the_last_picture_is_of_the_episode_and_the_next_one_is_not_recorded() -> None:
    recorded = RobotTrajectories([0])
    recorded.record_actions([0], observation([10]), actions(0.1))
    recorded.record_result([0], result([50], [1.0], episode(0), final=[11]))
    recorded.record_actions([0], observation([50]), actions(0.2))
    recorded.record_result([0], result([51], [5.0], episode(0), final=[52]))
    (trajectory,) = recorded.trajectories("arm")
    assert [(turn.reward, pixel(turn.images_after)) for turn in trajectory.turns] == [(1.0, 11)]


def test_a_failed_episode_has_its_failure_and_one_that_has_not_ended_is_left_out() -> None:
    recorded = RobotTrajectories(range(2))
    recorded.record_actions([0, 1], observation([10, 20]), actions(0.1, 0.2))
    recorded.record_result([0, 1], result([10, 21], [0.0, 1.0], episode(0, Outcome.FAILED)))
    (trajectory,) = recorded.trajectories("arm")
    assert trajectory.failure is not None
    assert trajectory.failure.error_type == "ProcessDied"


def test_robots_are_named_by_their_group_and_their_place_in_it() -> None:
    recorded = RobotTrajectories(range(4), group_size=2)
    for columns in ([2, 3], [0, 1]):  # stages
        recorded.record_actions(columns, observation([10, 20]), actions(0.1, 0.2))
        recorded.record_result(columns, result([11, 21], [0.0, 0.0], episode(0), episode(1)))
    assert [(trajectory.group, trajectory.sample) for trajectory in recorded.trajectories("arm")] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
