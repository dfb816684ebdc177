"""Workers: each rank executes the controller's calls with its part of the learners and its engine."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet import trace
from quintet.config.native.experiment import Experiment
from quintet.config.native.tracking import ProfileConfig
from quintet.runtime.engine_worker import EngineWorkerOfRank, build_engine_worker
from quintet.runtime.frozen_policy import FrozenPolicyOfRank
from quintet.runtime.judge_servers import LOOPBACK, JudgeServers
from quintet.runtime.local_learners import LocalLearners
from quintet.runtime.process_settings import configure_process, seed_torch
from quintet.runtime.profiler import RankProfiler
from quintet.runtime.remote_call import RemoteCall, RemoteRef
from quintet.runtime.remote_interface import ENGINE, LEARNERS, REMOTE_OBJECTS, ROBOTS, WORKER, remote_methods
from quintet.training.parallel.process_group import RankGroup

if TYPE_CHECKING:
    from quintet.runtime.embodied.robot_learner import LocalRobotLearner

SINGLE_RANK = RankGroup()


class Worker:
    """`ComponentBuilder` that executes calls with the learners and the engine of this rank."""

    def __init__(
        self, ranks: RankGroup = SINGLE_RANK, address: str = LOOPBACK, shard_writer: str | None = None
    ) -> None:
        """Ranks of other machines reach this one at `address`. A rank without the actor writes shards of checkpoints as
        `shard_writer`."""
        self._shard_writer = shard_writer
        self._ranks = ranks
        self._address = address
        self._judges: JudgeServers | None = None
        self._learners: LocalLearners | FrozenPolicyOfRank | None = None
        self._engine: EngineWorkerOfRank | None = None
        self._robots: LocalRobotLearner | None = None
        self._profiler: RankProfiler | None = None

    def build_learners(self, config: Experiment, policy: Path, *, sft: bool = False) -> None:
        configure_process(config)
        if not sft:
            seed_torch(config)
        self.close()
        self._learners = None  # free the learners of an earlier phase first
        if self._shard_writer is not None:
            self._learners = LocalLearners(config, policy, self._ranks, writer=self._shard_writer)
        elif config.generation is not None:
            self._learners = FrozenPolicyOfRank.build(config, policy, self._ranks)
        else:
            self._learners = LocalLearners.build(config, policy, self._ranks, sft=sft)

    def build_engine(self, config: Experiment, policy: Path) -> int:
        """See `ComponentBuilder.build_engine`.

        Raises:
            ValueError: the learners have not been built.
        """
        self.close()
        if self._learners is None:
            raise ValueError("the engine was built before the learners")
        self._engine = build_engine_worker(config, policy, self._learners)
        return self._engine.max_model_len

    def start_judge_servers(self, config: Experiment) -> Sequence[Sequence[str]]:
        self.close_judge_servers()
        self._judges = JudgeServers(config, self._ranks.rank, self._address)
        return self._judges.addresses

    def close_judge_servers(self) -> None:
        if self._judges is not None:
            self._judges.close()
            self._judges = None

    def build_robots(self, config: Experiment, policy: Path) -> None:
        from quintet.runtime.embodied.robot_learner import LocalRobotLearner

        configure_process(config)
        seed_torch(config)
        self._robots = LocalRobotLearner(config, policy, self._ranks)

    def start_profile(self, config: ProfileConfig, directory: Path, step: int) -> None:
        if config.ranks is None or self._ranks.rank in config.ranks:
            self._profiler = self._profiler or RankProfiler(config, directory, self._ranks.rank)
            self._profiler.start(step)

    def stop_profile(self, step: int) -> None:
        if self._profiler is not None:
            self._profiler.stop(step)

    def close(self) -> None:
        """Release engine and robots, end servers of judges, and discard a profile that is being recorded."""
        self.close_judge_servers()
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._robots is not None:
            self._robots.close()
            self._robots = None

    def execute(self, call: RemoteCall) -> Any:
        """Call the method, or return the property, that the call names.

        Raises:
            ValueError: the call's target does not exist yet.
        """
        return execute_call(call, self.resolve)

    def resolve(self, target: str) -> Any:
        """Return the remote object of this rank.

        Raises:
            ValueError: it does not exist yet.
        """
        if target == WORKER:
            return self
        if target == ENGINE and self._engine is not None:
            return self._engine
        if target == ROBOTS and self._robots is not None:
            return self._robots
        if self._learners is None or target in (ENGINE, ROBOTS):
            raise ValueError(f"{target} was called before it was built")
        path = target.removeprefix(LEARNERS).split(".")[1:]
        result = reduce(getattr, path, self._learners)
        if result is None:
            raise ValueError(f"{target} was called before it was created")
        return result


def execute_call(call: RemoteCall, resolve: Callable[[str], Any]) -> Any:
    """Call the method, or return the property, that the call names; `resolve` returns the object of a target."""
    member = getattr(resolve(call.target), call.method)
    if call.method not in remote_methods(REMOTE_OBJECTS[call.target]):
        return member
    arguments = {
        name: resolve(value.target) if isinstance(value, RemoteRef) else value for name, value in call.arguments.items()
    }
    with trace.span(f"{call.target}.{call.method}"):
        return member(**arguments)


@contextmanager
def ignored_signals() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM: the controller ends the run."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
