"""The controller: the process that runs the algorithm, and its connection to the workers with learners and engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from quintet.config.native.experiment import Experiment
from quintet.config.native.tracking import ProfileConfig
from quintet.config.plan.process_layout import process_layout
from quintet.envs.hosted_envs import HostedVectorEnv
from quintet.rewards.judge_server import JudgeServer
from quintet.runtime.calls.listener import WorkerListener
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.remote_interface import WORKER
from quintet.runtime.calls.transport import Transport
from quintet.runtime.embodied.hosted_robots import RestartableWorker
from quintet.runtime.embodied.robot_learner_group import RobotLearnerGroup
from quintet.runtime.engines.engine_builders import standalone_engine_ranks
from quintet.runtime.engines.engine_weights import EngineWeights
from quintet.runtime.engines.remote_engines import RemoteEngines
from quintet.runtime.engines.weight_sources import PolicyWeights
from quintet.runtime.env_hosts import hosted_vector_env
from quintet.runtime.judge_servers import judge_server
from quintet.runtime.learners.remote_learners import LearnerGroup
from quintet.runtime.worker import Worker
from quintet.training.parallel.rendezvous import Rendezvous


class Controller:
    """Builds learners and engines on the workers of a transport."""

    def __init__(self, transport: Transport, listener: WorkerListener | None = None) -> None:
        """`listener` is where standalone workers connect, if the run has any."""
        self._transport = transport
        self._listener = listener
        self._standalone: dict[str, Transport] = {}
        """Transports of standalone components besides engines, by the name of their section of `placement`."""
        self._staging: list[LearnerGroup | RemoteEngines] = []
        """Handles with memory of staged weights."""

    @classmethod
    def in_process(cls) -> Controller:
        """Return a controller whose only worker runs in this process."""
        return cls(Transport(local=Worker()))

    @classmethod
    def on_ranks(cls, rendezvous: Rendezvous, listener: WorkerListener, join_seconds: float = 60.0) -> Controller:
        """Return a controller of all ranks, which connect to `listener`; call it on rank 0 while the others are in
        `run_worker`.

        Raises:
            MachineError: ranks did not connect within `join_seconds`.
        """
        worker = Worker(rendezvous.ranks, rendezvous.address)
        workers = listener.wait_for([process.rank for process in rendezvous.processes[1:]], join_seconds, "actor")
        return cls(Transport(workers, local=worker, rendezvous=rendezvous), listener)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._transport.world_size

    def build_learners(self, config: Experiment, policy: Path, *, sft: bool = False) -> LearnerGroup:
        """Build the learners of the model at `policy` on all workers; with `sft` those of supervised fine-tuning."""
        arguments = {"config": config, "policy": policy, "sft": sft}
        self._transport.broadcast(RemoteCall(WORKER, "build_learners", arguments))
        self._connect(config)
        standalone = {} if sft else self._standalone
        learners = LearnerGroup(self._transport, config, policy, standalone, sft=sft)
        self._staging.append(learners)
        return learners

    def _connect(self, config: Experiment) -> None:
        """Wait for the standalone workers, unless they have connected before.

        Raises:
            MachineError: some did not connect in time.
        """
        if self._listener is None or self._standalone or config.sft_only is not None:
            return
        for learners in process_layout(config).standalone_learners:
            seconds = config.placement.join_timeout_seconds
            workers = self._listener.wait_for(learners.ranks, seconds, "learners")
            transport = Transport(workers, learners.name)
            self._standalone |= dict.fromkeys(learners.components, transport)

    def shard_writers(self, config: Experiment) -> list[str]:
        """Return the names of all ranks but the first that write shards of the run's checkpoints."""
        standalone = process_layout(config).standalone_learners if self._listener else ()
        names = (learners.shard_writer(rank) for learners in standalone for rank in learners.ranks)
        return [*map(str, range(1, self.world_size)), *names]

    def build_remote_engines(self, config: Experiment, policy: Path, learners: LearnerGroup) -> RemoteEngines:
        """Start to build engines of the model at `policy` on all workers that have one, except rank 0, after the
        learners; they get the weights of `learners`.

        Raises:
            MachineError: workers did not connect in time.
        """
        adapted = learners.actor if config.policy.lora else None
        weights = PolicyWeights(learners, self._transport, EngineWeights(config, learners.actor.weights, adapted))
        if self._listener is None:
            return RemoteEngines(self._transport, (), config, policy, weights)
        ranks = standalone_engine_ranks(config)
        standalone = self._listener.wait_for(ranks, config.placement.join_timeout_seconds)
        restarted = self._listener.take_connected_workers
        engines = RemoteEngines(self._transport, standalone, config, policy, weights, restarted)
        self._staging.append(engines)
        return engines

    def start_judge_servers(self, config: Experiment) -> list[tuple[str, JudgeServer]]:
        """Start the servers of judges on the nodes of their devices; return each with the section of its judge.

        Raises:
            MachineError: one does not start.
        """
        call = RemoteCall(WORKER, "start_judge_servers", {"config": config})
        wait = self._transport.call_others(call)
        addresses = [self._transport.call(call), *wait()]
        # other ranks end their servers when they end
        close = partial(self._transport.call, RemoteCall(WORKER, "close_judge_servers"))
        listed = [address for rank in addresses for address in rank]
        return [judge_server(config, section, url, token, close) for section, url, token in listed]

    def build_env_hosts(self, config: Experiment) -> HostedVectorEnv | None:
        """Build the environments on the standalone workers that host them; None if the run has none of these.

        Raises:
            ConfigError: a custom env cannot be loaded.
            MachineError: workers did not connect in time.
        """
        ranks, seconds = process_layout(config).standalone.get("envs", ()), config.placement.join_timeout_seconds
        if self._listener is None or not ranks:
            return None
        take_connected_workers = partial(self._listener.take_connected_workers, ranks)
        return hosted_vector_env(self._listener.wait_for(ranks, seconds), config, take_connected_workers)

    def build_robot_learners(self, config: Experiment, policy: Path) -> RobotLearnerGroup:
        """Build the robots and the learner of the action policy at `policy` on all workers; robots, or copies of the
        policy that sample actions, on standalone workers if these have devices for them.

        Raises:
            MachineError: workers did not connect in time, or cannot build their part.
        """
        listener = self._listener
        if listener is None:
            return RobotLearnerGroup(self._transport, config, policy)
        standalone = process_layout(config).standalone
        env_ranks, policy_ranks = standalone.get("envs", ()), standalone.get("rollout", ())
        joined = listener.wait_for({*env_ranks, *policy_ranks}, config.placement.join_timeout_seconds)
        workers = {worker.rank: worker for worker in joined}
        robots = [
            RestartableWorker(workers[rank], partial(listener.take_connected_workers, [rank])) for rank in env_ranks
        ]
        policies = [workers[rank] for rank in policy_ranks]
        return RobotLearnerGroup(self._transport, config, policy, robots, policies)

    @contextmanager
    def profiled(self, config: ProfileConfig, directory: Path, step: int) -> Iterator[None]:
        """Profile a step on the ranks that `config` lists, those with devices of the actor; their files are complete
        at the end of the context."""
        arguments = {"config": config, "directory": directory, "step": step}
        self._transport.broadcast(RemoteCall(WORKER, "start_profile", arguments))
        stop = RemoteCall(WORKER, "stop_profile", {"step": step})
        try:
            yield
        except BaseException:
            self._transport.call(stop)  # on this rank alone: another one may be the cause
            raise
        self._transport.broadcast(stop)

    def check_alive(self) -> None:
        """Check that all workers are alive.

        Raises:
            RankDiedError: a worker has died; the message names it.
        """
        self._transport.check_alive()
        for transport in self._standalone.values():
            transport.check_alive()

    def close(self) -> None:
        """Stop all workers, and release the memory of staged weights; workers that have already ended are ignored."""
        self._transport.close()
        if self._listener is not None:
            self._listener.close()
        for staging in self._staging:
            staging.close()
