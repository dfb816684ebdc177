"""Robots and policies on standalone workers, as the controller sees them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quintet.config.native.experiment import Experiment
from quintet.embodied_records import ActionSample, ActionSampling
from quintet.envs.simulators.remote_robots import WHERE, Call, RemoteRobots
from quintet.envs.simulators.robot_envs import RobotEnvs, share_sizes
from quintet.envs.simulators.robot_host import RobotsLostError
from quintet.envs.simulators.robot_stage import RobotStage
from quintet.errors import MachineError
from quintet.records import Failure
from quintet.runtime.embodied.simulator_config import simulator_of
from quintet.runtime.remote_call import RemoteCall
from quintet.runtime.remote_interface import STANDALONE_POLICY, STANDALONE_ROBOTS
from quintet.runtime.standalone.connection import WorkerConnection, WorkerLostError
from quintet.runtime.standalone.messages import RemoteCallError
from quintet.runtime.standalone.staged_weights import StagedWeights
from quintet.runtime.transport import translate_worker_errors

if TYPE_CHECKING:
    from torch import Tensor


CallError = WorkerLostError | RemoteCallError | MachineError
CALL_ERRORS = (WorkerLostError, RemoteCallError, MachineError)
"""What `WorkerConnection.finish` raises."""


class OrderedCalls:
    """Calls to a worker, which executes them in order; their results can be taken in any order."""

    def __init__(
        self, worker: WorkerConnection, take_connected_workers: Callable[[], Sequence[WorkerConnection]] = tuple
    ) -> None:
        """`take_connected_workers` returns the worker if it was started again."""
        self.worker, self._take_connected_workers = worker, take_connected_workers
        self._pending: deque[int] = deque()
        self._results: dict[int, Any] = {}
        self._count = 0

    def start(self, call: RemoteCall, worker: WorkerConnection | None = None) -> int:
        """Send a call; return its number for `finish`. `worker` is the worker that has the state that the call needs:
        if it was restarted since, the call fails like one to a lost worker."""
        self._count += 1
        try:
            if worker is not None and worker is not self.worker:
                raise worker.lost_error()
            self.worker.start(call)
            self._pending.append(self._count)
        except WorkerLostError as error:
            self._results[self._count] = error
        return self._count

    def finish(self, number: int) -> Any:
        """Wait for the result of a call.

        Raises:
            WorkerLostError: the worker is lost.
            RemoteCallError: the call failed.
            MachineError: the call failed by an error of the user or the machine.
        """
        while number not in self._results:
            pending = self._pending.popleft()
            try:
                self._results[pending] = self.worker.finish()
            except CALL_ERRORS as error:
                self._results[pending] = error  # it is of this call, whichever is waited for
        result = self._results.pop(number)
        if isinstance(result, CALL_ERRORS):
            raise result
        return result

    def take_restarted(self) -> None:
        """Continue with the worker that was started again in place of a lost one."""
        if self.worker.lost_reason is not None and (arrived := self._take_connected_workers()):
            self._results |= dict.fromkeys(self._pending, self.worker.lost_error())
            self._pending.clear()
            self.worker = arrived[-1]


class RobotsOfWorker:
    """The robots of a standalone worker, which are built again if it was started again, or if their build failed."""

    def __init__(self, calls: OrderedCalls, config: Experiment, num_robots: int, *, is_validation: bool) -> None:
        """Start to build stages of `num_robots` robots each; `is_validation` builds those of validations."""
        self.calls, self.is_validation = calls, is_validation
        arguments = {"config": config, "num_robots": num_robots, "is_validation": is_validation}
        self._build = RemoteCall(STANDALONE_ROBOTS, "build", arguments)
        calls.take_restarted()
        self._start_build()

    def _start_build(self) -> None:
        self._built_by = self.calls.worker
        self._build_number: int | None = self.calls.start(self._build)
        self._description: Mapping[str, Any] = {}
        self._build_error: CallError | None = None

    @property
    def build_error(self) -> CallError | None:
        """Wait until the robots are built; return why they are not."""
        if self._build_number is not None:
            number, self._build_number = self._build_number, None
            try:
                self._description = self.calls.finish(number)
            except CALL_ERRORS as error:
                self._build_error = error
        return self._build_error

    @property
    def description(self) -> Mapping[str, Any]:
        """Message with the description of the simulator; raises as `OrderedCalls.finish` does if the build failed."""
        if (error := self.build_error) is not None:
            raise error
        return self._description

    def build_if_needed(self) -> WorkerConnection:
        """Start to build the robots again if the worker does not have them; return the worker."""
        self.calls.take_restarted()
        if self._built_by is not self.calls.worker or self.build_error is not None:
            self._start_build()
        return self._built_by


class StandaloneRobotChannel:
    """See `RobotChannel`: the robots of a stage on a standalone worker."""

    def __init__(self, robots: RobotsOfWorker, stage: int) -> None:
        self._robots, self._stage = robots, stage
        self._call: Call = "describe"
        self._number = 0
        """Number of the call that was started, if it is not `describe`."""
        self._reset_by = robots.calls.worker
        """The worker in which the robots were reset."""

    def start(self, call: Call, arguments: Mapping[str, Any]) -> None:
        self._call = call
        if call != "step":
            self._reset_by = self._robots.build_if_needed()
        if call != "describe":
            method = "step_chunk" if call == "step" else call
            stage_arguments = {"stage": self._stage, "is_validation": self._robots.is_validation}
            remote_call = RemoteCall(STANDALONE_ROBOTS, method, {**arguments, **stage_arguments})
            self._number = self._robots.calls.start(remote_call, self._reset_by)

    def send(self) -> None:
        """See `RobotChannel`; calls are sent when they are started."""

    def result(self) -> Mapping[str, Any]:
        """See `RobotChannel`.

        Raises:
            RobotsLostError: the worker is lost, or the call failed.
            MachineError: the simulator cannot be built as it is configured.
        """
        try:
            if self._call == "describe":
                return self._robots.description
            result: Mapping[str, Any] = self._robots.calls.finish(self._number)
            return result
        except CALL_ERRORS as error:
            # without robots every call fails; the build says why
            cause = self._robots.build_error or error
            if self._call == "describe" and isinstance(cause, MachineError):
                raise
            raise RobotsLostError(Failure(WHERE[self._call], type(cause).__name__, str(cause))) from error

    def offload(self) -> None:
        with suppress(*CALL_ERRORS):  # the next reset reports what is wrong with the worker
            self._robots.calls.finish(self._robots.calls.start(RemoteCall(STANDALONE_ROBOTS, "offload")))

    def close(self) -> None:
        """See `RobotChannel`: the simulators end with their worker."""


def standalone_robots(
    workers: Sequence[OrderedCalls],
    config: Experiment,
    num_robots: int,
    is_validation: bool,
) -> RobotEnvs:
    """Build robots on standalone workers, each with a share of every stage.

    Raises:
        ConfigError: the simulator is not configured or not installed.
        MachineError: no worker can build them.
    """
    env = simulator_of(config, is_validation=is_validation)
    sizes = share_sizes(num_robots // env.pipeline_stages, len(workers))
    robots = [
        RobotsOfWorker(calls, config, size, is_validation=is_validation)
        for calls, size in zip(workers, sizes, strict=False)
    ]
    stages = range(env.pipeline_stages)
    hosts = [
        [RemoteRobots(StandaloneRobotChannel(each, stage), size) for each, size in zip(robots, sizes, strict=True)]
        for stage in stages
    ]
    return RobotEnvs([RobotStage(host, auto_reset=env.auto_reset) for host in hosts])


class StandalonePolicies:
    """Copies of the policy on standalone workers, which sample for equal shares of the robots."""

    def __init__(
        self,
        workers: Sequence[OrderedCalls],
        config: Experiment,
        policy: Path,
        weights: Callable[[], Iterator[tuple[str, Tensor]]],
    ) -> None:
        """Build the model at `policy` on the workers; `weights` yields the learner's weights.

        Raises:
            RankDiedError: a worker is lost, or failed.
            MachineError: a worker cannot build it.
        """
        self._copies = [(worker, worker.worker) for worker in workers]
        """Calls to each worker, and the worker that has the copy: one that was started again has none."""
        self._weights, self._staged = weights, StagedWeights(num_buffers=1)
        self._call([RemoteCall(STANDALONE_POLICY, "build", {"config": config, "policy": policy})] * len(workers))

    def sync_weights(self) -> None:
        """Load the learner's weights into all copies; raises as `sample` does."""
        self._staged.stage(self._weights())
        staged = [self._staged.for_worker(worker) for _, worker in self._copies]
        self._call([RemoteCall(STANDALONE_POLICY, "load_weights", {"weights": each}) for each in staged])

    def sample(self, inputs: Mapping[str, Tensor], uniforms: Tensor | None, sampling: ActionSampling) -> ActionSample:
        """See `ActionPolicy.sample`.

        Raises:
            RankDiedError: a worker is lost, or failed.
        """
        rows = len(next(iter(inputs.values())))
        parts = [part for part in torch.arange(rows).tensor_split(len(self._copies)) if len(part)]
        calls = []
        for part in parts:
            arguments = {
                "inputs": {name: tensor[part] for name, tensor in inputs.items()},
                "uniforms": None if uniforms is None else uniforms[part],
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
            }
            calls.append(RemoteCall(STANDALONE_POLICY, "sample", arguments))
        samples = self._call(calls)
        return ActionSample(
            torch.cat([sample["actions"] for sample in samples]),
            torch.cat([sample["logprobs"] for sample in samples]),
            None if samples[0]["values"] is None else torch.cat([sample["values"] for sample in samples]),
        )

    def _call(self, calls: Sequence[RemoteCall]) -> list[Any]:
        """Execute a call on each of the first workers at the same time; return the results.

        Raises:
            RankDiedError: a worker is lost, or failed.
            MachineError: a call failed by an error of the user or the machine.
        """
        copies = self._copies[: len(calls)]
        numbers = [each.start(call, worker) for (each, worker), call in zip(copies, calls, strict=True)]
        results = []
        for (each, worker), number in zip(copies, numbers, strict=True):
            with translate_worker_errors(worker, "copy of the policy"):
                results.append(each.finish(number))
        return results

    def close(self) -> None:
        """Release the memory of weights."""
        self._staged.close()
