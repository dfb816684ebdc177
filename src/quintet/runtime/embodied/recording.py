"""What people see of rollouts of robots: videos, and the episodes of validations chunk by chunk."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from quintet.config.native.experiment import Experiment
from quintet.config.native.tracking import VideoConfig
from quintet.embodied_records import ChunkResult, RecordedVideo, RobotEpisode, RobotObservation, RolloutRequest
from quintet.envs.simulators.robot_envs import RobotEnvs
from quintet.records import FinishReason, Trajectory, Turn
from quintet.rollout.chunk_rollout import RolloutRecorder
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.videos import VideoWriter, video_path

logger = logging.getLogger(__name__)


class RolloutRecording:
    """Records the rollouts of the first robots of this process, as configured by `tracking`."""

    def __init__(self, config: Experiment) -> None:
        self._config = config
        self._videos: dict[bool, VideoWriter] = {}
        """Writers of videos of training and of validations."""
        self._recorded: RobotTrajectories | None = None
        self._complete: queue.SimpleQueue[RecordedVideo] = queue.SimpleQueue()

    def recorders(self, request: RolloutRequest, robots: RobotEnvs) -> list[RolloutRecorder]:
        """Return the recorders of a rollout, and let the simulator render frames if videos need them."""
        recorders: list[RolloutRecorder] = []
        robots.record_frames = False
        if not request.is_recorded:
            return recorders
        if num_episodes := self._num_recorded(request, robots):
            group_size = self._config.training.samples_per_group if request.first_episode is None else 1
            self._recorded = RobotTrajectories(range(num_episodes), group_size)
            recorders.append(self._recorded)
        if (video := self._video(request, robots)) is not None:
            robots.record_frames = True
            recorders.append(video)
        return recorders

    def take_trajectories(self) -> list[Trajectory]:
        """Return the episodes that were recorded since the last call."""
        recorded, self._recorded = self._recorded, None
        return [] if recorded is None else recorded.trajectories(self._config.env.name)

    def take_videos(self, *, wait: bool = False) -> list[RecordedVideo]:
        """Return the videos completed since the last call; with `wait`, after all videos are encoded."""
        if wait:
            self.close()
        return [self._complete.get_nowait() for _ in range(self._complete.qsize())]

    def _num_recorded(self, request: RolloutRequest, robots: RobotEnvs) -> int:
        """Return the number of robots whose episodes are recorded."""
        tracking, every = self._config.tracking, self._config.tracking.trajectories_every_steps
        if request.first_episode is None:
            is_recorded = every > 0 and request.step % every == 0
        else:
            is_recorded = request.first_episode == 0
        return min(_num_robots(robots), tracking.image_episodes) if is_recorded else 0

    def _video(self, request: RolloutRequest, robots: RobotEnvs) -> _VideoRecorder | None:
        """Return the recorder of a rollout's videos if one of its passes is due."""
        is_validation = request.first_episode is not None
        tracking = self._config.tracking
        config = tracking.validation_video if is_validation else tracking.video
        if config is None or (request.first_episode or 0) > 0:
            return None
        every = self._config.validation.every_steps
        first = request.step // max(1, every) if is_validation else (request.step - 1) * request.passes
        due = [index for index in range(request.passes) if (first + index) % config.every_rollouts == 0]
        if not due:
            return None
        if is_validation:
            first = request.step  # the last validation may not be a multiple of `every`
        split: Literal["train", "validation"] = "validation" if is_validation else "train"
        seed = self._config.simulator_config(is_validation=is_validation).seed
        run = RunDirectory.from_config(self._config).path
        paths = {
            index: video_path(run, tracking, split, step=request.step, number=first + index, seed=seed) for index in due
        }
        writer = self._writer(config, robots, is_validation=is_validation)

        def complete(path: Path) -> None:
            self._complete.put(RecordedVideo(request.step, split, path))

        return _VideoRecorder(writer, paths, _num_robots(robots), complete)

    def _writer(self, config: VideoConfig, robots: RobotEnvs, *, is_validation: bool) -> VideoWriter:
        if is_validation not in self._videos:
            frequency = robots.simulator.control_frequency
            self._videos[is_validation] = VideoWriter(config, frequency, logger.warning)
        return self._videos[is_validation]

    def close(self) -> None:
        """Wait until all videos are written."""
        for writer in self._videos.values():
            writer.close()
        self._videos = {}


def _num_robots(robots: RobotEnvs) -> int:
    """Return the number of robots of all stages, which are columns next to each other in each pass."""
    return robots.num_stages * robots.num_robots


class _VideoRecorder:
    """Passes frames of the first stage on to a writer, one video per pass that is due."""

    def __init__(
        self, writer: VideoWriter, paths: dict[int, Path], robots: int, on_complete: Callable[[Path], None]
    ) -> None:
        """`robots` is the number of robots of this process."""
        self._writer, self._paths, self._robots, self._on_complete = writer, paths, robots, on_complete
        self._pass: int | None = None

    def record_actions(self, columns: Sequence[int], observation: RobotObservation, actions: np.ndarray) -> None:
        index, robot = divmod(columns[0], self._robots)
        if robot == 0 and index != self._pass and index in self._paths:
            self._writer.start(self._paths[index], observation.instructions, on_complete=self._on_complete)
        if robot == 0:
            self._pass = index

    def record_result(self, columns: Sequence[int], result: ChunkResult) -> None:
        index, robot = divmod(columns[0], self._robots)
        if robot == 0 and index in self._paths:
            self._writer.add_chunk(result)


class RobotTrajectories:
    """Records the first episode of each of the first robots of a rollout, one turn per chunk."""

    def __init__(self, columns: Sequence[int], group_size: int = 1) -> None:
        """`columns` are the robots, as columns of the batch, of which `group_size` next to each other are a group."""
        self._group_size = group_size
        self._turns: dict[int, list[Turn]] = {column: [] for column in columns}
        self._episodes: dict[int, RobotEpisode] = {}

    def record_actions(self, columns: Sequence[int], observation: RobotObservation, actions: np.ndarray) -> None:
        """Record the observations of robots and their actions, float32 [columns, C, D]."""
        for row, column in enumerate(columns):
            if column in self._turns and column not in self._episodes:
                self._turns[column].append(_turn(observation, row, actions[row]))

    def record_result(self, columns: Sequence[int], result: ChunkResult) -> None:
        """Record the rewards of robots, and the episodes that ended."""
        after = result.final_observation or result.observation
        for row, column in enumerate(columns):
            turns = self._turns.get(column)
            if turns and column not in self._episodes:
                reward = float(result.rewards[row].sum())
                turns[-1] = replace(turns[-1], reward=reward, images_after=tuple(after.images[row]))
        for episode in result.episodes:
            column = columns[episode.robot]
            if column in self._turns:
                self._episodes.setdefault(column, episode)

    def trajectories(self, env: str) -> list[Trajectory]:
        """Return the episodes that have ended; `env` is the name of the environment."""
        return [
            Trajectory(
                env=env,
                seed=episode.start_state,
                group=column // self._group_size,
                sample=column % self._group_size,
                turns=tuple(self._turns[column]),
                outcome=episode.outcome,
                failure=episode.failure,
                env_type=episode.task,
            )
            for column, episode in sorted(self._episodes.items())
        ]


def _turn(observation: RobotObservation, row: int, actions: np.ndarray) -> Turn:
    rounded = [[round(float(value), 4) for value in action] for action in actions]
    return Turn(
        observation=observation.instructions[row],
        prompt=(),
        continues=False,
        tokens=(),
        logprobs=(),
        weight_version=0,
        text="\n".join(", ".join(f"{value:+.3f}" for value in action) for action in rounded),
        actions=tuple(rounded),
        valid_format=True,
        reward=0.0,
        finish_reason=FinishReason.STOP,
        images=tuple(observation.images[row]),
    )
