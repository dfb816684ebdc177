"""Learners of this process: actor, critic, reference, reward model and policy scorer, or a policy that is frozen."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from quintet.config.native.data import RewardModelConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.config.native.training import SftConfig
from quintet.policies.lora import ADAPTER_DIRECTORY, has_lora, is_adapter_name, read_base_model_path
from quintet.policies.model_loading import cast_weights
from quintet.policies.reward_model import ResponseScorer
from quintet.rollout.engines.shared_weights import SharedWeightsReader, StagedTensors
from quintet.runtime.engines.engine_builders import engine_dtype, load_merged_model
from quintet.runtime.learners.learner_backends import load_backend
from quintet.runtime.learners.learner_checkpoint import (
    ACTOR,
    CRITIC,
    LearnerSnapshots,
    SnapshotSource,
    has_weights,
    restore_actor,
    restore_adapters,
    restore_critic,
    restore_reference,
)
from quintet.runtime.learners.megatron_backend import FullStateLearner
from quintet.training.checkpoint.async_save import AsyncShardWriter, WriteFiles
from quintet.training.checkpoint.learner_state import MODEL_STEM
from quintet.training.learner import ActorLearner
from quintet.training.parallel.process_group import SINGLE_RANK, RankGroup
from quintet.training.parallel.strategy import ReplicatedStrategy
from quintet.training.protocols import Learner, LocalActor, LocalCritic, LogProbScorer, LossScaled, PolicyCopy
from quintet.training.sharded_reward_model import load_reward_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ACTOR_SCALE, CRITIC_SCALE = f"{ACTOR}_scale", f"{CRITIC}_scale"
"""Names of the loss scales in a checkpoint."""


@dataclass(frozen=True, slots=True)
class _StagedPolicy:
    """See `Learner`: the weights of an actor of other processes."""

    staged: StagedTensors

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(SharedWeightsReader().read(self.staged))


@dataclass(slots=True)
class LocalLearners:
    """See `LearnerWorker`. All ranks with the same components have an instance, and call the same methods in the same
    order."""

    experiment: Experiment
    policy: Path
    """Initial model of the policy."""
    ranks: RankGroup
    """Ranks with the same components."""
    _actor: LocalActor | None = None
    """None on devices that the actor does not use."""
    writer: str | None = None
    """Name of this rank as a writer of checkpoints; None on rank 0, which writes what it copies itself."""
    sft: bool = False
    """Whether these are the learners of supervised fine-tuning, which has neither critic nor reference."""
    critic: LocalCritic | None = None
    reference: LogProbScorer | None = None
    reward_model: ResponseScorer | None = None
    policy_scorer: PolicyCopy | None = None
    warm_start_actor: LocalActor | None = None
    """The policy under the optimizer of the warm start."""
    _adapter_base: Path | None = None
    """Base model of the adapters if it is not `policy`: the adapters are merged into a checkpoint's `hf/`."""
    _snapshots: LearnerSnapshots = field(default_factory=LearnerSnapshots)
    _shard_writer: AsyncShardWriter | None = None
    _reader: SharedWeightsReader = field(default_factory=SharedWeightsReader)
    """Keeps the memory mapped into which the weights of every step are written."""

    @classmethod
    def build(
        cls, config: Experiment, policy: Path, ranks: RankGroup = SINGLE_RANK, *, sft: bool = False
    ) -> LocalLearners:
        """Build the actor of the policy at that directory, or the learner of `config.sft`.

        Raises:
            MachineError: the directory contains no model.
            ConfigError: LoRA does not fit the model, Liger or the backend is not installed, or the backend does not
                support the configuration.
        """
        backend = load_backend(config.actor.backend)
        if sft:
            policy = policy.absolute()
            actor = backend.build_sft_actor(config, config.sft or SftConfig(), policy, ranks)
        else:
            actor = backend.build_actor(config, policy, config.actor.optimizer, ranks)
        return cls(config, policy, ranks, actor, str(ranks.rank) if ranks.rank else None, sft)

    @property
    def actor(self) -> LocalActor:
        """Learner of the policy.

        Raises:
            ValueError: the actor does not use this device.
        """
        if self._actor is None:
            raise ValueError("this rank has no actor")
        return self._actor

    @property
    def has_full_weights(self) -> bool:
        return isinstance(self.actor, ActorLearner) and isinstance(self.actor.strategy, ReplicatedStrategy)

    def actor_with_optimizer(self, optimizer: OptimizerConfig) -> LocalActor:
        self.warm_start_actor = self.actor.with_optimizer(optimizer)
        return self.warm_start_actor

    def release_warm_start_actor(self) -> None:
        self.warm_start_actor = None

    def create_critic(self, weights: StagedTensors | None = None) -> LocalCritic:
        self.critic = None  # free the memory of the last one first
        backend = load_backend(self.experiment.critic.backend)
        self.critic = backend.build_critic(self.experiment, self._current_policy(weights), self.policy, self.ranks)
        return self.critic

    def snapshot_reference(self, weights: StagedTensors | None = None) -> LogProbScorer:
        config = self.experiment
        if config.reference.path is None or self.reference is None:
            self.reference = None
            backend = load_backend(config.reference.backend)
            self.reference = backend.build_reference(config, self._current_policy(weights), self.policy, self.ranks)
        return self.reference

    def _current_policy(self, weights: StagedTensors | None) -> Learner:
        """Return the policy with these weights; None is the actor of this process."""
        return self.actor if weights is None else _StagedPolicy(weights)

    def load_policy(self, weights: StagedTensors) -> None:
        if self.policy_scorer is None:
            backend = load_backend(self.experiment.actor.backend)
            self.policy_scorer = backend.build_policy_scorer(self.experiment, self.policy, self.ranks)
        self.policy_scorer.load_weights(dict(self._reader.read(weights)))

    def load_reward_model(self, config: RewardModelConfig, max_length: int) -> ResponseScorer:
        self.reward_model = load_reward_model(config, self.policy, max_length, self.ranks)
        return self.reward_model

    @torch.no_grad()
    def perturb_actor(self, max_change: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def factor() -> float:
            return 1.0 + max_change * (2.0 * float(torch.rand((), generator=generator)) - 1.0)

        if isinstance(self.actor, ActorLearner):
            for name, parameter in self.actor.model.named_parameters():
                if is_adapter_name(name):
                    # the second matrix of new adapters is 0
                    parameter.add_(0.1 * (factor() - 1.0))
                elif parameter.requires_grad:
                    parameter.mul_(factor())
        else:
            weights = {name: weight * factor() for name, weight in self.actor.weights()}
            cast("FullStateLearner", self.actor).load_weights(weights)

    def save(self, directory: Path) -> WriteFiles:
        write = self._copy()
        if self.writer is None:
            return write
        self._shard_writer = self._shard_writer or AsyncShardWriter(self.writer)
        self._shard_writer.save(directory, write)
        return lambda _: None

    def _copy(self) -> WriteFiles:
        """Copy the state of the learners; return the function that writes it."""
        config, ranks = self.experiment, self.ranks
        if self._actor is None:
            # the ranks of the actor store the adapters of a reference
            reference = None if config.reference_has_adapters else self.reference
            return self._snapshots.copy_without_actor(config, self.critic, reference, ranks)
        base, actor = self._adapter_base or self.policy, self._saved_actor
        return self._snapshots.copy(SnapshotSource(config, ranks, actor, self.critic, self.reference, base, self.sft))

    @property
    def _saved_actor(self) -> LocalActor:
        """Actor of checkpoints: during the warm start, the actor with the warm start's optimizer."""
        return self.warm_start_actor or self.actor

    def extra_state(self) -> dict[str, Any]:
        learners: dict[str, LocalActor | LocalCritic | None] = {
            ACTOR_SCALE: self._actor and self._saved_actor,
            CRITIC_SCALE: self.critic,
        }
        scales = {name: learner.loss_scale_state() for name, learner in learners.items() if learner is not None}
        return {name: scale for name, scale in scales.items() if scale}

    def load_actor(self, directory: Path, contents: Collection[str], extra: Mapping[str, Any]) -> None:
        if self.sft and isinstance(self.actor, ActorLearner) and has_lora(self.actor.model):
            restore_adapters(self.actor, directory, contents)
        else:
            trusted = self.experiment.policy.trust_remote_code
            restore_actor(self._saved_actor, directory, contents, trust_remote_code=trusted)
        is_trained = not self.sft and self.warm_start_actor is None
        if is_trained and MODEL_STEM in contents and has_lora(self.actor.model):
            self._adapter_base = read_base_model_path(directory / ADAPTER_DIRECTORY)
        _load_scale(self._saved_actor, extra.get(ACTOR_SCALE))

    def load_critic(self, directory: Path, contents: Collection[str], extra: Mapping[str, Any]) -> None:
        """See `LearnerWorker.load_critic`.

        Raises:
            ValueError: there is no critic.
        """
        if self.critic is None:
            raise ValueError("the critic was loaded before it was created")
        restore_critic(self.critic, directory, contents)
        _load_scale(self.critic, extra.get(CRITIC_SCALE))

    def load_reference(self, directory: Path, contents: Collection[str]) -> None:
        if self.reference is not None and has_weights(contents):
            restore_reference(self.reference, directory)


def _load_scale(learner: LossScaled, state: Mapping[str, float] | None) -> None:
    if state is not None:
        learner.load_loss_scale_state(state)


class FrozenPolicy:
    """See `Policy`: a whole copy of the model on each rank with an engine, in the engine's dtype."""

    def __init__(self, config: Experiment, directory: Path) -> None:
        self._config, self._directory = config, directory
        self._model: PreTrainedModel | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The model, which is loaded on first use."""
        if self._model is None:
            self._model = load_merged_model(self._config, self._directory)
            cast_weights(self._model, engine_dtype(self._config, self._directory))
        return self._model

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.weights`; a rank without an engine yields none."""
        if self._model is not None:
            yield from self._model.named_parameters()


@dataclass(frozen=True, slots=True)
class FrozenPolicyOfRank:
    """See `PolicyGroup`: the policy on one rank."""

    ranks: RankGroup
    actor: FrozenPolicy

    @property
    def has_full_weights(self) -> bool:
        return True
