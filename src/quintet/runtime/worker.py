"""Workers: each rank executes the controller's calls with its components.

Ranks of the actor have a part of its learners, robots and an engine, which execute calls together with the other ranks.
Standalone workers have components on devices that the actor does not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from quintet import trace
from quintet.config.native.experiment import Experiment
from quintet.config.native.tracking import ProfileConfig
from quintet.runtime.calls.remote_call import RemoteCall, RemoteRef
from quintet.runtime.calls.remote_interface import (
    ACTION_POLICY_COPY,
    ENGINE,
    HOSTED_ENVS,
    HOSTED_ROBOTS,
    LEARNERS,
    REMOTE_OBJECTS,
    ROBOTS,
    WORKER,
    remote_methods,
)
from quintet.runtime.embodied.hosted_robots import LocalHostedRobots
from quintet.runtime.embodied.policy_copies import LocalActionPolicyCopy
from quintet.runtime.engines.engine_worker import LocalEngineWorker
from quintet.runtime.env_hosts import LocalHostedEnvs
from quintet.runtime.judge_servers import LOOPBACK, JudgeServers
from quintet.runtime.learners.local_learners import FrozenPolicy, FrozenPolicyOfRank, LocalLearners
from quintet.runtime.process_settings import configure_process, seed_torch
from quintet.runtime.profiler import RankProfiler
from quintet.training.parallel.process_group import SINGLE_RANK, RankGroup


class Worker:
    """`ComponentBuilder` that executes calls with the components of this rank."""

    def __init__(
        self, ranks: RankGroup = SINGLE_RANK, address: str = LOOPBACK, shard_writer: str | None = None
    ) -> None:
        """Ranks of other machines reach this one at `address`. A standalone worker with learners writes shards of
        checkpoints as `shard_writer`."""
        self._shard_writer = shard_writer
        self._is_standalone = shard_writer is not None
        self._ranks = ranks
        self._address = address
        self._components: dict[str, Any] = {
            ENGINE: LocalEngineWorker(),
            HOSTED_ENVS: LocalHostedEnvs(),
            HOSTED_ROBOTS: LocalHostedRobots(),
            ACTION_POLICY_COPY: LocalActionPolicyCopy(),
        }
        """Components by the first part of their targets; without a value before they are built."""
        self._judges: JudgeServers | None = None
        self._profiler: RankProfiler | None = None

    def build_learners(self, config: Experiment, policy: Path, *, sft: bool = False) -> None:
        configure_process(config)
        if not sft:
            seed_torch(config)
        self._components[LEARNERS] = None  # free the learners of an earlier phase first
        if self._is_standalone:
            # another thread executes the calls of the other components
            self._components[LEARNERS] = LocalLearners(config, policy, self._ranks, writer=self._shard_writer)
            return
        self.close()
        if config.generation is not None:
            learners: LocalLearners | FrozenPolicyOfRank = FrozenPolicyOfRank(self._ranks, FrozenPolicy(config, policy))
        else:
            learners = LocalLearners.build(config, policy, self._ranks, sft=sft)
        self._components |= {LEARNERS: learners, ENGINE: LocalEngineWorker(learners)}

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
        self._components[ROBOTS] = LocalRobotLearner(config, policy, self._ranks)

    def start_profile(self, config: ProfileConfig, directory: Path, step: int) -> None:
        if config.ranks is None or self._ranks.rank in config.ranks:
            self._profiler = self._profiler or RankProfiler(config, directory, self._ranks.rank)
            self._profiler.start(step)

    def stop_profile(self, step: int) -> None:
        if self._profiler is not None:
            self._profiler.stop(step)

    def close(self) -> None:
        """Release all components but learners, which `build_learners` replaces, end servers of judges, and discard a
        profile that is being recorded. Components can be built again."""
        self.close_judge_servers()
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None
        for target, component in self._components.items():
            if component is not None and target != LEARNERS:
                component.close()
        self._components |= {ENGINE: LocalEngineWorker(), ROBOTS: None}

    def execute(self, call: RemoteCall) -> Any:
        """Call the method, or return the property, that the call names.

        Raises:
            ValueError: the call's target does not exist yet.
        """
        member = getattr(self._resolve(call.target), call.method)
        if call.method not in remote_methods(REMOTE_OBJECTS[call.target]):
            return member
        arguments = {
            name: self._resolve(value.target) if isinstance(value, RemoteRef) else value
            for name, value in call.arguments.items()
        }
        with trace.span(f"{call.target}.{call.method}"):
            return member(**arguments)

    def _resolve(self, target: str) -> Any:
        """Return the object that a target names: a component, or an attribute of one."""
        name, *path = target.split(".")
        component = self if name == WORKER else self._components.get(name)
        result = None if component is None else reduce(getattr, path, component)
        if result is None:
            raise ValueError(f"{target} was called before it was built")
        return result
