"""Rollouts of action policies: observe, sample a chunk of actions, execute it, with all robots at once.

While one stage of the robots is simulated, the policy computes the actions of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from quintet.embodied_records import (
    ActionSample,
    ActionSampling,
    ChunkBatch,
    ChunkResult,
    RobotEpisode,
    RobotObservation,
)
from quintet.policies.vla.action_policy import ActionPolicy
from quintet.records import INCOMPLETE_OUTCOMES

Uniforms = Callable[[int, int], torch.Tensor]
"""`(pass, chunk) -> uniforms`, float32 [robots, C, D]."""
Sample = Callable[[Mapping[str, torch.Tensor], torch.Tensor | None, ActionSampling], ActionSample]


class RobotGroup(Protocol):
    """Robots in stages, wherever they are simulated; see `RobotEnvs`."""

    num_stages: int
    num_robots: int
    """Robots of each stage."""

    @property
    def num_start_states(self) -> int:
        """Number of distinct start states."""

    def reset(self, stage: int, start_states: np.ndarray) -> RobotObservation:
        """Put the robots of a stage into start states, int64 [robots, K], see `RobotVectorEnv.reset`."""

    def start_chunk(self, stage: int, actions: np.ndarray) -> None:
        """Start to execute a chunk of actions of each robot, float32 [robots, C, D]."""

    def finish_chunk(self, stage: int) -> ChunkResult:
        """Wait for the result of the chunk."""

    def close(self) -> None:
        """End the simulators."""


class RolloutRecorder(Protocol):
    """Receives the observations, actions and results of a rollout; `columns` are the robots' columns in the batch."""

    def record_actions(self, columns: Sequence[int], observation: RobotObservation, actions: np.ndarray) -> None:
        """Receive the observations of robots and their actions, float32 [columns, C, D]."""

    def record_result(self, columns: Sequence[int], result: ChunkResult) -> None:
        """Get the result of a chunk of the robots of a stage."""


@dataclass(frozen=True, slots=True)
class RolloutLength:
    """Extent of a rollout: passes over all robots, and chunks per pass."""

    passes: int
    chunks: int


class ChunkRollout:
    """Collects the chunk steps of all robots of this process."""

    def __init__(
        self,
        robots: RobotGroup,
        policy: ActionPolicy,
        sample: Sample,
        *,
        auto_reset: bool,
        with_values: bool,
        bootstraps_all: bool = False,
        recorders: Sequence[RolloutRecorder] = (),
    ) -> None:
        """`sample` computes what `policy.sample` does, on any device; `with_values` also records values. Without
        `auto_reset` a robot waits for the end of the pass after its episode. `bootstraps_all` records the value of the
        last observation of every episode, not only of truncated ones."""
        self._robots, self._policy, self._sample = robots, policy, sample
        self._auto_reset, self._with_values = auto_reset, with_values
        self._bootstraps_all, self._recorders = bootstraps_all, recorders

    @property
    def num_robots(self) -> int:
        """Robots of all stages."""
        return self._robots.num_robots * self._robots.num_stages

    def collect(
        self,
        length: RolloutLength,
        start_states: Sequence[np.ndarray],
        group: torch.Tensor,
        uniforms: Uniforms | None,
        sampling: ActionSampling,
    ) -> tuple[ChunkBatch, list[RobotEpisode]]:
        """Run all passes, each from a reset; return the chunk steps, [T, passes · robots, …], and the episodes, whose
        `robot` is their column.

        Args:
            length: Passes and chunks.
            start_states: Start states of each robot in each pass, int64 [robots, K].
            group: Group of each column, int64 [passes · robots].
            uniforms: Random numbers of a chunk; None is greedy.
            sampling: Temperature and top-k.
        """
        buffer = _Buffer(length.chunks, length.passes * self.num_robots)
        episodes: list[RobotEpisode] = []
        for index in range(length.passes):
            stages = self._reset(index, start_states[index])
            for chunk in range(length.chunks):
                for stage in stages:
                    if chunk:
                        self._finish(stage, buffer, chunk - 1, episodes)
                    self._start(stage, buffer, chunk, uniforms and uniforms(index, chunk), sampling)
            for stage in stages:
                self._finish(stage, buffer, length.chunks - 1, episodes)
                self._add_last_values(stage, buffer, sampling)
        buffer.exclude_failed()
        return buffer.batch(group, auto_reset=self._auto_reset), episodes

    def _reset(self, index: int, start_states: np.ndarray) -> list[_Stage]:
        size, first = self._robots.num_robots, index * self.num_robots
        stages = []
        for number in range(self._robots.num_stages):
            robots = slice(number * size, (number + 1) * size)
            observation = self._robots.reset(number, start_states[robots])
            columns = torch.arange(first + robots.start, first + robots.stop)
            stages.append(_Stage(number, robots, columns, observation, np.ones(size, dtype=bool)))
        return stages

    def _start(
        self, stage: _Stage, buffer: _Buffer, chunk: int, uniforms: torch.Tensor | None, sampling: ActionSampling
    ) -> None:
        """Sample actions for the robots that are active, and start to execute them; the others do not move."""
        active = np.flatnonzero(stage.active)
        shape = (len(stage.active), self._policy.action_chunk, self._policy.robot_action_dim)
        actions = np.zeros(shape, dtype=np.float32)
        if len(active):
            inputs = self._policy.prepare(stage.observation.select(active))
            sample = self._sample(inputs, None if uniforms is None else uniforms[stage.robots][active], sampling)
            actions[active] = self._policy.to_robot_actions(sample.actions)
            columns = stage.columns[active]
            buffer.write(chunk, columns, actions=sample.actions, logprobs=sample.logprobs)
            buffer.write(chunk, columns, **{f"{INPUT}{name}": tensor for name, tensor in inputs.items()})
            if self._with_values and sample.values is not None:
                buffer.write(chunk, columns, values=sample.values)
            for recorder in self._recorders:
                recorder.record_actions(columns.tolist(), stage.observation.select(active), actions[active])
        self._robots.start_chunk(stage.number, actions)

    def _finish(self, stage: _Stage, buffer: _Buffer, chunk: int, episodes: list[RobotEpisode]) -> None:
        """Record the result of the chunk that was started last."""
        result = self._robots.finish_chunk(stage.number)
        for recorder in self._recorders:
            recorder.record_result(stage.columns.tolist(), result)
        dones = result.terminated | result.truncated
        first_chunk = stage.first_chunk.copy()
        if self._auto_reset:
            stage.first_chunk[dones.any(axis=1)] = chunk + 1
        else:
            stage.active &= ~dones.any(axis=1)
        buffer.write(
            chunk,
            stage.columns,
            rewards=torch.from_numpy(result.rewards),
            dones=torch.from_numpy(dones),
            truncated=torch.from_numpy(result.truncated),
            loss_mask=torch.from_numpy(result.executed),
        )
        self._add_final_values(stage, buffer, chunk, result)
        for episode in result.episodes:
            column = int(stage.columns[episode.robot])
            if episode.outcome in INCOMPLETE_OUTCOMES:
                buffer.failed.append((column, int(first_chunk[episode.robot]), chunk))
                stage.active[episode.robot] = False
            episodes.append(replace(episode, robot=column))
        stage.observation = result.observation

    def _add_final_values(self, stage: _Stage, buffer: _Buffer, chunk: int, result: ChunkResult) -> None:
        """Record the values of the last observations of episodes that are bootstrapped."""
        if not self._with_values or not self._auto_reset:
            return
        dones = result.truncated | (result.terminated & self._bootstraps_all)
        ended = np.flatnonzero(dones.any(axis=1))
        values = torch.zeros(len(stage.columns), max(1, self._policy.value_size))
        if len(ended) and result.final_observation is not None:
            values[ended] = self._values(result.final_observation.select(ended), ActionSampling())
        buffer.write(chunk, stage.columns, final_values=values)

    def _add_last_values(self, stage: _Stage, buffer: _Buffer, sampling: ActionSampling) -> None:
        if not self._with_values:
            return
        active = np.flatnonzero(stage.active)
        values = torch.zeros(len(stage.columns), max(1, self._policy.value_size))
        if len(active):
            values[active] = self._values(stage.observation.select(active), sampling)
        buffer.last_values[stage.columns] = values

    def _values(self, observation: RobotObservation, sampling: ActionSampling) -> torch.Tensor:
        values = self._sample(self._policy.prepare(observation), None, sampling).values
        if values is None:
            raise ValueError("the policy has no value head")
        return values


INPUT = "inputs."
"""Prefix of the policy's inputs in the buffer."""


@dataclass(slots=True)
class _Stage:
    """Robots that are simulated together."""

    number: int
    robots: slice
    columns: torch.Tensor
    """Columns of the robots in the batch, int64 [robots]."""
    observation: RobotObservation
    active: np.ndarray
    """bool [robots], whose episode has not ended."""
    first_chunk: np.ndarray = field(init=False)
    """int64 [robots], first chunk of the running episode."""

    def __post_init__(self) -> None:
        self.first_chunk = np.zeros(len(self.active), dtype=np.int64)


class _Buffer:
    """Chunk steps of a rollout. Memory of steps that are never written is not touched, so it is not allocated."""

    def __init__(self, chunks: int, columns: int) -> None:
        self._shape = (chunks, columns)
        self._tensors: dict[str, torch.Tensor] = {}
        self._last_values: torch.Tensor | None = None
        self.failed: list[tuple[int, int, int]] = []
        """Column, first and last chunk of each episode that failed."""

    def write(self, chunk: int, columns: torch.Tensor, **rows: torch.Tensor) -> None:
        """Write rows of some columns, [columns, …], by name."""
        for name, values in rows.items():
            if name not in self._tensors:
                self._tensors[name] = torch.zeros((*self._shape, *values.shape[1:]), dtype=values.dtype)
            self._tensors[name][chunk, columns] = values

    @property
    def last_values(self) -> torch.Tensor:
        """Values after the last chunk, [columns, V]."""
        if self._last_values is None:
            self._last_values = torch.zeros(self._shape[1], self._tensors["values"].shape[-1])
        return self._last_values

    def batch(self, group: torch.Tensor, *, auto_reset: bool) -> ChunkBatch:
        """Return all chunk steps."""
        tensors = dict(self._tensors)
        inputs = {name.removeprefix(INPUT): tensors.pop(name) for name in list(tensors) if name.startswith(INPUT)}
        if not auto_reset:
            del tensors["truncated"]
        arguments: dict[str, Any] = {**tensors, "last_values": self._last_values}
        return ChunkBatch(inputs=inputs, group=group.expand(self._shape).clone(), **arguments)

    def exclude_failed(self) -> None:
        """Leave episodes whose simulator failed out of training."""
        for column, first, last in self.failed:
            self._tensors["loss_mask"][first : last + 1, column] = False
            self._tensors["rewards"][first : last + 1, column] = 0.0
