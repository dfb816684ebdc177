"""If these fail, episodes are counted twice or not at all, or people see other robots than those that were trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from robot_policies import robot_experiment
from scripted_simulator import REFERENCE, SIZE
from torch import Tensor

from quintet.config.native.experiment import Experiment
from quintet.embodied_records import ActionSample, ActionSampling, RobotEpisode, RobotObservation, RolloutRequest
from quintet.envs.simulators.robot_envs import RobotEnvs
from quintet.policies.vla.action_policy import ActionPolicy
from quintet.records import Outcome
from quintet.runtime.embodied.rollout_runner import CollectedRollout, RolloutRunner
from quintet.tracking import videos
from quintet.tracking.summaries import summarize_robot_episodes

ROBOTS, CHUNK = 4, 2
SOLVED = {state: [3] for state in range(0, 12, 2)}
"""All episodes of the task `reach`, which has the even start states, are solved by the third of four actions."""


class UniformPolicy:
    """Actions are the uniform numbers."""

    action_chunk, action_dim, robot_action_dim, value_size = CHUNK, 2, 2, 0

    def prepare(self, observation: RobotObservation) -> dict[str, Tensor]:
        return {"state": torch.from_numpy(observation.state)}

    def sample(self, inputs: Mapping[str, Tensor], uniforms: Tensor | None, sampling: ActionSampling) -> ActionSample:
        actions = torch.zeros(len(inputs["state"]), CHUNK, 2) if uniforms is None else uniforms
        return ActionSample(actions, torch.zeros_like(actions))

    def to_robot_actions(self, actions: Tensor) -> np.ndarray:
        return actions.numpy()


@pytest.fixture(autouse=True)
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def experiment(*, env: Mapping[str, Any] | None = None, **sections: Any) -> Experiment:
    simulator = {"name": "simulator", "simulator": REFERENCE, "max_steps": 4, "options": {"success": SOLVED}}
    training = {"groups_per_step": 2, "samples_per_group": 2, "threads": 1}
    policy = {"preset": "state-mlp"}
    return robot_experiment(
        policy, has_critic=False, env=simulator | dict(env or {}), **{"training": training, **sections}
    )


def request(step: int = 1, **changes: Any) -> RolloutRequest:
    return replace(RolloutRequest(step, 5, ROBOTS, 2, 2, temperature=1.0, top_k=0), **changes)


def run(runner: RolloutRunner, request: RolloutRequest, robots: range | None = None) -> CollectedRollout:
    policy = UniformPolicy()
    local = np.array(robots or range(request.robots))
    return runner.run(request, local, cast(ActionPolicy, policy), policy.sample)


@contextmanager
def started(config: Experiment) -> Iterator[RolloutRunner]:
    with closing(RolloutRunner(config)) as runner:
        yield runner


def test_each_episode_is_counted_once_with_its_task_success_and_reward() -> None:
    with started(experiment()) as runner:
        rollout = run(runner, request())
    episodes = sorted(rollout.episodes, key=lambda episode: episode.robot)
    assert [episode.robot for episode in episodes] == list(range(2 * ROBOTS))
    assert [episode.start_state for episode in episodes[::2]] == [episode.start_state for episode in episodes[1::2]]
    for episode in episodes:
        is_solved = episode.start_state % 2 == 0
        assert (episode.task, episode.success_once) == (("reach" if is_solved else "push"), is_solved)
        assert (episode.num_actions, episode.episode_return) == ((3, 1.0) if is_solved else (4, 0.0))
        mask = rollout.batch.loss_mask[:, episode.robot].flatten()
        assert mask.tolist() == [True, True, True, not is_solved]
        assert rollout.batch.rewards[:, episode.robot].sum() == episode.episode_return
    assert {episode.task for episode in episodes} == {"reach", "push"}
    assert rollout.batch.group[0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    metrics = summarize_robot_episodes(episodes)
    assert metrics["env/task/reach/success_once"] == 1.0
    assert metrics["env/task/push/success_once"] == 0.0
    assert metrics["env/success_once"] == sum(episode.success_once for episode in episodes) / 8


def test_parts_of_the_robots_in_several_processes_are_those_of_one() -> None:
    with started(experiment()) as runner:
        whole = run(runner, request())
    episodes: list[RobotEpisode] = []
    for part in (range(3), range(3, 4)):
        with started(experiment()) as runner:
            rollout = run(runner, request(), part)
        assert rollout.columns.tolist() == [*part, *(ROBOTS + robot for robot in part)]
        for name in ("rewards", "loss_mask", "actions", "group"):
            expected = getattr(whole.batch, name)[:, rollout.columns]
            assert torch.equal(getattr(rollout.batch, name), expected), name
        episodes += rollout.episodes
    assert sorted(episodes, key=lambda episode: episode.robot) == sorted(whole.episodes, key=lambda each: each.robot)


def test_channels_change_no_number_and_measure_what_passes_through_them() -> None:
    channels = {"envs": {"channel": {"size": 3}}, "rollout": {"action_channel": {"size": 3}, "channel": {"size": 2}}}
    with started(experiment()) as plain, started(experiment(placement=channels)) as runner:
        expected, rollout = run(plain, request()), run(runner, request())
        assert plain.pop_metrics() == {}
        metrics = runner.pop_metrics()
    assert torch.equal(rollout.batch.actions, expected.batch.actions)
    assert torch.equal(rollout.batch.rewards, expected.batch.rewards)
    assert sorted(rollout.episodes, key=str) == sorted(expected.episodes, key=str)
    # two passes of one reset and two chunks
    assert sorted(value for name, value in metrics.items() if name.endswith("/puts")) == [1, 4, 6]


@pytest.mark.parametrize("offloads", [False, True])
def test_simulators_leave_their_device_after_a_rollout_if_configured(
    monkeypatch: pytest.MonkeyPatch, *, offloads: bool
) -> None:
    offloaded: list[object] = []
    monkeypatch.setattr(RobotEnvs, "offload", lambda *envs: offloaded.append(envs))
    with started(experiment(placement={"offload_envs": offloads})) as runner:
        run(runner, request())
    assert len(offloaded) == offloads


def test_the_first_robots_of_a_step_that_is_stored_are_recorded_once() -> None:
    with started(experiment(tracking={"trajectories_every_steps": 2, "image_episodes": 3})) as runner:
        run(runner, request(1))
        assert runner.take_trajectories() == []
        rollout = run(runner, request(2))
        recorded = runner.take_trajectories()
        assert runner.take_trajectories() == []
        run(runner, request(4, is_recorded=False))
        assert runner.take_trajectories() == []
    episodes = {episode.robot: episode for episode in rollout.episodes}
    assert [(each.group, each.sample) for each in recorded] == [(0, 0), (0, 1), (1, 0)]
    for column, trajectory in enumerate(recorded):
        assert trajectory.seed == episodes[column].start_state
        assert trajectory.outcome is episodes[column].outcome
        assert sum(turn.reward for turn in trajectory.turns) == episodes[column].episode_return
        assert trajectory.turns[0].images[0].shape == (SIZE, SIZE, 3)


def test_the_first_episodes_of_a_validation_are_recorded() -> None:
    with started(experiment(tracking={"trajectories_every_steps": 0, "image_episodes": 16})) as runner:
        first = run(runner, request(3, passes=1, first_episode=0))
        run(runner, request(3, passes=1, first_episode=ROBOTS))
        recorded = runner.take_trajectories()
    assert [(each.group, each.sample) for each in recorded] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    expected = sorted(first.episodes, key=lambda episode: episode.robot)
    assert [each.seed for each in recorded] == [episode.start_state for episode in expected]


class FakeVideos:
    """Frames of each video by its path."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames: dict[str, list[np.ndarray]] = {}
        monkeypatch.setattr(videos, "open_video", self._open)
        monkeypatch.setattr(videos, "video_suffix", lambda: ".mp4")

    @contextmanager
    def _open(self, path: Path, frame_rate: float) -> Iterator[Any]:
        frames = self.frames.setdefault(str(Path(*path.parts[-3:])), [])

        class File:
            def add(self, frame: np.ndarray) -> None:
                frames.append(frame)

        assert frame_rate == 5.0
        yield File()

    def shown(self, name: str, robots: int) -> list[list[int]]:
        """Return the colour of each robot's tile in each frame."""
        tiles = [np.split(frame, robots, axis=1) for frame in self.frames[name]]
        assert all(len(np.unique(tile)) == 1 for row in tiles for tile in row)
        return [[int(tile[0, 0, 0]) for tile in row] for row in tiles]


def colours(episodes: list[RobotEpisode], columns: list[int]) -> list[list[int]]:
    """Return the colours of `ScriptedSimulator.render` after each of four actions; robots stand after the end."""
    by_column = {episode.robot: episode for episode in episodes}
    chosen = [by_column[column] for column in columns]
    return [[each.start_state * 20 % 256 + min(action, each.num_actions) for each in chosen] for action in (1, 2, 3, 4)]


def test_videos_show_the_selected_robots_of_the_passes_that_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FakeVideos(monkeypatch)
    with started(experiment(tracking={"video": {"robots": 3, "every_rollouts": 3, "overlay": False}})) as runner:
        rollouts = [run(runner, request(step)) for step in (1, 2)]
        run(runner, request(3, is_recorded=False))
        run(runner, request(3, passes=1, first_episode=0))
        recorded = runner.take_videos(wait=True)
        assert runner.take_videos() == []
    # rollouts 0, 1 in step 1; 2, 3 in step 2
    names = ["videos/train/step_000001_rollout_0.mp4", "videos/train/step_000002_rollout_3.mp4"]
    assert list(files.frames) == names
    assert [(video.step, video.split, video.path.name) for video in recorded] == [
        (1, "train", "step_000001_rollout_0.mp4"),
        (2, "train", "step_000002_rollout_3.mp4"),
    ]
    assert files.shown(names[0], 3) == colours(rollouts[0].episodes, [0, 1, 2])
    assert files.shown(names[1], 3) == colours(rollouts[1].episodes, [4, 5, 6])


def test_videos_of_a_process_with_some_of_the_robots_have_all_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FakeVideos(monkeypatch)
    config = experiment(
        env={"pipeline_stages": 2}, tracking={"video": {"robots": 1, "overlay": False}, "image_episodes": 16}
    )
    with started(config) as runner:
        rollout = run(runner, request(10), range(2))
        runner.take_videos(wait=True)
        recorded = runner.take_trajectories()
    assert list(files.frames) == [f"videos/train/step_000010_rollout_{number}.mp4" for number in (18, 19)]
    assert files.shown("videos/train/step_000010_rollout_18.mp4", 1) == colours(rollout.episodes, [0])
    assert files.shown("videos/train/step_000010_rollout_19.mp4", 1) == colours(rollout.episodes, [ROBOTS])
    assert [(each.group, each.sample) for each in recorded] == [(0, 0), (0, 1)]


def test_videos_of_validations_have_the_first_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    files = FakeVideos(monkeypatch)
    with started(experiment(tracking={"validation_video": {"robots": 2, "overlay": False}})) as runner:
        run(runner, request(1))
        first = run(runner, request(1, passes=1, first_episode=0))
        run(runner, request(1, passes=1, first_episode=ROBOTS))
        (video,) = runner.take_videos(wait=True)
    assert (video.step, video.split) == (1, "validation")
    assert files.shown("videos/validation/step_000001_rollout_1.mp4", 2) == colours(first.episodes, [0, 1])


def test_a_failed_simulator_costs_its_episodes_which_are_counted_as_failed() -> None:
    faulty = {"success": SOLVED, "fault": "raise", "at": 2, "of": 1}
    config = experiment(env={"options": faulty, "start_state": 1})
    with started(config) as runner:
        rollout = run(runner, request(passes=1))
    assert [episode.outcome for episode in rollout.episodes] == [Outcome.FAILED] * ROBOTS
    assert not rollout.batch.loss_mask.any()
    assert not rollout.batch.rewards.any()
    assert summarize_robot_episodes(rollout.episodes)["env/failed"] == ROBOTS
