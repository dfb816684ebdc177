"""If these fail, a robot's chunk steps are trained on with the wrong rewards, masks, values or random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from quintet.embodied_records import (
    ActionSample,
    ActionSampling,
    ChunkBatch,
    ChunkResult,
    RobotEpisode,
    RobotObservation,
)
from quintet.records import Failure, Outcome
from quintet.rollout.chunk_rollout import ChunkRollout, RolloutLength

CHUNK = 2


class CountingPolicy:
    """Policy whose action is the uniform number, and whose value is the robot's state."""

    action_chunk, action_dim, robot_action_dim, value_size = CHUNK, 1, 1, 1

    def __init__(self) -> None:
        self.batches: list[list[float]] = []

    def prepare(self, observation: RobotObservation) -> dict[str, torch.Tensor]:
        return {"state": torch.from_numpy(observation.state)}

    def sample(
        self, inputs: Mapping[str, torch.Tensor], uniforms: torch.Tensor | None, sampling: ActionSampling
    ) -> ActionSample:
        state = inputs["state"]
        self.batches.append(state[:, 0].tolist())
        actions = torch.zeros(len(state), CHUNK, 1) if uniforms is None else uniforms
        return ActionSample(actions, torch.full((len(state), CHUNK, 1), -1.0), state.clone())

    def to_robot_actions(self, actions: torch.Tensor) -> np.ndarray:
        return actions.numpy()


class ScriptedRobots:
    """Robots whose state is start state + chunks so far; `ends` gives the action (over all chunks) that ends each. With
    `auto_reset` those in `truncated` end by the step limit (default: all)."""

    def __init__(
        self,
        ends: Sequence[int],
        stages: int = 1,
        *,
        auto_reset: bool = False,
        truncated: Sequence[bool] | None = None,
        fails: int | None = None,
    ) -> None:
        self.num_stages, self.num_robots, self.num_start_states = stages, len(ends) // stages, 1000
        self._ends, self._auto_reset, self._fails = np.array(ends), auto_reset, fails
        self._truncated = np.array(truncated or [auto_reset] * len(ends))
        self.log: list[tuple[str, int]] = []
        self.actions: list[np.ndarray] = []

    def reset(self, stage: int, start_states: np.ndarray) -> RobotObservation:
        if stage == 0:
            self._chunk = [0] * self.num_stages
            self._start = [np.zeros(0)] * self.num_stages
        self._start[stage] = start_states.astype(np.float32)
        return self._observe(stage)

    def start_chunk(self, stage: int, actions: np.ndarray) -> None:
        self.log.append(("start", stage))
        self.actions.append(actions)

    def finish_chunk(self, stage: int) -> ChunkResult:
        self.log.append(("finish", stage))
        first = self._chunk[stage] * CHUNK
        self._chunk[stage] += 1
        times = first + np.arange(CHUNK)
        robots = slice(stage * self.num_robots, (stage + 1) * self.num_robots)
        ended = times[None] == self._ends[robots, None]
        episodes = tuple(self._episode(int(robot), stage) for robot in np.flatnonzero(ended.any(axis=1)))
        executed = np.ones_like(ended) if self._auto_reset else times[None] <= self._ends[robots, None]
        return ChunkResult(
            self._observe(stage),
            executed.astype(np.float32),
            ended & ~self._truncated[robots, None],
            ended & self._truncated[robots, None],
            executed,
            self._observe(stage) if self._auto_reset else None,
            episodes,
        )

    def _observe(self, stage: int) -> RobotObservation:
        state = (self._start[stage] + self._chunk[stage])[:, None].astype(np.float32)
        return RobotObservation(np.zeros((len(state), 0, 1, 1, 3), np.uint8), state, ("go",) * len(state))

    def _episode(self, robot: int, stage: int) -> RobotEpisode:
        failed = self._fails == robot + stage * self.num_robots
        return RobotEpisode(
            robot=robot,
            start_state=0,
            task="reach",
            episode_return=1.0,
            num_actions=1,
            success_once=not failed,
            success_at_end=not failed,
            outcome=Outcome.FAILED if failed else Outcome.SUCCESS,
            failure=Failure("step", "ProcessDied", "killed") if failed else None,
        )


def collect(
    robots: ScriptedRobots,
    *,
    passes: int = 1,
    chunks: int = 3,
    auto_reset: bool = False,
    policy: CountingPolicy | None = None,
    bootstraps_all: bool = False,
) -> tuple[ChunkBatch, list[RobotEpisode], CountingPolicy]:
    policy = policy or CountingPolicy()
    rollout = ChunkRollout(
        robots,
        policy,  # type: ignore[arg-type]
        policy.sample,
        auto_reset=auto_reset,
        with_values=True,
        bootstraps_all=bootstraps_all,
    )
    starts = [np.arange(rollout.num_robots) * 10 + 100 * index for index in range(passes)]

    def uniforms(index: int, chunk: int) -> torch.Tensor:
        base = torch.arange(float(rollout.num_robots))[:, None, None] / 100
        return base.expand(-1, CHUNK, policy.action_dim) + 0.1 * chunk

    group = torch.arange(passes * rollout.num_robots)
    batch, episodes = rollout.collect(RolloutLength(passes, chunks), starts, group, uniforms, ActionSampling())
    return batch, episodes, policy


def test_actions_count_up_to_the_one_that_ends_the_episode() -> None:
    batch, episodes, _ = collect(ScriptedRobots([0, 3, 99]))
    assert batch.loss_mask[:, 0].tolist() == [[True, False], [False, False], [False, False]]
    assert batch.loss_mask[:, 1].tolist() == [[True, True], [True, True], [False, False]]
    assert batch.loss_mask[:, 2].all()
    assert batch.rewards[:, 0].sum() == 1.0
    assert [(episode.robot, episode.success_once) for episode in episodes] == [(0, True), (1, True)]


def test_policy_computes_nothing_for_robots_whose_episode_has_ended() -> None:
    _, _, policy = collect(ScriptedRobots([0, 3, 99]))
    assert policy.batches == [[0.0, 10.0, 20.0], [11.0, 21.0], [22.0], [23.0]]


def test_robots_with_fewer_dimensions_than_the_policy_move_and_rest() -> None:
    class ArmPolicy(CountingPolicy):
        action_dim, robot_action_dim = 2, 1

        def to_robot_actions(self, actions: torch.Tensor) -> np.ndarray:
            return actions.numpy()[..., :1]

    robots = ScriptedRobots([0, 99])
    collect(robots, chunks=2, policy=ArmPolicy())
    assert [actions.tolist() for actions in robots.actions] == [
        [[[0.0], [0.0]], [[pytest.approx(0.01)], [pytest.approx(0.01)]]],
        [[[0.0], [0.0]], [[pytest.approx(0.11)], [pytest.approx(0.11)]]],
    ]


def test_values_are_before_each_chunk_and_after_the_last() -> None:
    batch, _, _ = collect(ScriptedRobots([99, 99]))
    assert batch.values is not None
    assert batch.last_values is not None
    assert batch.values[:, :, 0].tolist() == [[0.0, 10.0], [1.0, 11.0], [2.0, 12.0]]
    assert batch.last_values[:, 0].tolist() == [3.0, 13.0]


def test_automatic_reset_keeps_the_value_of_the_last_observation() -> None:
    batch, _, _ = collect(ScriptedRobots([3, 99], auto_reset=True), auto_reset=True)
    assert batch.final_values is not None
    assert batch.truncated is not None
    assert batch.final_values[:, :, 0].tolist() == [[0.0, 0.0], [2.0, 0.0], [0.0, 0.0]]
    assert batch.truncated[1, 0].tolist() == [False, True]
    assert batch.loss_mask.all()


def test_the_last_value_of_a_solved_episode_is_kept_only_if_every_end_is_bootstrapped() -> None:
    for bootstraps_all, expected in ((False, [0.0, 12.0, 0.0]), (True, [2.0, 12.0, 0.0])):
        robots = ScriptedRobots([3, 2, 99], auto_reset=True, truncated=[False, True, False])
        batch, _, _ = collect(robots, auto_reset=True, bootstraps_all=bootstraps_all)
        assert batch.final_values is not None
        assert batch.truncated is not None
        assert batch.final_values[1, :, 0].tolist() == expected
        assert not batch.final_values[[0, 2]].any()
        assert batch.dones[1].tolist() == [[False, True], [True, False], [False, False]]
        assert batch.truncated[1].tolist() == [[False, False], [True, False], [False, False]]


def test_failed_episode_is_not_trained_on() -> None:
    batch, episodes, _ = collect(ScriptedRobots([2, 99], fails=0))
    assert not batch.loss_mask[:, 0].any()
    assert batch.rewards[:, 0].sum() == 0.0
    assert batch.loss_mask[:, 1].all()
    assert episodes[0].failure is not None


def test_stages_overlap_and_give_the_same_batch() -> None:
    together, apart = ScriptedRobots([0, 3, 99, 4]), ScriptedRobots([0, 3, 99, 4], stages=2)
    batch, _, _ = collect(together)
    staged, _, _ = collect(apart)
    assert apart.log[:4] == [("start", 0), ("start", 1), ("finish", 0), ("start", 0)]
    for name in ("rewards", "loss_mask", "values", "last_values", "actions", "logprobs"):
        assert torch.equal(getattr(batch, name), getattr(staged, name)), name


def test_passes_are_columns_after_each_other() -> None:
    batch, episodes, _ = collect(ScriptedRobots([0, 99]), passes=2)
    assert batch.rewards.shape == (3, 4, CHUNK)
    assert [episode.robot for episode in episodes] == [0, 2]
    assert batch.inputs["state"][0, :, 0].tolist() == [0.0, 10.0, 100.0, 110.0]
