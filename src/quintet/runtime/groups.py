"""Handles that the controller holds on learners, engines and environments, wherever they run.

This module imports no implementation: see `local_learners.py` and `remote_learners.py` for learners, `engine_group.py`
for engines, and `rollout/agent_loop.py` and `rollout/single_turn_loop.py` for environments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from quintet.config.native.data import RewardModelConfig
from quintet.config.native.learners import OptimizerConfig
from quintet.policies.reward_model import ResponseScorer
from quintet.records import Trajectory
from quintet.rollout.engines.engine import Engine
from quintet.rollout.episode import Episode
from quintet.rollout.sampling_params import SamplingParams
from quintet.training.checkpoint.async_save import WriteFiles
from quintet.training.protocols import Actor, Critic, LogProbScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Policy(Protocol):
    """A policy whose weights engines load."""

    @property
    def model(self) -> PreTrainedModel:
        """This process's model."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under Hugging Face names."""


class PolicyGroup(Protocol):
    """The policy on all ranks, trained or frozen."""

    @property
    def has_full_weights(self) -> bool:
        """Whether this rank holds all of the policy's weights, so that an engine in its process can compute with its
        module; the same on all ranks of a run."""

    @property
    def actor(self) -> Policy:
        """The policy."""


class SavedLearners(Protocol):
    """Learners whose state is part of checkpoints."""

    def save(self, directory: Path) -> WriteFiles:
        """Copy the state that `checkpoint.contents` names; return the function that writes rank 0's copies into the
        checkpoint. The other ranks write theirs into the checkpoint at `directory` in the background."""

    def extra_state(self) -> dict[str, Any]:
        """Return the state besides tensors, as JSON values; the same on all ranks."""


class CheckpointedLearners(SavedLearners, Protocol):
    """Learners that continue from checkpoints."""

    def load(self, directory: Path, contents: Collection[str], extra: Mapping[str, Any]) -> None:
        """Load the `contents` of the checkpoint at `directory`, and the `extra_state` saved with it.

        Raises:
            MachineError: the checkpoint belongs to another model.
        """


class LearnerGroup(CheckpointedLearners, Protocol):
    """Actor, critic and reference, each on all ranks, and the reward model."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def has_full_weights(self) -> bool:
        """See `PolicyGroup.has_full_weights`."""

    @property
    def actor(self) -> Actor:
        """Learner of the policy."""

    @property
    def critic(self) -> Critic | None:
        """Learner of the values; None before `create_critic`."""

    @property
    def reference(self) -> LogProbScorer | None:
        """Policy from which the KL divergence is measured; None before `snapshot_reference`."""

    def actor_with_optimizer(self, optimizer: OptimizerConfig) -> Actor:
        """Return the same policy under a fresh optimizer, with log-probs at temperature 1. `save` and `load` are about
        this actor alone until `release_warm_start_actor`."""

    def release_warm_start_actor(self) -> None:
        """Free the optimizer that `actor_with_optimizer` created."""

    def create_critic(self) -> Critic:
        """Create the critic from the current policy, or from `critic.path`."""

    def snapshot_reference(self) -> LogProbScorer:
        """Make the current policy, or the model at `reference.path`, the reference."""

    def policy_scorer(self, step: int) -> LogProbScorer:
        """Return a scorer with the policy's weights before the first update of a step: log-prob workers, or the actor's
        scorer. The first call of a step comes before that update."""

    def load_reward_model(self, config: RewardModelConfig, max_length: int) -> ResponseScorer:
        """Load a reward model for up to `max_length` tokens of prompt and response.

        Raises:
            ConfigError: the directory contains no reward model, or one of its libraries cannot be imported.
            MachineError: the model cannot be loaded.
        """

    def perturb_actor(self, max_change: float, seed: int) -> None:
        """Multiply each trained weight tensor of the policy by a random factor in `1 ± max_change`, or change adapters
        by about as much."""


class EngineGroup(Engine, Protocol):
    """Engines behind the interface of a single one: each request is routed to one of them."""

    @property
    def engines(self) -> Sequence[Engine]:
        """The engines that the requests are routed to."""

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""


class EnvGroup(Protocol):
    """Environments, or prompts with a reward scorer, that the policy is rolled out in."""

    @property
    def busy(self) -> bool:
        """Whether episodes are running."""

    def collect_rollouts(self, episodes: Sequence[Episode], sampling: SamplingParams) -> Iterator[Trajectory]:
        """Run all episodes to their end; yield trajectories in the order in which they end."""

    def start(self, episodes: Sequence[Episode], sampling: SamplingParams) -> None:
        """Start episodes beside those that are running; `step` runs them."""

    def step(self) -> list[Trajectory]:
        """Advance all running episodes by one step; return those that ended."""

    def abort(self, groups: Collection[int]) -> list[Trajectory]:
        """Abort the episodes of the groups; return what was completed of them."""

    def pop_metrics(self) -> Mapping[str, float]:
        """Return the metrics since the last call."""

    def close(self) -> None:
        """Abort running episodes and stop the environment processes."""
