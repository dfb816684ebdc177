"""Channels between robots and their policy: actions that wait for robots, and observations that wait for the policy.

Both run in the thread of the rollout, so nothing blocks here: the queues are a measure of what passes through them, and
of how long the policy waits for robots.
"""

from __future__ import annotations

import time

import numpy as np

from quintet.config.native.placement import PlacementConfig
from quintet.embodied_records import ChunkResult, RobotObservation
from quintet.rollout.channel import Channel
from quintet.rollout.chunk_rollout import RobotGroup


class RobotChannels:
    """See `RobotGroup`: robots behind a channel of actions and one of observations, whose items are stages."""

    def __init__(self, robots: RobotGroup, placement: PlacementConfig) -> None:
        self.num_stages, self.num_robots = robots.num_stages, robots.num_robots
        self.num_start_states = robots.num_start_states
        self._robots = robots
        self._actions = Channel[np.ndarray].from_config(placement.rollout.action_channel)
        self._observations = Channel[RobotObservation].from_config(placement.envs.channel)

    def reset(self, stage: int, start_states: np.ndarray) -> RobotObservation:
        started = time.monotonic()
        return self._passed_on(self._robots.reset(stage, start_states), time.monotonic() - started)

    def start_chunk(self, stage: int, actions: np.ndarray) -> None:
        self._actions.put_nowait(actions)
        queued = self._actions.get(0)
        self._robots.start_chunk(stage, actions if queued is None else queued)

    def finish_chunk(self, stage: int) -> ChunkResult:
        started = time.monotonic()
        result = self._robots.finish_chunk(stage)
        self._passed_on(result.observation, time.monotonic() - started)
        return result

    def _passed_on(self, observation: RobotObservation, seconds: float) -> RobotObservation:
        """Pass an observation through its channel; the policy has waited for it."""
        self._observations.add_waiting(get_seconds=seconds)
        self._observations.put_nowait(observation)
        return self._observations.get(0) or observation

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of both channels since the last call."""
        return {**self._actions.pop_metrics(), **self._observations.pop_metrics()}

    def close(self) -> None:
        self._robots.close()
