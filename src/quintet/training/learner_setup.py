"""Settings that the constructors of learners and scorers share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quintet.training.offload import Offload
from quintet.training.optim.loss_scale import LossScale
from quintet.training.packing import MicroBatchBudget
from quintet.training.parallel.process_group import RankGroup
from quintet.training.parallel.strategy import ParallelStrategy


@dataclass(frozen=True, slots=True)
class LearnerSetup:
    """Micro-batch limits, precision, ranks, weight placement and offloading of a learner or scorer."""

    budget: MicroBatchBudget
    """Micro-batch limits of passes with gradients."""
    inference_budget: MicroBatchBudget | None = None
    """Micro-batch limits of forward-only passes (default: `budget`)."""
    dtype: torch.dtype = torch.float32
    """Dtype of matrix products, by autocast if it is not float32."""
    temperature: float = 1.0
    """Divisor of a policy's logits, as in sampling."""
    ranks: RankGroup = RankGroup()  # noqa: RUF009  # frozen
    """Data-parallel ranks, which divide the micro-batches among them."""
    strategy: ParallelStrategy | None = None
    """Parallel strategy (default: replicated on `ranks`)."""
    loss_scale: LossScale | None = None
    """Loss scaling, for float16."""
    offload: Offload | None = None
    """Offloading of weights and optimizer state between calls (default: none)."""

    @property
    def forward_budget(self) -> MicroBatchBudget:
        """Micro-batch limits of forward-only passes."""
        return self.inference_budget or self.budget
