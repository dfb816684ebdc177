"""Objects of a worker that the controller can call, and their methods, derived from their protocols."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
from torch import Tensor

from quintet.config.native.data import RewardModelConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.config.native.tracking import ProfileConfig
from quintet.embodied_records import ChunkBatch, RecordedVideo, RobotEpisode, RolloutRequest
from quintet.envs.hosted_envs import EnvRequest
from quintet.envs.vector_env import EnvEvent
from quintet.policies.reward_model import ResponseScorer
from quintet.policies.vla.action_policy import ActionPolicy
from quintet.records import Failure, Generation, Request, Trajectory
from quintet.rollout.engines.shared_weights import SharedTensor, StagedTensors
from quintet.runtime.groups import CheckpointedLearners, SavedLearners
from quintet.training.chunk_learner import ChunkRates
from quintet.training.parallel.broadcast_group import GroupAddress
from quintet.training.protocols import Actor, Critic, DivergenceReference, LogProbScorer

WORKER: Final = "worker"
LEARNERS: Final = "learners"
ACTOR, WARM_START_ACTOR = f"{LEARNERS}.actor", f"{LEARNERS}.warm_start_actor"
CRITIC, REFERENCE = f"{LEARNERS}.critic", f"{LEARNERS}.reference"
REWARD_MODEL = f"{LEARNERS}.reward_model"
ENGINE: Final = "engine"
ROBOTS: Final = "robots"
HOSTED_ENVS, HOSTED_ROBOTS, ACTION_POLICY_COPY = "hosted_envs", "hosted_robots", "action_policy_copy"
POLICY_SCORER: Final = f"{LEARNERS}.policy_scorer"
STEPS_PER_CALL = 4
"""Steps that an engine takes between two exchanges of requests and responses; an exchange takes about a millisecond."""


class ComponentBuilder(Protocol):
    """Interface of a worker itself."""

    def build_learners(self, config: Experiment, policy: Path, *, sft: bool = False) -> None:
        """Build the actor from the model at `policy`; with `sft` the learner of supervised fine-tuning. A run that only
        generates has a frozen policy instead."""

    def start_judge_servers(self, config: Experiment) -> Sequence[Sequence[str]]:
        """Start the servers of judges on this rank's node, if it is the node's first; return the section of the judge
        in `reward`, URL and token of each."""

    def close_judge_servers(self) -> None:
        """End the servers of judges that this rank has started."""

    def build_robots(self, config: Experiment, policy: Path) -> None:
        """Build the rank's robots, and the learner of the action policy at `policy`."""

    def start_profile(self, config: ProfileConfig, directory: Path, step: int) -> None:
        """Record a profile of this step, or prepare for that of the next one, if `config` lists this rank."""

    def stop_profile(self, step: int) -> None:
        """End the recording that `start_profile` began, and write its files."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Result of a call of an engine on another rank."""

    generations: tuple[Generation, ...] = ()
    """Responses that were completed or aborted."""
    failure: Failure | None = None
    """Why the engine is dead; its other requests are lost."""


EngineAction = Literal["reset_prefix_cache", "sleep", "wake_up"]


class EngineWorker(Protocol):
    """The engine of a worker. Methods return None if there is nothing to report."""

    def build(self, config: Experiment, policy: Path) -> int:
        """Build the engine with the model at `policy`, on a rank of the actor after the learners; return its context in
        tokens, 0 if the rank has no engine."""

    def step(self, requests: Sequence[Request]) -> EngineReport | None:
        """Queue requests, and take up to `STEPS_PER_CALL` steps while the engine is busy."""

    def abort(self, ids: Sequence[int]) -> EngineReport | None:
        """Abort requests; see `Engine.abort`."""

    def load_weights(
        self, version: int, weights: StagedTensors, adapter_scales: Mapping[str, float]
    ) -> EngineReport | None:
        """Load weights as `version`. With the scales of adapters, by layer, they are adapters and, in the first call,
        the weights that these adapt; see `BaseWeights`."""

    def load_gathered_weights(self, version: int) -> EngineReport | None:
        """Gather the weights of this process's learner together with all ranks, and load them as `version`."""

    def join_broadcast_group(self, address: GroupAddress, rank: int) -> None:
        """Join the process group over which weights are broadcast."""

    def load_broadcast_weights(
        self, version: int, weights: Sequence[SharedTensor], adapter_scales: Mapping[str, float]
    ) -> EngineReport | None:
        """Receive the memory with these weights over the process group, and load them as in `load_weights`."""

    def weights(self) -> Mapping[str, Tensor] | None:
        """Return the engine's weights under Hugging Face names; None if they cannot be read."""

    def control(self, action: EngineAction) -> EngineReport | None:
        """Call a method of the engine without arguments."""

    def rebuild(self) -> EngineReport | None:
        """Replace the engine by a new one, which has the initial weights."""


class RolloutRecords(Protocol):
    """Records of the rollouts of robots in the process that runs them."""

    def take_trajectories(self) -> Sequence[Trajectory]:
        """Return the episodes that this process has recorded since the last call, to be shown to people."""

    def take_videos(self, *, wait: bool = False) -> Sequence[RecordedVideo]:
        """Return the videos that this process has completed since the last call; see `RolloutRecording.take_videos`."""

    def pop_metrics(self) -> Mapping[str, float]:
        """Return the metrics of this process's channels since the last call."""


class RobotLearner(RolloutRecords, CheckpointedLearners, Protocol):
    """A rank's robots, policy and learner. All ranks execute the same calls at the same time."""

    @property
    def policy(self) -> ActionPolicy:
        """This process's policy."""

    def collect(self, request: RolloutRequest) -> Sequence[RobotEpisode]:
        """Run a rollout of this rank's robots, and keep its chunk steps for training unless it is a validation; return
        the episodes."""

    def sample(
        self, inputs: Mapping[str, Tensor], uniforms: Tensor | None, temperature: float, top_k: int
    ) -> Mapping[str, Any]:
        """Sample actions with the learner's policy; return the fields of an `ActionSample`."""

    def load_rollout(self, batch: ChunkBatch) -> None:
        """Keep a part of the chunk steps of all robots for training."""

    def add_log_probs(self) -> None:
        """Replace the log-probs of sampling by those of the learner."""

    def snapshot_reference(self) -> None:
        """Make the current policy the reference."""

    def add_reference_log_probs(self) -> None:
        """Add the log-probs of the reference."""

    def add_advantages(self) -> Mapping[str, float]:
        """Add advantages and returns, computed over the robots of all ranks; return their metrics."""

    def update(self, chunk_steps: Tensor, rates: ChunkRates) -> Mapping[str, float]:
        """Make one optimizer step on a mini-batch: `chunk_steps`, int64 [n], are numbers of chunk steps of all ranks,
        chunk × columns + column, of which each rank trains on its own."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.weights`; adapters are merged."""

    def start_cloning(self, optimizer: OptimizerConfig) -> None:
        """Create an optimizer for behavior cloning. Until `end_cloning`, `save` and `load` are about it."""

    def clone(
        self, inputs: Mapping[str, Tensor], actions: Tensor, mask: Tensor, rates: ChunkRates
    ) -> Mapping[str, float]:
        """Make one optimizer step on demonstrated chunks, see `ChunkLearner.clone`, which the ranks divide among
        them."""

    def end_cloning(self) -> None:
        """Free the optimizer for behavior cloning."""

    def close(self) -> None:
        """End the simulators."""


class LearnerWorker(SavedLearners, Protocol):
    """The learners of a rank, and what creates them. All ranks with the same components execute the same calls at the
    same time. `weights` are the policy's, for ranks whose devices the actor does not use."""

    @property
    def has_full_weights(self) -> bool:
        """See `LearnerGroup.has_full_weights`."""

    def actor_with_optimizer(self, optimizer: OptimizerConfig) -> Actor:
        """Create `warm_start_actor`; see `LearnerGroup.actor_with_optimizer`."""

    def release_warm_start_actor(self) -> None:
        """Free `warm_start_actor`."""

    def create_critic(self, weights: StagedTensors | None = None) -> Critic:
        """Create the critic from the current policy, or from `critic.path`."""

    def snapshot_reference(self, weights: StagedTensors | None = None) -> LogProbScorer:
        """Make the current policy, or the model at `reference.path`, the reference."""

    def load_policy(self, weights: StagedTensors) -> None:
        """Load the weights of the current policy into the scorer of log-prob workers; the first call builds it."""

    def load_reward_model(self, config: RewardModelConfig, max_length: int) -> ResponseScorer:
        """See `LearnerGroup.load_reward_model`."""

    def perturb_actor(self, max_change: float, seed: int) -> None:
        """See `LearnerGroup.perturb_actor`."""

    def load_actor(self, directory: Path, contents: Collection[str], extra: Mapping[str, Any]) -> None:
        """Load the actor's part of a checkpoint; see `CheckpointedLearners.load`."""

    def load_critic(self, directory: Path, contents: Collection[str], extra: Mapping[str, Any]) -> None:
        """Load the critic's part, after `create_critic`."""

    def load_reference(self, directory: Path, contents: Collection[str]) -> None:
        """Load the reference's part, after `snapshot_reference`."""


class HostedEnvs(Protocol):
    """The environments of a worker: an env host."""

    def build(self, config: Experiment) -> None:
        """Build the vector env of the run."""

    def exchange(self, requests: Sequence[EnvRequest], wait_seconds: float) -> Sequence[EnvEvent]:
        """Execute the requests in their order, and return the events since the last call; wait for one up to
        `wait_seconds` if requests are in progress."""


class HostedRobots(Protocol):
    """Robots of a worker on devices without the actor, for training and for validations."""

    def build(self, config: Experiment, num_robots: int, *, is_validation: bool) -> Mapping[str, Any]:
        """Build stages of `num_robots` robots each; return the description of their simulator."""

    def reset(self, stage: int, start_states: np.ndarray, *, is_validation: bool) -> Mapping[str, Any]:
        """See `RobotStage.reset`; return the message of a `ResetResult`."""

    def step_chunk(
        self, stage: int, actions: np.ndarray, *, record_frames: bool, is_validation: bool
    ) -> Mapping[str, Any]:
        """Move the robots of a stage by a chunk of actions, float32 [B, C, D]; return the message of the result."""

    def offload(self) -> None:
        """Free the simulators until the next reset."""


class ActionPolicyCopy(Protocol):
    """A copy of the action policy on a worker that samples actions."""

    def build(self, config: Experiment, policy: Path) -> None:
        """Load the policy at that directory."""

    def load_weights(self, weights: StagedTensors) -> None:
        """Load the learner's weights."""

    def sample(
        self, inputs: Mapping[str, Tensor], uniforms: Tensor | None, temperature: float, top_k: int
    ) -> Mapping[str, Any]:
        """Sample actions; return the fields of an `ActionSample`."""


REMOTE_OBJECTS: Final[Mapping[str, type]] = {
    WORKER: ComponentBuilder,
    ENGINE: EngineWorker,
    ROBOTS: RobotLearner,
    HOSTED_ENVS: HostedEnvs,
    HOSTED_ROBOTS: HostedRobots,
    ACTION_POLICY_COPY: ActionPolicyCopy,
    POLICY_SCORER: LogProbScorer,
    LEARNERS: LearnerWorker,
    ACTOR: Actor,
    f"{ACTOR}.scorer": LogProbScorer,
    WARM_START_ACTOR: Actor,
    f"{WARM_START_ACTOR}.scorer": LogProbScorer,
    CRITIC: Critic,
    REFERENCE: LogProbScorer,
    REWARD_MODEL: ResponseScorer,
}
"""Protocols of the remote objects by target: the attribute path that leads to them in a worker."""


@cache
def remote_methods(protocol: type) -> Mapping[str, inspect.Signature]:
    """Return the signatures of a protocol's public methods, without `self`, by name."""
    return {
        name: _without_self(member)
        for parent in reversed(protocol.__mro__)
        for name, member in vars(parent).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


def _without_self(function: object) -> inspect.Signature:
    signature = inspect.signature(function)  # type: ignore[arg-type]  # checked by isfunction
    return signature.replace(parameters=list(signature.parameters.values())[1:])


@cache
def properties_of(protocol: type) -> Mapping[str, str]:
    """Return the annotated types of a protocol's public properties by name."""
    return {
        name: str(inspect.signature(member.fget).return_annotation)
        for parent in reversed(protocol.__mro__)
        for name, member in vars(parent).items()
        if isinstance(member, property) and member.fget is not None and not name.startswith("_")
    }


@cache
def methods_of_rank_0(protocol: type) -> frozenset[str]:
    """Return the methods of a protocol that run on the first worker alone: a forward pass of another learner calls
    those of a `DivergenceReference` on each rank, and only rank 0 has a reward model and records rollouts."""
    parents = [each for each in (DivergenceReference, ResponseScorer, RolloutRecords) if each in protocol.__mro__]
    return frozenset(name for parent in parents for name in remote_methods(parent))
