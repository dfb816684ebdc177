"""Run the rollouts that the controller requests with the robots of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.placement import PlacementConfig
from quintet.embodied_records import (
    ActionSampling,
    ChunkBatch,
    ChunkResult,
    RecordedVideo,
    RobotEpisode,
    RobotObservation,
    RolloutRequest,
)
from quintet.envs.factory import env_errors_under_key
from quintet.envs.simulators.robot_envs import RobotEnvs, build_robot_envs
from quintet.envs.simulators.start_states import RobotStartStates
from quintet.errors import ConfigError
from quintet.policies.vla.action_policy import ActionPolicy
from quintet.records import Trajectory
from quintet.rollout.channel import ChannelCounter
from quintet.rollout.chunk_rollout import ChunkRollout, RobotGroup, RolloutLength, Sample, Uniforms
from quintet.runtime.embodied.recording import RolloutRecording
from quintet.seeds import derive_seed


@dataclass(frozen=True, slots=True)
class CollectedRollout:
    """Chunk steps and episodes of some robots."""

    batch: ChunkBatch
    columns: Tensor
    """Columns of these robots among those of all robots, int64 [passes · robots]."""
    num_columns: int
    """Number of columns of all robots."""
    episodes: list[RobotEpisode]
    """`robot` is the column among those of all robots."""


@dataclass(slots=True)
class _Robots:
    """Robots of training or of validations."""

    envs: RobotEnvs
    channels: RobotChannels | None


class RolloutRunner:
    """Robots of this process in training and in validations, and their rollouts."""

    def __init__(
        self,
        config: Experiment,
        *,
        is_recorded: bool = True,
        build: Callable[[int, bool], RobotEnvs] | None = None,
    ) -> None:
        """`is_recorded` records videos and episodes for people. `build(robots, is_validation)` builds the robots; None
        simulates them here."""
        self._config, self._build = config, build or self._build_here
        self._recording = RolloutRecording(config) if is_recorded else None
        self._robots: dict[bool, _Robots] = {}
        placement = config.placement
        channels = (placement.rollout.action_channel, placement.envs.channel)
        self._has_channels = not all(channel.is_default for channel in channels)
        replay = placement.rollout.channel
        self._replay = None if replay.is_default else ChannelCounter(replay)

    def run(self, request: RolloutRequest, local: np.ndarray, policy: ActionPolicy, sample: Sample) -> CollectedRollout:
        """Run a rollout of the robots with the indices `local` among all robots of the run."""
        is_validation = request.first_episode is not None
        env = self._config.simulator_config(is_validation=is_validation)
        with env_errors_under_key(self._env_key(is_validation=is_validation)):
            robots = self._robots_of(len(local), is_validation=is_validation)
        _check_action_dim(policy, robots.envs.simulator.action_dim)
        rollout = ChunkRollout(
            robots.channels or robots.envs,
            policy,
            sample,
            auto_reset=env.auto_reset,
            with_values=self._config.needs_critic and not is_validation,
            bootstraps_all=self._config.algorithm.bootstrap == "done",
            recorders=self._recording.recorders(request, robots.envs) if self._recording else (),
        )
        columns = torch.cat([torch.from_numpy(local) + index * request.robots for index in range(request.passes)])
        batch, episodes = rollout.collect(
            RolloutLength(request.passes, request.chunks),
            [states[local] for states in self._start_states(request, env, robots.envs.num_start_states)],
            columns // self._config.training.samples_per_group,
            _uniforms(request, policy, torch.from_numpy(local)),
            ActionSampling(request.temperature, request.top_k),
        )
        if self._config.placement.offload_envs:
            robots.envs.offload()
        if self._replay is not None and not is_validation:
            self._replay.count()
        episodes = [replace(episode, robot=int(columns[episode.robot])) for episode in episodes]
        return CollectedRollout(batch, columns, request.passes * request.robots, episodes)

    def take_trajectories(self) -> list[Trajectory]:
        """Return the episodes that were recorded since the last call."""
        return self._recording.take_trajectories() if self._recording else []

    def take_videos(self, *, wait: bool = False) -> list[RecordedVideo]:
        """See `RolloutRecording.take_videos`."""
        return self._recording.take_videos(wait=wait) if self._recording else []

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of channels since the last call."""
        metrics = {} if self._replay is None else self._replay.pop_metrics()
        training = self._robots.get(False)
        return metrics if training is None or training.channels is None else metrics | training.channels.pop_metrics()

    def close(self) -> None:
        """End the simulators and finish the videos."""
        for robots in self._robots.values():
            robots.envs.close()
        self._robots = {}
        if self._recording is not None:
            self._recording.close()

    def _robots_of(self, num_robots: int, *, is_validation: bool) -> _Robots:
        if is_validation not in self._robots:
            envs = self._build(num_robots, is_validation)
            channels = RobotChannels(envs, self._config.placement) if self._has_channels else None
            self._robots[is_validation] = _Robots(envs, channels)
        return self._robots[is_validation]

    def _build_here(self, num_robots: int, is_validation: bool) -> RobotEnvs:
        return build_robot_envs(self._config.simulator_config(is_validation=is_validation), num_robots)

    def _env_key(self, *, is_validation: bool) -> str:
        return "validation.simulator" if is_validation and self._config.validation.simulator is not None else "env"

    def _start_states(self, request: RolloutRequest, env: SimulatorConfig, num_start_states: int) -> list[np.ndarray]:
        """Return the start states of all robots in each pass, int64 [robots, K]."""
        max_episodes = request.chunks if env.auto_reset else 1
        if request.first_episode is not None:
            states = RobotStartStates(env, num_start_states, 1, max_episodes, self._env_key(is_validation=True))
            return [states.validation(request.first_episode, request.robots)]
        states = RobotStartStates(env, num_start_states, self._config.training.samples_per_group, max_episodes)
        return [states.training(request.step, index, request.robots) for index in range(request.passes)]


def _check_action_dim(policy: ActionPolicy, simulated: int) -> None:
    """
    Raises:
        ConfigError: the robots of the simulator have actions of other dimensions than the policy.
    """
    if policy.robot_action_dim == simulated:
        return
    key, dimensions = "policy.vla.action_dim", policy.robot_action_dim
    raise ConfigError(
        f"{key} = {policy.action_dim}: the policy moves {dimensions} dimensions of a robot, the simulator's has"
        f" {simulated}",
        key=key,
        value=policy.action_dim,
        hint=f"use a policy for this robot, or set {key}={simulated}",
    )


def _uniforms(request: RolloutRequest, policy: ActionPolicy, local: Tensor) -> Uniforms | None:
    """Return the random numbers of the robots `local`, which do not depend on how many others there are."""
    if request.temperature == 0.0:
        return None

    def uniforms(index: int, chunk: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(request.seed, "actions", index, chunk))
        shape = (request.robots, policy.action_chunk, policy.action_dim)
        return torch.rand(shape, generator=generator)[local]

    return uniforms


class RobotChannels:
    """See `RobotGroup`: robots with counts of the actions and observations that pass, one item per stage. Both run in
    the thread of the rollout, so nothing waits in a queue."""

    def __init__(self, robots: RobotGroup, placement: PlacementConfig) -> None:
        self.num_stages, self.num_robots = robots.num_stages, robots.num_robots
        self.num_start_states = robots.num_start_states
        self._robots = robots
        self._actions = ChannelCounter(placement.rollout.action_channel)
        self._observations = ChannelCounter(placement.envs.channel)

    def reset(self, stage: int, start_states: np.ndarray) -> RobotObservation:
        started = time.monotonic()
        observation = self._robots.reset(stage, start_states)
        self._observations.count(get_seconds=time.monotonic() - started)
        return observation

    def start_chunk(self, stage: int, actions: np.ndarray) -> None:
        self._actions.count()
        self._robots.start_chunk(stage, actions)

    def finish_chunk(self, stage: int) -> ChunkResult:
        started = time.monotonic()
        result = self._robots.finish_chunk(stage)
        self._observations.count(get_seconds=time.monotonic() - started)
        return result

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of both channels since the last call."""
        return {**self._actions.pop_metrics(), **self._observations.pop_metrics()}

    def close(self) -> None:
        self._robots.close()
