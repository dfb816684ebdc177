"""The robots of one stage, shared out over hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from quintet.embodied_records import ChunkResult, RobotEpisode, RobotObservation
from quintet.envs.simulators.robot_host import ChunkActions, RobotHost, RobotsLostError
from quintet.envs.simulators.robot_messages import SimulatorDescription
from quintet.errors import ConfigError, MachineError
from quintet.records import Failure, Outcome

HINT = "see the output of the simulator above"


@dataclass(slots=True, eq=False)
class _Share:
    """Robots of a host, and the state of their episodes as far as the stage needs it."""

    host: RobotHost
    robots: slice
    """Their positions in the stage."""
    running: np.ndarray
    """bool [n], robots whose episode has not ended."""
    returns: np.ndarray
    num_actions: np.ndarray
    num_resets: np.ndarray
    start_states: np.ndarray
    tasks: np.ndarray
    """Index of the task of each start state, int64 [n, K]."""
    failure: Failure | None = None
    """Failure of all robots that is in no result yet."""
    is_busy: bool = False
    """A chunk was started."""

    @classmethod
    def of(cls, host: RobotHost, robots: slice) -> _Share:
        size, no_states = host.num_robots, np.zeros((host.num_robots, 1), np.int64)
        counts = np.zeros(size, np.int64)
        return cls(host, robots, np.zeros(size, bool), np.zeros(size), counts, counts.copy(), no_states, no_states)

    def restart(self, start_states: np.ndarray) -> None:
        """Forget the episodes, and begin episodes at the start states, int64 [n, K]."""
        self.start_states, self.tasks = start_states, np.full_like(start_states, -1)
        self.failure, self.is_busy = None, False
        self.running[:] = True
        self.num_resets[:] = 0
        self._clear(slice(None))

    def record(self, result: ChunkResult, auto_reset: bool) -> None:
        """Follow the episodes of a result."""
        self.returns += result.rewards.sum(1, dtype=np.float64)
        self.num_actions += result.executed.sum(1)
        for episode in result.episodes:
            self.running[episode.robot] = auto_reset and episode.failure is None
            self.num_resets[episode.robot] += 1
            self._clear(episode.robot)

    def lost_episodes(self, failure: Failure, tasks: Sequence[str]) -> Iterator[RobotEpisode]:
        """End the running episodes, and yield their records."""
        for robot in np.flatnonzero(self.running).tolist():
            column = min(int(self.num_resets[robot]), self.start_states.shape[1] - 1)
            task = int(self.tasks[robot, column])
            yield RobotEpisode(
                robot,
                int(self.start_states[robot, column]),
                tasks[task] if 0 <= task < len(tasks) else "",
                float(self.returns[robot]),
                int(self.num_actions[robot]),
                False,
                False,
                Outcome.FAILED,
                failure,
            )
        self.running[:] = False

    def _clear(self, robots: int | slice) -> None:
        self.returns[robots] = 0.0
        self.num_actions[robots] = 0


class RobotStage:
    """B robots that are reset and moved together. Hosts that are lost only cost the episodes of their robots."""

    def __init__(self, hosts: Sequence[RobotHost], *, auto_reset: bool) -> None:
        ends = list(accumulate(host.num_robots for host in hosts))
        self._shares = [
            _Share.of(host, slice(end - host.num_robots, end)) for host, end in zip(hosts, ends, strict=True)
        ]
        self.num_robots = ends[-1]
        self._auto_reset = auto_reset
        self._tasks: Sequence[str] = ()
        self._observation: RobotObservation | None = None
        self._frame: np.ndarray | None = None

    def describe(self) -> SimulatorDescription:
        """Start the simulators and return their description.

        Raises:
            ConfigError: the simulator is not configured or not installed.
            MachineError: no simulator starts.
        """
        for share in self._shares:
            share.host.start_description()
        self._send()
        failures = []
        for share in self._shares:
            try:
                description = share.host.finish_description()
                self._tasks = description.tasks
            except RobotsLostError as error:
                failures.append(error.failure)
        if len(failures) == len(self._shares):
            raise _start_error(failures[0])
        return description

    def reset(self, start_states: np.ndarray) -> RobotObservation:
        """Start an episode of each robot from start states, int64 [B] or [B, K]; see `RobotVectorEnv.reset`.

        Raises:
            MachineError: the simulators of all robots fail twice.
        """
        start_states = start_states.reshape(self.num_robots, -1)
        parts = self._reset_shares(start_states)
        if not any(parts):
            # all processes or servers may have been lost since the last call
            parts = self._reset_shares(start_states)
        if not any(parts):
            raise _start_error(next(share.failure for share in self._shares if share.failure is not None))
        self._frame = None
        return self._joined(parts)

    @property
    def task_indices(self) -> np.ndarray:
        """Index in the description's tasks of each start state of the last reset, int64 [B, K]; -1 if unknown."""
        return np.concatenate([share.tasks for share in self._shares])

    def start_chunk(self, actions: np.ndarray, *, record_frames: bool) -> None:
        """Start to move the robots by `actions`, float32 [B, C, D]; those whose episode has ended stand."""
        self._num_actions = actions.shape[1]
        for share in self._shares:
            share.is_busy = share.failure is None and bool(share.running.any())
            if share.is_busy:
                share.host.start_chunk(ChunkActions(np.ascontiguousarray(actions[share.robots]), record_frames))
        self._send()

    def finish_chunk(self) -> ChunkResult:
        """Return the result of the chunk that was started last."""
        episodes: list[RobotEpisode] = []
        results: list[ChunkResult | None] = []
        for share in self._shares:
            result, ended = self._finish(share)
            results.append(result)
            episodes += (replace(episode, robot=episode.robot + share.robots.start) for episode in ended)
        before = self._observation
        observation = self._joined([None if result is None else result.observation for result in results])
        final = None
        if any(result is not None and result.final_observation is not None for result in results):
            final = _joined([_final(result) for result in results], self._shares, before)
        names = ("rewards", "terminated", "truncated", "executed")
        rewards, terminated, truncated, executed = (self._joined_actions(results, name) for name in names)
        frames = self._joined_frames(results)
        return ChunkResult(observation, rewards, terminated, truncated, executed, final, tuple(episodes), frames)

    def offload(self) -> None:
        """Free the memory of the simulators; the next call must be `reset`."""
        for share in self._shares:
            share.host.offload()

    def close(self) -> None:
        """Free the simulators."""
        for share in self._shares:
            share.host.close()

    def _send(self) -> None:
        for share in self._shares:
            share.host.send()

    def _reset_shares(self, start_states: np.ndarray) -> list[RobotObservation | None]:
        """Reset all robots; return the observations of each host, None for hosts that fail."""
        for share in self._shares:
            share.restart(start_states[share.robots])
            share.host.start_reset(share.start_states)
        self._send()
        parts: list[RobotObservation | None] = []
        for share in self._shares:
            try:
                result = share.host.finish_reset()
                share.tasks = result.tasks.copy()
                parts.append(result.observation)
            except RobotsLostError as error:
                share.failure = error.failure
                parts.append(None)
        return parts

    def _finish(self, share: _Share) -> tuple[ChunkResult | None, Sequence[RobotEpisode]]:
        """Return the result of a host, if it has one, and the episodes that ended."""
        if share.is_busy:
            share.is_busy = False
            try:
                result = share.host.finish_chunk()
            except RobotsLostError as error:
                share.failure = error.failure
            else:
                share.record(result, self._auto_reset)
                return result, result.episodes
        if share.failure is None:
            return None, ()
        return None, tuple(share.lost_episodes(share.failure, self._tasks))

    def _joined(self, parts: Sequence[RobotObservation | None]) -> RobotObservation:
        self._observation = _joined(parts, self._shares, self._observation)
        return self._observation

    def _joined_actions(self, results: Sequence[ChunkResult | None], name: str) -> np.ndarray:
        dtype = np.float32 if name == "rewards" else bool
        array = np.zeros((self.num_robots, self._num_actions), dtype)
        for share, result in zip(self._shares, results, strict=True):
            if result is not None:
                array[share.robots] = getattr(result, name)
        return array

    def _joined_frames(self, results: Sequence[ChunkResult | None]) -> np.ndarray | None:
        """Return the pictures of all robots; the pictures of hosts without results stay as they were."""
        recorded = [result.frames for result in results if result is not None and result.frames is not None]
        if not recorded:
            return None
        shape = recorded[0].shape[2:]
        last = self._frame if self._frame is not None else np.zeros((self.num_robots, *shape), np.uint8)
        frames = np.repeat(last[:, None], self._num_actions, axis=1)
        for share, result in zip(self._shares, results, strict=True):
            if result is not None and result.frames is not None:
                frames[share.robots] = result.frames
        self._frame = frames[:, -1].copy()
        return frames


def _start_error(failure: Failure) -> ConfigError | MachineError:
    if failure.error_type == "ConfigError":
        return ConfigError(failure.message, key="env.simulator")
    return MachineError(f"the simulator does not start: {failure.error_type}: {failure.message}", HINT)


def _final(result: ChunkResult | None) -> RobotObservation | None:
    return None if result is None else result.final_observation or result.observation


def _joined(
    parts: Sequence[RobotObservation | None], shares: Sequence[_Share], before: RobotObservation | None
) -> RobotObservation:
    """Return the observation of all robots; rows of missing parts are as before, or 0 if there were none."""
    like = next((part for part in parts if part is not None), before)
    if like is None:
        raise AssertionError("no observation")
    if before is None:
        size = sum(share.host.num_robots for share in shares)
        images = np.zeros((size, *like.images.shape[1:]), np.uint8)
        before = RobotObservation(images, np.zeros((size, *like.state.shape[1:]), np.float32), ("",) * size)
    positions = (np.arange(share.robots.start, share.robots.stop) for share in shares)
    return before.with_rows([(rows, part) for rows, part in zip(positions, parts, strict=True) if part is not None])
