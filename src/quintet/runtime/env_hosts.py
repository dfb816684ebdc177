"""Env hosts that are workers: the environments in such a worker, and the connection of the controller to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quintet.config.native.envs import InteractiveEnvSection
from quintet.config.native.experiment import Experiment
from quintet.envs.hosted_envs import EnvRequest, HostedVectorEnv, HostWait
from quintet.envs.mixed_env import build_run_envs
from quintet.envs.vector_env import EnvEvent, VectorEnv
from quintet.runtime.calls.connection import StartedCall, WorkerConnection
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.remote_interface import HOSTED_ENVS

HOST_POLL_SECONDS = 0.01
"""How long a host waits for an event of its worker processes before it takes further requests."""
HINT = "see the logs of their ranks in the run directory; rerun the same command to continue from the last checkpoint"


class LocalHostedEnvs:
    """See `HostedEnvs`."""

    def __init__(self) -> None:
        self._envs: VectorEnv | None = None

    def build(self, config: Experiment) -> None:
        self.close()
        self._envs = build_run_envs(config)

    def exchange(self, requests: Sequence[EnvRequest], wait_seconds: float) -> Sequence[EnvEvent]:
        """See `HostedEnvs.exchange`.

        Raises:
            ValueError: `build` has not been called.
        """
        if self._envs is None:
            raise ValueError("the environments were called before they were built")
        for request in requests:
            if request.seed is not None:
                self._envs.start(request.episode, request.seed)
            elif request.actions is not None:
                self._envs.step(request.episode, request.actions)
            else:
                self._envs.drop(request.episode)
        return self._envs.poll(wait=wait_seconds > 0, seconds=wait_seconds)

    def close(self) -> None:
        """End all episodes and their processes."""
        if self._envs is not None:
            self._envs.close()
            self._envs = None


@dataclass(slots=True, eq=False)
class EnvHostConnection:
    """See `HostConnection`."""

    worker: WorkerConnection
    config: Experiment
    wait_seconds: float
    """How long an exchange waits for an event."""
    _started: StartedCall | None = None
    """The last call, if its result has not been taken."""

    @property
    def rank(self) -> int:
        return self.worker.rank

    @property
    def lost_reason(self) -> str | None:
        return self.worker.lost_reason

    def fileno(self) -> int:
        return self.worker.fileno()

    def check_deadline(self) -> None:
        """See `HostConnection.check_deadline`: nothing to do, since `WorkerListener` limits the time of calls."""

    def start_build(self) -> None:
        self._started = self.worker.start(RemoteCall(HOSTED_ENVS, "build", {"config": self.config}))

    def start_exchange(self, requests: Sequence[EnvRequest]) -> None:
        arguments = {"requests": requests, "wait_seconds": self.wait_seconds}
        self._started = self.worker.start(RemoteCall(HOSTED_ENVS, "exchange", arguments))

    def finish(self) -> Sequence[EnvEvent]:
        """See `HostConnection.finish`; `build` returns None."""
        started, self._started = self._started, None
        events: Sequence[EnvEvent] = self.worker.finish(started) or ()
        return events

    def close(self) -> None:
        """See `HostConnection.close`; the worker ends with the controller."""


def hosted_vector_env(
    workers: Sequence[WorkerConnection],
    config: Experiment,
    take_connected_workers: Callable[[], Sequence[WorkerConnection]] = tuple,
) -> HostedVectorEnv:
    """Build the environments of a run on standalone workers; `take_connected_workers` returns those that
    were started again.

    If the envs run in the processes of the hosts themselves, all events are awaited, so that their order is that of a
    single process. If they run in worker processes of the hosts (`env.processes`), none waits for another.

    Raises:
        MachineError: the workers are lost, or cannot build them.
    """
    envs = [env.config for env in config.run_envs]
    waits_for_all = all(isinstance(env, InteractiveEnvSection) and env.processes is None for env in envs)
    wait_seconds = 0.0 if waits_for_all else HOST_POLL_SECONDS
    wait = HostWait(float(config.placement.join_timeout_seconds), "placement.join_timeout_seconds", HINT)

    def connect(workers: Sequence[WorkerConnection]) -> list[EnvHostConnection]:
        return [EnvHostConnection(worker, config, wait_seconds) for worker in workers]

    connected = lambda: connect(take_connected_workers())  # noqa: E731
    return HostedVectorEnv(connect(workers), wait, waits_for_all=waits_for_all, take_connected_hosts=connected)
