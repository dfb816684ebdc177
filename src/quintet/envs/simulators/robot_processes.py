"""Worker processes that simulate robots; the worker itself is `quintet.envs.simulators.robot_process_main`."""

from __future__ import annotations

import math
import os
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quintet.config.native.envs import SimulatorConfig
from quintet.envs.service.payload import JSON, encode_payload
from quintet.envs.simulators.registry import simulator_module
from quintet.envs.simulators.robot_host import RobotsLostError
from quintet.envs.simulators.robot_messages import Message
from quintet.envs.simulators.shared_arrays import SharedArrayReader
from quintet.envs.validation import INVALID_OUTPUT, InvalidEnvOutputError
from quintet.records import Failure
from quintet.sandbox.worker_processes import ProcessEnd, WorkerProcess, WorkerProcesses

WORKER = "quintet.envs.simulators.robot_process_main"
DESCRIPTORS_PER_READ = 16


@dataclass(frozen=True, slots=True)
class StageRequest:
    """A request for the robots of a stage."""

    stage: int
    where: str
    """`Failure.where` of a failure of the request."""
    seconds: float
    """Time limit."""


@dataclass(slots=True, eq=False)
class RobotProcess(WorkerProcess):
    """Worker process and its state. It executes requests one after another. The deadline belongs to the first."""

    failure: Failure | None = None
    replies: dict[int, Message] = field(default_factory=dict)
    """Replies that are not taken yet, by stage."""
    _requests: deque[StageRequest] = field(default_factory=deque)
    _readers: dict[int, SharedArrayReader] = field(default_factory=dict)
    _descriptors: deque[int] = field(default_factory=deque)

    @property
    def where(self) -> str:
        """`Failure.where` of a failure that happens now."""
        return self._requests[0].where if self._requests else "step"

    def request(self, request: StageRequest, message: Mapping[str, Any]) -> None:
        """Send a request."""
        self._requests.append(request)
        if len(self._requests) == 1:
            self.deadline = time.monotonic() + request.seconds
        self.send(encode_payload(message, JSON) + b"\n", request.seconds)

    def receive(self) -> None:
        """Take the replies that have arrived."""
        try:
            for message in self.receive_messages():
                self._take(message)
        except (InvalidEnvOutputError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            self.failure = self.failure or Failure(self.where, INVALID_OUTPUT, f"the worker process: {error}")

    def timeout_failure(self) -> Failure:
        """Return the failure of a process that exceeded its time limit."""
        limit = self._requests[0].seconds if self._requests else 0.0
        return Failure(self.where, "Timeout", f"no result after {limit:g} s: its process was killed")

    def receive_chunk(self) -> bytes | None:
        """Return the bytes that have arrived, and keep the descriptors of shared memory beside them."""
        try:
            chunk, descriptors, _, _ = socket.recv_fds(self.connection, 1 << 16, DESCRIPTORS_PER_READ)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return b""
        self._descriptors.extend(descriptors)
        return chunk

    def _take(self, message: Message) -> None:
        stage = self._requests.popleft().stage
        reader = self._readers.setdefault(stage, SharedArrayReader())
        self.replies[stage] = reader.read(message, self._descriptors)
        self.deadline = time.monotonic() + self._requests[0].seconds if self._requests else math.inf

    def close(self) -> None:
        """Close descriptors that no reply has used."""
        while self._descriptors:
            os.close(self._descriptors.popleft())


class RobotProcesses:
    """A fixed number of worker processes, each with a share of the robots of every stage."""

    def __init__(self, config: SimulatorConfig, num_robots: Sequence[Sequence[int]]) -> None:
        """`num_robots` by process and stage."""
        self._config, self._num_robots = config, num_robots
        self._setup = {"env": config.model_dump(mode="json")}
        self._processes: WorkerProcesses[RobotProcess] = WorkerProcesses(
            f"{WORKER}:work", self._receive, self._process_ended
        )
        self._slots: list[RobotProcess | None] = [None] * len(num_robots)

    def running(self, slot: int) -> RobotProcess:
        """Return the process of a slot, a new one if the last has ended.

        Raises:
            RobotsLostError: it cannot be forked.
        """
        self._processes.wait(0.0)
        process = self._slots[slot]
        if process is None or process.failure is not None:
            setup = self._setup | {"num_robots": self._num_robots[slot]}
            modules = (WORKER, simulator_module(self._config.simulator))
            process = self._slots[slot] = self._processes.fork(RobotProcess, setup, modules)
        if process is None:
            raise RobotsLostError(Failure("start", "ProcessDied", "the fork server of simulators has died"))
        return process

    def reply(self, process: RobotProcess, stage: int) -> Any:
        """Return the result of the request of a stage.

        Raises:
            RobotsLostError: the process has died or exceeds its time limit, or the simulator has failed.
        """
        while stage not in process.replies and process.failure is None:
            self._processes.wait()
        if stage not in process.replies and process.failure is not None:
            raise RobotsLostError(process.failure)
        message = process.replies.pop(stage)
        if "failure" in message:
            raise RobotsLostError(Failure(*map(str, message["failure"])))
        return message["result"]

    def end_processes(self) -> None:
        """End the processes; `running` starts new ones."""
        for process in self._processes:
            self._end(process, Failure("step", "Offloaded", "its simulator was offloaded"))

    def close(self) -> None:
        """End the processes and their fork server."""
        self.end_processes()
        self._processes.close()

    def _receive(self, process: RobotProcess) -> None:
        process.receive()
        if process.failure is not None:
            self._end(process, process.failure)

    def _process_ended(self, process: RobotProcess, end: ProcessEnd) -> None:
        died = Failure(process.where, "ProcessDied", end.describe("simulators"))
        self._end(process, process.timeout_failure() if end.timed_out else died)

    def _end(self, process: RobotProcess, failure: Failure) -> None:
        process.failure = failure
        self._processes.kill(process)
        process.close()
