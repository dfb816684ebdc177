"""Losses of an update of policy or critic, micro-batch by micro-batch, for any learner backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.distillation import teacher_divergence
from quintet.algorithms.drift import max_gap, token_gaps
from quintet.algorithms.losses.targets import PolicyLossInputs
from quintet.algorithms.objective import (
    CriticObjective,
    DistillationObjective,
    PolicyObjective,
    PolicyObjectiveFn,
    ValueTargets,
    batch_targets,
)
from quintet.config.native.algorithm import KlConfig
from quintet.config.native.training import DistillationConfig
from quintet.policies.token_statistics import TokenStatistics
from quintet.records import Batch
from quintet.training.packing import MicroBatch


class PolicyUpdate:
    """Targets of all response tokens of a mini-batch, and the loss of each of its micro-batches."""

    def __init__(
        self,
        batch: Batch,
        objective: PolicyObjectiveFn,
        aggregation: Aggregation | str,
        micro_batches: Iterable[MicroBatch],
        *,
        compute_log_probs: Callable[[Batch], Tensor],
        dtype: torch.dtype,
        has_reference: bool,
        seed: int,
    ) -> None:
        """`micro_batches` are the micro-batches of the update; `compute_log_probs` is called with the batch if the
        objective needs the current policy's log-probs; `dtype` is the data type of the policy's forward pass.

        Raises:
            ValueError: the divergence is `full` and there is no reference.
        """
        self._objective = objective
        self._policy = objective if isinstance(objective, PolicyObjective) else None
        if (self.full_divergence or self.distillation) and not has_reference:
            raise ValueError("this divergence needs the reference policy: call update(…, reference=…)")
        aggregation = _aggregation(aggregation)
        micro_batch_index = _micro_batch_index(batch, micro_batches, aggregation)
        self._targets: PolicyLossInputs = (
            self._policy.targets(batch, aggregation, part=micro_batch_index, logprobs=compute_log_probs, seed=seed)
            if self._policy
            else batch_targets(batch, aggregation, micro_batch_index)
        )
        self._response_index = batch.loss_mask.cumsum(0) - 1
        self._engine_logprobs = batch.logprobs if batch.rollout_logprobs is None else batch.rollout_logprobs
        self._tolerance = max_gap(dtype)
        self.largest_gap = 0.0
        """Largest gap between the engine's and the learner's probabilities in the passes so far."""

    @property
    def full_divergence(self) -> KlConfig | None:
        """Configuration of the loss term with the divergence over the whole vocabulary, if there is one."""
        return self._policy.full_divergence if self._policy else None

    @property
    def distillation(self) -> DistillationConfig | None:
        """Configuration of the divergence from a teacher, if it is a part of the loss."""
        return self._objective.config if isinstance(self._objective, DistillationObjective) else None

    @property
    def divergence_arguments(self) -> Mapping[str, Any] | None:
        """Arguments of `token_statistics` for the divergence from the reference; None if the loss has none."""
        if self.distillation is not None:
            return {"divergence_fn": partial(teacher_divergence, config=self.distillation)}
        return {"swapped": self.full_divergence.swapped} if self.full_divergence else None

    def loss(self, micro: MicroBatch, statistics: TokenStatistics) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a micro-batch's part of the loss and of the metrics, which are summed over micro-batches."""
        targets = self._targets.at(self._response_index[micro.index])
        if self.full_divergence or self.distillation:
            targets = replace(targets, divergence=statistics.divergence)
        gaps = token_gaps(statistics.logprobs.detach(), self._engine_logprobs[micro.index], self._tolerance)
        self.largest_gap = max(self.largest_gap, float(gaps["probs_diff"].max()))
        loss, metrics = self._objective(statistics.logprobs, statistics.entropy, targets)
        count = len(self._targets.weights)
        return loss, metrics | {f"{name}_mean": gap.sum() / count for name, gap in gaps.items()}

    def should_skip_step(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the metrics of the whole batch forbid the optimizer step (`stop_ratio`)."""
        return self._policy is not None and self._policy.skips_update(metrics)

    def final_metrics(self, metrics: dict[str, float], largest_gap: float) -> dict[str, float]:
        """Return the metrics of a completed update, with the largest gap over all ranks."""
        if self._policy and self._policy.config.stop_ratio is not None:
            metrics["actor/stopped_updates"] = float(self._policy.skips_update(metrics))
        return metrics | {"probs_diff_max": largest_gap}


class ValueUpdate:
    """Targets of the response tokens of a critic's mini-batch, and the loss of each of its micro-batches."""

    def __init__(
        self,
        batch: Batch,
        objective: CriticObjective,
        aggregation: Aggregation | str,
        split: Callable[[Batch], Iterable[MicroBatch]],
        mask: Tensor | None,
    ) -> None:
        """`mask`, bool [N], selects the response tokens to train on (None: all); `split(batch)` returns its
        micro-batches.

        Raises:
            ValueError: the batch has no values or no returns.
        """
        if batch.values is None or batch.returns is None:
            raise ValueError("a critic update needs a batch with values and returns")
        self._objective = objective
        self._old = batch.values
        self._returns = batch.returns
        self.batch = batch if mask is None else replace(batch, loss_mask=batch.loss_mask & mask)
        """The batch with the loss mask restricted to `mask`."""
        aggregation = _aggregation(aggregation)
        micro_batch_index = _micro_batch_index(self.batch, split(self.batch), aggregation)
        self._weights = aggregation.weights(self.batch.loss_mask, batch.token_trajectory, micro_batch_index)

    def loss(self, micro: MicroBatch, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a micro-batch's part of the loss and of the metrics, from the predicted values."""
        i = micro.index
        return self._objective(values, ValueTargets(self._weights[i], self._old[i], self._returns[i]))


def _aggregation(aggregation: Aggregation | str) -> Aggregation:
    return Aggregation(aggregation) if isinstance(aggregation, str) else aggregation


def _micro_batch_index(batch: Batch, micro_batches: Iterable[MicroBatch], aggregation: Aggregation) -> Tensor | None:
    """Return the index of each response token's micro-batch, int64 [N], if the aggregation depends on it."""
    if aggregation.exact:
        return None
    index = torch.zeros(len(batch.tokens), dtype=torch.long)
    for number, micro in enumerate(micro_batches):
        index[micro.index] = number
    return index
