"""Where the robots of a stage are simulated, a share of them each: in this process, in a worker process, or on a server
of an environment service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quintet.embodied_records import ChunkResult
from quintet.envs.simulators.robot_messages import ResetResult, SimulatorDescription, description, reset_result
from quintet.envs.simulators.vector_env import RobotVectorEnv
from quintet.records import Failure


class RobotsLostError(Exception):
    """The robots of a host cannot be simulated until their next reset."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class ChunkActions:
    """Actions of a chunk of some robots."""

    actions: np.ndarray
    """float32 [B, C, D]."""
    record_frames: bool
    """Render a picture after each action."""


class RobotHost(Protocol):
    """Host of B robots. Calls of several hosts run at the same time, started before the first result is awaited.
    The arrays of a result are valid until the next call is started."""

    num_robots: int

    def start_description(self) -> None:
        """Start the simulator."""

    def finish_description(self) -> SimulatorDescription:
        """
        Raises:
            RobotsLostError: the simulator does not start.
        """

    def start_reset(self, start_states: np.ndarray) -> None:
        """Start a reset of all robots into start states, int64 [B, K]; see `RobotVectorEnv.reset`."""

    def finish_reset(self) -> ResetResult:
        """
        Raises:
            RobotsLostError: the simulator has failed.
        """

    def start_chunk(self, chunk: ChunkActions) -> None:
        """Start a chunk of all robots."""

    def finish_chunk(self) -> ChunkResult:
        """
        Raises:
            RobotsLostError: the simulator has failed.
        """

    def send(self) -> None:
        """Send the calls that were started; called after the last of them."""

    def offload(self) -> None:
        """Free the memory of the simulator until the next reset."""

    def close(self) -> None:
        """Free the simulator."""


class LocalRobots:
    """Robots that this process simulates while their result is awaited; see `RobotHost`."""

    def __init__(self, env: RobotVectorEnv) -> None:
        self.num_robots = env.num_robots
        self._env = env
        self._start_states = np.empty((0, 0), np.int64)
        self._chunk = ChunkActions(np.empty((0, 0, 0), np.float32), False)

    def start_description(self) -> None:
        self._env.simulator.prepare()

    def finish_description(self) -> SimulatorDescription:
        return description(self._env)

    def start_reset(self, start_states: np.ndarray) -> None:
        self._start_states = start_states

    def finish_reset(self) -> ResetResult:
        return reset_result(self._env, self._start_states)

    def start_chunk(self, chunk: ChunkActions) -> None:
        self._chunk = chunk

    def finish_chunk(self) -> ChunkResult:
        self._env.record_frames = self._chunk.record_frames
        return self._env.step_chunk(self._chunk.actions)

    def send(self) -> None:
        """See `RobotHost`."""

    def offload(self) -> None:
        self._env.offload()

    def close(self) -> None:
        self._env.close()
