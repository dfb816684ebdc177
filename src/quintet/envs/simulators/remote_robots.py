"""Robots that another process simulates: calls and results as messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from quintet.config.native.envs import SimulatorConfig
from quintet.embodied_records import ChunkResult
from quintet.envs.simulators.robot_host import ChunkActions, RobotsLostError
from quintet.envs.simulators.robot_messages import (
    WHERE,
    Call,
    ResetResult,
    SimulatorDescription,
    chunk_from_message,
    description_from_message,
    reset_from_message,
)
from quintet.envs.simulators.robot_processes import RobotProcess, RobotProcesses, StageRequest
from quintet.envs.validation import INVALID_OUTPUT, InvalidEnvOutputError
from quintet.records import Failure

T = TypeVar("T")


class RemoteRobots(ABC):
    """See `RobotHost`; a subclass carries the calls to the robots."""

    def __init__(self, num_robots: int) -> None:
        self.num_robots = num_robots
        self._num_actions = 0

    @abstractmethod
    def start(self, call: Call, arguments: Mapping[str, Any]) -> None:
        """Start a call; `describe` and `reset` build the simulator if there is none."""

    @abstractmethod
    def result(self) -> Mapping[str, Any]:
        """Return the result of the call.

        Raises:
            RobotsLostError: there is none.
        """

    def send(self) -> None:  # noqa: B027 - most have nothing to do
        """See `RobotHost`; by default calls are sent when they are started."""

    def start_description(self) -> None:
        self.start("describe", {})

    def finish_description(self) -> SimulatorDescription:
        return self._parsed("describe", description_from_message)

    def start_reset(self, start_states: np.ndarray) -> None:
        self.start("reset", {"start_states": start_states})

    def finish_reset(self) -> ResetResult:
        return self._parsed("reset", reset_from_message, self.num_robots)

    def start_chunk(self, chunk: ChunkActions) -> None:
        self._num_actions = chunk.actions.shape[1]
        self.start("step", {"actions": chunk.actions, "record_frames": chunk.record_frames})

    def finish_chunk(self) -> ChunkResult:
        return self._parsed("step", chunk_from_message, self.num_robots, self._num_actions)

    def _parsed(self, call: Call, parse: Callable[..., T], *arguments: Any) -> T:
        """
        Raises:
            RobotsLostError: there is no result, or it is invalid.
        """
        try:
            return parse(self.result(), *arguments)
        except InvalidEnvOutputError as error:
            raise RobotsLostError(Failure(WHERE[call], INVALID_OUTPUT, str(error))) from error


class RobotsInProcess(RemoteRobots):
    """Robots of a stage in a worker process."""

    def __init__(
        self, processes: RobotProcesses, slot: int, stage: int, config: SimulatorConfig, num_robots: int
    ) -> None:
        super().__init__(num_robots)
        self._processes, self._slot, self._stage, self._config = processes, slot, stage, config
        self._process: RobotProcess | None = None
        """The process in which the robots were reset."""
        self._failure = Failure("step", "ProcessDied", "the robots were not reset")

    def start(self, call: Call, arguments: Mapping[str, Any]) -> None:
        if call != "step":
            self._start_process()
        if self._process is not None and self._process.failure is None:
            limits = self._config
            seconds = limits.chunk_timeout_seconds if call == "step" else limits.reset_timeout_seconds
            message = {"stage": self._stage, "call": call, **arguments}
            self._process.request(StageRequest(self._stage, WHERE[call], seconds), message)

    def result(self) -> Mapping[str, Any]:
        if self._process is None:
            raise RobotsLostError(self._failure)
        result: Mapping[str, Any] = self._processes.reply(self._process, self._stage)
        return result

    def offload(self) -> None:
        self._processes.end_processes()

    def close(self) -> None:
        self._processes.close()

    def _start_process(self) -> None:
        try:
            self._process = self._processes.running(self._slot)
        except RobotsLostError as error:
            self._process, self._failure = None, error.failure
