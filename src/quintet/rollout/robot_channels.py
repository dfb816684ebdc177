"""Channels between robots and their policy: actions that wait for robots, and observations that wait for the policy.

Both run in the thread of the rollout, so nothing waits in a queue: what passes through is counted, and how long the
policy waits for robots.
"""

from __future__ import annotations

import time

import numpy as np

from quintet.config.native.placement import PlacementConfig
from quintet.embodied_records import ChunkResult, RobotObservation
from quintet.rollout.channel import ChannelCounter
from quintet.rollout.chunk_rollout import RobotGroup


class RobotChannels:
    """See `RobotGroup`: robots with counts of the actions and observations that pass, one item per stage."""

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
