"""Protocols of learners and log-prob scorers, in this process or on many ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, PolicyObjectiveFn
from quintet.config.native.learners import OptimizerConfig
from quintet.policies.packed_batch import PackedBatch
from quintet.policies.token_statistics import LazyLogits
from quintet.records import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Learner(Protocol):
    """A learner whose weights can be read."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under Hugging Face names."""


class DivergenceReference(Protocol):
    """A policy from which the KL divergence over the whole vocabulary is measured."""

    def lazy_logits(self, packed: PackedBatch) -> LazyLogits:
        """Return hidden states and head of a pass."""

    def precompute_lazy_logits(self, passes: Sequence[PackedBatch]) -> None:
        """Prepare for one `lazy_logits` call for each of these passes."""

    def on_device(self) -> AbstractContextManager[None]:
        """Keep offloaded weights on the device within the context, for several calls."""


class LogProbScorer(DivergenceReference, Protocol):
    """A policy that computes log-probs of given responses; see `PolicyScorer`."""

    @property
    def model(self) -> PreTrainedModel:
        """This process's model."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the forward pass."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `PolicyScorer.weights`."""

    def compute_log_probs(self, batch: Batch) -> Tensor:
        """See `PolicyScorer.compute_log_probs`."""

    def compute_entropies(self, batch: Batch) -> Tensor:
        """See `PolicyScorer.compute_entropies`."""

    def compute_sum_squared_probs(self, batch: Batch) -> Tensor:
        """See `PolicyScorer.compute_sum_squared_probs`."""

    def compute_divergence(self, batch: Batch, reference: DivergenceReference, *, swapped: bool = False) -> Tensor:
        """See `PolicyScorer.compute_divergence`."""


class PolicyCopy(LogProbScorer, Protocol):
    """A scorer with a copy of the policy that is trained elsewhere."""

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load full tensors under Hugging Face names."""


class Actor(Protocol):
    """Learner of the policy; see `ActorLearner`."""

    @property
    def model(self) -> PreTrainedModel:
        """This process's model."""

    @property
    def scorer(self) -> LogProbScorer:
        """Scorer with the current policy."""

    def update(
        self,
        batch: Batch,
        objective: PolicyObjectiveFn,
        aggregation: Aggregation | str,
        learning_rate: float,
        *,
        reference: DivergenceReference | None = None,
        seed: int = 0,
        weight_decay: float | None = None,
    ) -> dict[str, float]:
        """See `ActorLearner.update`."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.weights`."""

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """See `ActorLearner.adapters`."""

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `ActorLearner.base_weights`."""

    def adapter_scales(self) -> dict[str, float]:
        """See `ActorLearner.adapter_scales`."""


class LossScaled(Protocol):
    """A learner whose loss scale is part of a checkpoint."""

    def loss_scale_state(self) -> dict[str, float]:
        """Return the state of the loss scale; empty if losses are not scaled."""

    def load_loss_scale_state(self, state: Mapping[str, float]) -> None:
        """Load the state, unless another backend has saved it: its loss scale follows other rules."""


class LocalActor(Actor, LossScaled, Protocol):
    """This process's part of an actor."""

    def with_optimizer(self, config: OptimizerConfig) -> LocalActor:
        """See `ActorLearner.with_optimizer`."""


class Critic(Protocol):
    """Learner of the critic; see `CriticLearner`."""

    def compute_values(self, batch: Batch) -> Tensor:
        """See `CriticLearner.compute_values`."""

    def update(
        self,
        batch: Batch,
        objective: CriticObjective,
        aggregation: Aggregation | str,
        learning_rate: float,
        mask: Tensor | None = None,
        *,
        weight_decay: float | None = None,
    ) -> dict[str, float]:
        """See `CriticLearner.update`."""


class LocalCritic(Critic, LossScaled, Protocol):
    """This process's part of a critic."""
