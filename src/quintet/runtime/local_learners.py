"""Learners of this process: actor, critic and reference, and their checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from quintet.config.native.data import RewardModelConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import OptimizerConfig
from quintet.config.plan.process_layout import process_layout
from quintet.policies.lora import ADAPTER_DIRECTORY, has_lora, is_adapter_name, read_base_model_path
from quintet.policies.reward_model import ResponseScorer
from quintet.runtime.learner_backends import load_backend
from quintet.runtime.learner_checkpoint import (
    ACTOR,
    CRITIC,
    REFERENCE,
    LearnerSnapshots,
    SnapshotSource,
    has_weights,
    restore_actor,
    restore_adapters,
    restore_critic,
    restore_reference,
)
from quintet.runtime.megatron_backend import FullStateLearner
from quintet.training.checkpoint.async_save import AsyncShardWriter, WriteFiles
from quintet.training.checkpoint.learner_state import MODEL_STEM
from quintet.training.learner import ActorLearner
from quintet.training.parallel.process_group import RankGroup
from quintet.training.parallel.strategy import ReplicatedStrategy
from quintet.training.protocols import LocalActor, LocalCritic, LogProbScorer
from quintet.training.sharded_reward_model import load_reward_model

SINGLE_RANK = RankGroup()


@dataclass(slots=True)
class LocalLearners:
    """See `LearnerGroup`. With several ranks, each rank has its own instance, and all call the same methods in the same
    order."""

    experiment: Experiment
    policy: Path
    """Initial model of the policy."""
    ranks: RankGroup
    actor: LocalActor
    critic: LocalCritic | None = None
    reference: LogProbScorer | None = None
    reward_model: ResponseScorer | None = None
    warm_start_actor: LocalActor | None = None
    """The policy under the optimizer of the warm start."""
    sft: bool = False
    """Whether these are the learners of supervised fine-tuning, which has neither critic nor reference."""
    _adapter_base: Path | None = None
    """Base model of the adapters if it is not `policy`: the adapters are merged into a checkpoint's `hf/`."""
    _snapshots: LearnerSnapshots = field(default_factory=LearnerSnapshots)
    _shard_writer: AsyncShardWriter | None = None

    @classmethod
    def build(cls, config: Experiment, policy: Path, ranks: RankGroup = SINGLE_RANK) -> LocalLearners:
        """Build the actor of the policy at that directory.

        Raises:
            MachineError: the directory contains no model.
            ConfigError: the backend is not installed, or does not support the configuration.
        """
        backend = load_backend(config.actor.backend)
        return cls(config, policy, ranks, backend.build_actor(config, policy, config.actor.optimizer, ranks))

    @property
    def world_size(self) -> int:
        return self.ranks.size

    @property
    def has_full_weights(self) -> bool:
        return isinstance(self.actor, ActorLearner) and isinstance(self.actor.strategy, ReplicatedStrategy)

    def actor_with_optimizer(self, optimizer: OptimizerConfig) -> LocalActor:
        self.warm_start_actor = self.actor.with_optimizer(optimizer)
        return self.warm_start_actor

    def release_warm_start_actor(self) -> None:
        self.warm_start_actor = None

    def create_critic(self) -> LocalCritic:
        config = self.experiment
        backend = load_backend(config.critic.backend)
        self.critic = backend.build_critic(config, self.actor, self.policy, self.ranks)
        return self.critic

    def snapshot_reference(self) -> LogProbScorer:
        config = self.experiment
        if config.reference.path is not None and self.reference is not None:
            return self.reference
        backend = load_backend(config.reference.backend)
        self.reference = backend.build_reference(config, self.actor, self.policy, self.ranks)
        return self.reference

    def policy_scorer(self, step: int) -> LogProbScorer:
        return self.actor.scorer

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
        write = self._snapshots.copy(self._snapshot_source())
        if self.ranks.rank == 0:
            return write
        self._shard_writer = self._shard_writer or AsyncShardWriter(str(self.ranks.rank))
        self._shard_writer.save(directory, write)
        return lambda _: None

    @property
    def _saved_actor(self) -> LocalActor:
        """Actor of checkpoints: during the warm start, the actor with the warm start's optimizer."""
        return self.warm_start_actor or self.actor

    def _snapshot_source(self) -> SnapshotSource:
        base, actor = self._adapter_base or self.policy, self._saved_actor
        return SnapshotSource(self.experiment, self.ranks, actor, self.critic, self.reference, base, self.sft)

    def extra_state(self) -> dict[str, Any]:
        scales = {name: learner.loss_scale_state() for name, learner in self._scaled_learners()}
        return {name: scale for name, scale in scales.items() if scale}

    def load(self, directory: Path, contents: Collection[str], extra: Mapping[str, Any]) -> None:
        if self.sft and isinstance(self.actor, ActorLearner) and has_lora(self.actor.model):
            restore_adapters(self.actor, directory, contents)
        else:
            trusted = self.experiment.policy.trust_remote_code
            restore_actor(self._saved_actor, directory, contents, trust_remote_code=trusted)
            if not self.sft and self.warm_start_actor is None:
                self._restore_others(directory, contents)
        for name, learner in self._scaled_learners():
            if name in extra:
                learner.load_loss_scale_state(extra[name])

    def _restore_others(self, directory: Path, contents: Collection[str]) -> None:
        """Create and restore critic and reference as far as the experiment needs them here."""
        if MODEL_STEM in contents and has_lora(self.actor.model):
            self._adapter_base = read_base_model_path(directory / ADAPTER_DIRECTORY)
        config, layout = self.experiment, process_layout(self.experiment)
        if config.needs_critic and not layout.has_standalone(CRITIC):
            restore_critic(self.create_critic(), directory, contents)
        # a standalone reference gets its weights from the adapters here
        if config.needs_reference and (config.reference_has_adapters or not layout.has_standalone(REFERENCE)):
            reference = self.snapshot_reference()
            if has_weights(contents):
                restore_reference(reference, directory)

    def _scaled_learners(self) -> Iterator[tuple[str, LocalActor | LocalCritic]]:
        """Yield the learners by the name of their loss scale in a checkpoint."""
        yield f"{ACTOR}_scale", self._saved_actor
        if self.critic is not None:
            yield f"{CRITIC}_scale", self.critic
