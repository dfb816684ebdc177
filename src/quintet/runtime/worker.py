"""Workers: each rank executes the controller's calls with its components.

Ranks of the actor have a part of its learners, robots and an engine, which execute calls together with the other ranks.
Standalone workers have components on devices that the actor does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from quintet import trace
from quintet.config.native.experiment import Experiment
from quintet.config.native.tracking import ProfileConfig
from quintet.runtime.engine_worker import LocalEngineWorker
from quintet.runtime.frozen_policy import FrozenPolicyOfRank
from quintet.runtime.judge_servers import LOOPBACK, JudgeServers
from quintet.runtime.local_learners import LocalLearners
from quintet.runtime.process_settings import configure_process, seed_torch
from quintet.runtime.profiler import RankProfiler
from quintet.runtime.remote_call import RemoteCall, RemoteRef
from quintet.runtime.remote_interface import (
    ENGINE,
    LEARNERS,
    REMOTE_OBJECTS,
    ROBOTS,
    STANDALONE_ENVS,
    STANDALONE_LEARNERS,
    STANDALONE_POLICY,
    STANDALONE_ROBOTS,
    WORKER,
    remote_methods,
)
from quintet.runtime.sft_learner import build_sft_learners
from quintet.runtime.standalone.env_worker import LocalStandaloneEnvs
from quintet.runtime.standalone.learner_worker import LocalStandaloneLearners
from quintet.runtime.standalone.robot_worker import LocalStandalonePolicy, LocalStandaloneRobots
from quintet.training.parallel.process_group import RankGroup

SINGLE_RANK = RankGroup()


class Worker:
    """`ComponentBuilder` that executes calls with the components of this rank."""

    def __init__(
        self,
        ranks: RankGroup = SINGLE_RANK,
        address: str = LOOPBACK,
        standalone_learners: LocalStandaloneLearners | None = None,
    ) -> None:
        """Ranks of other machines reach this one at `address`."""
        self._ranks = ranks
        self._address = address
        self._components: dict[str, Any] = {
            ENGINE: LocalEngineWorker(),
            STANDALONE_ENVS: LocalStandaloneEnvs(),
            STANDALONE_ROBOTS: LocalStandaloneRobots(),
            STANDALONE_POLICY: LocalStandalonePolicy(),
            STANDALONE_LEARNERS: standalone_learners,
            LEARNERS: standalone_learners,
        }
        """Components by the first part of their targets; without a value before they are built."""
        self._judges: JudgeServers | None = None
        self._profiler: RankProfiler | None = None

    def build_learners(self, config: Experiment, policy: Path, *, sft: bool = False) -> None:
        configure_process(config)
        if not sft:
            seed_torch(config)
        self.close()
        self._components[LEARNERS] = None  # free the learners of an earlier phase first
        build: Callable[[Experiment, Path, RankGroup], LocalLearners | FrozenPolicyOfRank] = LocalLearners.build
        if config.generation is not None:
            build = FrozenPolicyOfRank.build
        elif sft:
            build = build_sft_learners
        learners = build(config, policy, self._ranks)
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
        from quintet.runtime.embodied.robot_worker import LocalRobotWorker

        configure_process(config)
        seed_torch(config)
        self._components[ROBOTS] = LocalRobotWorker(config, policy, self._ranks)

    def start_profile(self, config: ProfileConfig, directory: Path, step: int) -> None:
        if config.ranks is None or self._ranks.rank in config.ranks:
            self._profiler = self._profiler or RankProfiler(config, directory, self._ranks.rank)
            self._profiler.start(step)

    def stop_profile(self, step: int) -> None:
        if self._profiler is not None:
            self._profiler.stop(step)

    def close(self) -> None:
        """Release all components but learners, end servers of judges, and discard a profile that is being recorded."""
        self.close_judge_servers()
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None
        for target, component in self._components.items():
            if component is not None and target not in (LEARNERS, STANDALONE_LEARNERS):
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
