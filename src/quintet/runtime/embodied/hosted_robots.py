"""Robots on standalone workers: the ones of a worker, and the controller's connections to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quintet.config.native.experiment import Experiment
from quintet.envs.simulators.remote_robots import RemoteRobots
from quintet.envs.simulators.robot_envs import RobotEnvs, build_stages, share_sizes
from quintet.envs.simulators.robot_host import RobotsLostError
from quintet.envs.simulators.robot_messages import WHERE, Call, ResetResult, chunk_message, reset_message
from quintet.envs.simulators.robot_stage import RobotStage
from quintet.errors import MachineError
from quintet.records import Failure
from quintet.runtime.calls.connection import CALL_ERRORS, CallError, WorkerConnection, WorkerLostError
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.remote_interface import HOSTED_ROBOTS
from quintet.runtime.process_settings import configure_process


class LocalHostedRobots:
    """See `HostedRobots`."""

    def __init__(self) -> None:
        self._stages: dict[bool, list[RobotStage]] = {}
        """Stages of training and of validations."""

    def build(self, config: Experiment, num_robots: int, *, is_validation: bool) -> Mapping[str, Any]:
        configure_process(config)
        for stage in self._stages.pop(is_validation, ()):
            stage.close()
        stages = build_stages(config.simulator_config(is_validation=is_validation), num_robots)
        self._stages[is_validation] = stages
        descriptions = [stage.describe() for stage in stages]
        return asdict(descriptions[0])

    def reset(self, stage: int, start_states: np.ndarray, *, is_validation: bool) -> Mapping[str, Any]:
        robots = self._stages[is_validation][stage]
        return reset_message(ResetResult(robots.reset(start_states), robots.task_indices))

    def step_chunk(
        self, stage: int, actions: np.ndarray, *, record_frames: bool, is_validation: bool
    ) -> Mapping[str, Any]:
        robots = self._stages[is_validation][stage]
        robots.start_chunk(actions, record_frames=record_frames)
        return chunk_message(robots.finish_chunk())

    def offload(self) -> None:
        for stage in (stage for stages in self._stages.values() for stage in stages):
            stage.offload()

    def close(self) -> None:
        """End the simulators."""
        for stage in (stage for stages in self._stages.values() for stage in stages):
            stage.close()
        self._stages = {}


@dataclass(slots=True, eq=False)
class RestartableWorker:
    """The worker of a rank, whose process may be started again."""

    connection: WorkerConnection
    """Connection to its present process."""
    take_connected_workers: Callable[[], Sequence[WorkerConnection]] = tuple
    """Returns the connections to the processes of the rank that were started since the last call."""

    def take_restarted(self) -> None:
        """Continue with the process that was started in place of a lost one."""
        if self.connection.lost_reason is not None and (connected := self.take_connected_workers()):
            self.connection = connected[-1]


def start_call(connection: WorkerConnection, call: RemoteCall) -> Callable[[], Any]:
    """Send a call; return the function that waits for its result, which raises as `WorkerConnection.finish` does, also
    if the worker was lost before the call."""
    try:
        return connection.start(call).finish
    except WorkerLostError as error:
        lost = error

    def fail() -> Any:
        raise lost

    return fail


class RobotsOfWorker:
    """The robots of a worker, which are built again if its process was started again, or if their build failed."""

    def __init__(self, worker: RestartableWorker, config: Experiment, num_robots: int, *, is_validation: bool) -> None:
        """Start to build stages of `num_robots` robots each; `is_validation` builds those of validations."""
        self.worker, self.num_robots, self.is_validation = worker, num_robots, is_validation
        arguments = {"config": config, "num_robots": num_robots, "is_validation": is_validation}
        self._build = RemoteCall(HOSTED_ROBOTS, "build", arguments)
        worker.take_restarted()
        self._start_build()

    def _start_build(self) -> None:
        self._built_by = self.worker.connection
        self._finish_build: Callable[[], Any] | None = start_call(self._built_by, self._build)
        self._description: Mapping[str, Any] = {}
        self._build_error: CallError | None = None

    def wait_for_build(self) -> CallError | None:
        """Wait until the robots are built; return why they are not."""
        if self._finish_build is not None:
            finish, self._finish_build = self._finish_build, None
            try:
                self._description = finish()
            except CALL_ERRORS as error:
                self._build_error = error
        return self._build_error

    def describe(self) -> Mapping[str, Any]:
        """Return the message with the description of the simulator; raises the error of the build if it failed."""
        if (error := self.wait_for_build()) is not None:
            raise error
        return self._description

    def build_if_needed(self) -> WorkerConnection:
        """Start to build the robots again if the worker does not have them; return its connection."""
        self.worker.take_restarted()
        if self._built_by is not self.worker.connection or self.wait_for_build() is not None:
            self._start_build()
        return self._built_by


class RobotsOfStage(RemoteRobots):
    """The robots of a stage on a worker."""

    def __init__(self, robots: RobotsOfWorker, stage: int) -> None:
        super().__init__(robots.num_robots)
        self._robots, self._stage = robots, stage
        self._call: Call = "describe"
        self._finish: Callable[[], Mapping[str, Any]] = robots.describe
        """Waits for the result of the call that was started."""
        self._reset_by = robots.worker.connection
        """The process in which the robots were reset; another one does not have them."""

    def start(self, call: Call, arguments: Mapping[str, Any]) -> None:
        self._call = call
        if call != "step":
            self._reset_by = self._robots.build_if_needed()
        if call == "describe":
            self._finish = self._robots.describe
            return
        method = "step_chunk" if call == "step" else call
        stage_arguments = {"stage": self._stage, "is_validation": self._robots.is_validation}
        self._finish = start_call(self._reset_by, RemoteCall(HOSTED_ROBOTS, method, {**arguments, **stage_arguments}))

    def result(self) -> Mapping[str, Any]:
        """Return the result of the call.

        Raises:
            RobotsLostError: the worker is lost, or the call failed.
            MachineError: the simulator cannot be built as it is configured.
        """
        try:
            return self._finish()
        except CALL_ERRORS as error:
            # without robots every call fails; the build says why
            cause = self._robots.wait_for_build() or error
            if self._call == "describe" and isinstance(cause, MachineError):
                raise
            raise RobotsLostError(Failure(WHERE[self._call], type(cause).__name__, str(cause))) from error

    def offload(self) -> None:
        with suppress(*CALL_ERRORS):  # the next reset reports what is wrong with the worker
            self._robots.worker.connection.call(RemoteCall(HOSTED_ROBOTS, "offload"))

    def close(self) -> None:
        """See `RobotHost`: the simulators end with their worker."""


def hosted_robot_envs(
    workers: Sequence[RestartableWorker],
    config: Experiment,
    num_robots: int,
    is_validation: bool,
) -> RobotEnvs:
    """Build robots on workers, each with a share of every stage.

    Raises:
        ConfigError: the simulator is not configured or not installed.
        MachineError: no worker can build them.
    """
    env = config.simulator_config(is_validation=is_validation)
    sizes = share_sizes(num_robots // env.pipeline_stages, len(workers))
    robots = [
        RobotsOfWorker(worker, config, size, is_validation=is_validation)
        for worker, size in zip(workers, sizes, strict=False)
    ]
    stages = range(env.pipeline_stages)
    hosts = [[RobotsOfStage(each, stage) for each in robots] for stage in stages]
    return RobotEnvs([RobotStage(host, auto_reset=env.auto_reset) for host in hosts])
