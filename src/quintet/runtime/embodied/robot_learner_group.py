"""Robots, policy and learner of all ranks, as the controller calls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from quintet.config.native.experiment import Experiment
from quintet.embodied_records import ActionSample, ActionSampling, RobotEpisode, RolloutRequest
from quintet.rollout.chunk_rollout import Sample
from quintet.runtime.calls.connection import WorkerConnection
from quintet.runtime.calls.remote_call import RemoteCall
from quintet.runtime.calls.remote_interface import ROBOTS, WORKER, RobotLearner, RolloutRecords
from quintet.runtime.calls.transport import Transport, remote_proxy
from quintet.runtime.embodied.hosted_robots import RestartableWorker, hosted_robot_envs
from quintet.runtime.embodied.policy_copies import ActionPolicyCopies
from quintet.runtime.embodied.rollout_runner import RolloutRunner


class RobotLearnerGroup:
    """Robots, policy and learner on all workers of a transport; robots and the sampling of actions may be on standalone
    workers instead, and then the controller runs the rollouts."""

    def __init__(
        self,
        transport: Transport,
        config: Experiment,
        policy: Path,
        robots: Sequence[RestartableWorker] = (),
        policies: Sequence[WorkerConnection] = (),
    ) -> None:
        """Build the learner of the action policy at `policy` on all workers.

        Args:
            transport: To the workers of the actor.
            config: Configuration of the run.
            policy: Directory of the policy.
            robots: Standalone workers that simulate the robots; without any, the workers of the actor do.
            policies: Standalone workers that sample actions, likewise.

        Raises:
            MachineError: a worker cannot build its part.
        """
        self._transport, self._config = transport, config
        transport.broadcast(RemoteCall(WORKER, "build_robots", {"config": config, "policy": policy}))
        self.calls: RobotLearner = remote_proxy(transport, ROBOTS)
        """Calls that all ranks execute together."""
        self._runner: RolloutRunner | None = None
        """Runs the rollouts in this process."""
        if robots:
            self._runner = RolloutRunner(config, build=partial(hosted_robot_envs, robots, config))
        elif policies:
            self._runner = RolloutRunner(config)
        self._policies = ActionPolicyCopies(policies, config, policy, self.calls.weights) if policies else None

    @property
    def world_size(self) -> int:
        return self._transport.world_size

    def collect(self, request: RolloutRequest) -> list[RobotEpisode]:
        """Run a rollout of all robots; return the episodes by column and time. In training the chunk steps stay with
        the workers of the actor."""
        if self._runner is not None:
            return self._collect_here(self._runner, request)
        call = RemoteCall(ROBOTS, "collect", {"request": request})
        wait = self._transport.call_others(call)
        results = [self._transport.call(call), *wait()]
        return sorted((episode for result in results for episode in result), key=lambda episode: episode.robot)

    @property
    def records(self) -> RolloutRecords:
        """Videos, episodes and metrics of the rollouts."""
        return self._runner or self.calls

    def sync_weights(self) -> None:
        """Load the learner's weights where actions are sampled."""
        if self._policies is not None:
            self._policies.sync_weights()

    def _collect_here(self, runner: RolloutRunner, request: RolloutRequest) -> list[RobotEpisode]:
        """Run the rollout in this process with standalone workers."""
        sample: Sample = self._sample_with_learner if self._policies is None else self._policies.sample
        rollout = runner.run(request, np.arange(request.robots), self.calls.policy, sample)
        if request.first_episode is None:
            self.calls.load_rollout(rollout.batch)
        return sorted(rollout.episodes, key=lambda episode: episode.robot)

    def _sample_with_learner(
        self, inputs: Mapping[str, Tensor], uniforms: Tensor | None, sampling: ActionSampling
    ) -> ActionSample:
        return ActionSample(**self.calls.sample(inputs, uniforms, sampling.temperature, sampling.top_k))

    def close(self) -> None:
        """End the simulators of this process; those of other processes end with them."""
        self._transport.call(RemoteCall(ROBOTS, "close"))
        if self._runner is not None:
            self._runner.close()
        if self._policies is not None:
            self._policies.close()
