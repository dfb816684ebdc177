"""Log-prob scorer, critic, reference and reward model of a standalone worker, called by the controller."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.native.data import RewardModelConfig
from quintet.config.native.experiment import Experiment
from quintet.policies.reward_model import ResponseScorer
from quintet.rollout.engines.shared_weights import SharedWeightsReader, StagedTensors
from quintet.runtime.learner_backends import load_backend
from quintet.runtime.learner_checkpoint import (
    CRITIC,
    LearnerSnapshots,
    has_weights,
    restore_critic,
    restore_reference,
)
from quintet.runtime.process_settings import configure_process, seed_torch
from quintet.training.checkpoint.async_save import AsyncShardWriter
from quintet.training.parallel.process_group import RankGroup
from quintet.training.protocols import LocalCritic, LogProbScorer, PolicyCopy
from quintet.training.sharded_reward_model import load_reward_model

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _RemoteActor:
    """See `Learner`: the actor of other processes."""

    staged: StagedTensors

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(SharedWeightsReader().read(self.staged))


@dataclass(slots=True)
class LocalStandaloneLearners:
    """See `StandaloneLearnerWorker`."""

    ranks: RankGroup
    """Workers with the same components."""
    writer: str
    """Name of this rank as a writer of checkpoints."""
    policy_scorer: PolicyCopy | None = None
    critic: LocalCritic | None = None
    reference: LogProbScorer | None = None
    reward_model: ResponseScorer | None = None
    _built: tuple[Experiment, Path] | None = None
    _snapshots: LearnerSnapshots | None = None
    _shard_writer: AsyncShardWriter | None = None
    _reader: SharedWeightsReader = field(default_factory=SharedWeightsReader)
    """Keeps the memory mapped into which the weights of every step are written."""

    def build(self, config: Experiment, policy: Path) -> None:
        configure_process(config)
        seed_torch(config)
        self.policy_scorer = self.critic = self.reference = self.reward_model = None
        self._built, self._snapshots = (config, policy), LearnerSnapshots()

    @property
    def _setup(self) -> tuple[Experiment, Path]:
        """Configuration, and initial model of the policy.

        Raises:
            ValueError: `build` has not been called.
        """
        if self._built is None:
            raise ValueError("a learner was created before build")
        return self._built

    def create_critic(self, weights: StagedTensors) -> None:
        config, policy = self._setup
        self.critic = None
        backend = load_backend(config.critic.backend)
        self.critic = backend.build_critic(config, _RemoteActor(weights), policy, self.ranks)

    def snapshot_reference(self, weights: StagedTensors) -> None:
        config, policy = self._setup
        if config.reference.path is not None and self.reference is not None:
            return
        self.reference = None
        backend = load_backend(config.reference.backend)
        self.reference = backend.build_reference(config, _RemoteActor(weights), policy, self.ranks)

    def load_policy(self, weights: StagedTensors) -> None:
        config, policy = self._setup
        if self.policy_scorer is None:
            backend = load_backend(config.actor.backend)
            self.policy_scorer = backend.build_policy_scorer(config, policy, self.ranks)
        self.policy_scorer.load_weights(dict(self._reader.read(weights)))

    def load_reward_model(self, config: RewardModelConfig, max_length: int) -> None:
        self.reward_model = load_reward_model(config, self._setup[1], max_length, self.ranks)

    def save(self, directory: Path) -> None:
        config, _ = self._setup
        self._snapshots = self._snapshots or LearnerSnapshots()
        self._shard_writer = self._shard_writer or AsyncShardWriter(self.writer)
        write = self._snapshots.copy_without_actor(config, self.critic, self._stored_reference, self.ranks)
        self._shard_writer.save(directory, write)

    @property
    def _stored_reference(self) -> LogProbScorer | None:
        """The reference, unless the ranks of the actor store its adapters."""
        return None if self._setup[0].reference_has_adapters else self.reference

    def extra_state(self) -> dict[str, Any]:
        scale = self.critic.loss_scale_state() if self.critic is not None else {}
        return {f"{CRITIC}_scale": scale} if scale else {}

    def load(self, directory: Path, contents: Collection[str], extra: Mapping[str, Any]) -> None:
        if self.critic is not None:
            restore_critic(self.critic, directory, contents)
            self.critic.load_loss_scale_state(extra.get(f"{CRITIC}_scale", {}))
        if self._stored_reference is not None and has_weights(contents):
            restore_reference(self._stored_reference, directory)
