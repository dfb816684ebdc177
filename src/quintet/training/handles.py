"""What a run knows of its learners and judges, be they objects of this process or on many ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import CriticObjective, PolicyLearning
from quintet.config.native import OptimizerConfig
from quintet.records import Batch
from quintet.training.learner import Viewed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Actor", "Critic", "Judge", "OwnActor"]


class Judge(Viewed, Protocol):
    """A policy that says how likely it is to write what somebody wrote; see `Scorer`."""

    @property
    def model(self) -> PreTrainedModel:
        """As this process holds it."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        ...

    def logprobs(self, batch: Batch) -> Tensor:
        """See `Scorer.logprobs`."""
        ...

    def squared_mass(self, batch: Batch) -> Tensor:
        """See `Scorer.squared_mass`."""
        ...

    def divergence(self, batch: Batch, reference: Viewed, *, swapped: bool = False) -> Tensor:
        """See `Scorer.divergence`."""
        ...


class Actor(Protocol):
    """What trains the policy; see `ActorLearner`."""

    @property
    def model(self) -> PreTrainedModel:
        """As this process holds it."""
        ...

    @property
    def scorer(self) -> Judge:
        """The policy as it is now."""
        ...

    def update(
        self,
        batch: Batch,
        objective: PolicyLearning,
        aggregation: Aggregation | str,
        rate: float,
        *,
        reference: Viewed | None = None,
        seed: int = 0,
        decay: float | None = None,
    ) -> dict[str, float]:
        """See `ActorLearner.update`."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Learner.weights`."""
        ...

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """See `ActorLearner.adapters`."""
        ...


class OwnActor(Actor, Protocol):
    """The part of it that lies in this process."""

    def under(self, config: OptimizerConfig) -> OwnActor:
        """See `ActorLearner.under`."""
        ...


class Critic(Protocol):
    """What trains the critic; see `CriticLearner`."""

    def values(self, batch: Batch) -> Tensor:
        """See `CriticLearner.values`."""
        ...

    def update(
        self,
        batch: Batch,
        objective: CriticObjective,
        aggregation: Aggregation | str,
        rate: float,
        mask: Tensor | None = None,
        *,
        decay: float | None = None,
    ) -> dict[str, float]:
        """See `CriticLearner.update`."""
        ...
