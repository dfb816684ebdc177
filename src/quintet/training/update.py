"""What an update of a policy or a critic learns from each micro-batch, whoever computes its passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.drift import token_gaps, tolerated
from quintet.algorithms.losses import PolicyTargets
from quintet.algorithms.objective import (
    CriticObjective,
    PolicyLearning,
    PolicyObjective,
    ValueTargets,
    batch_targets,
)
from quintet.config.native import KlConfig
from quintet.policies.causal_lm import TokenMeasures
from quintet.records import Batch
from quintet.training.packing import MicroBatch

__all__ = ["PolicyUpdate", "ValueUpdate"]


class PolicyUpdate:
    """Targets of all own tokens, and from them the loss of each micro-batch."""

    def __init__(
        self,
        batch: Batch,
        objective: PolicyLearning,
        aggregation: Aggregation | str,
        micros: Iterable[MicroBatch],
        *,
        logprobs: Callable[[Batch], Tensor],
        dtype: torch.dtype,
        referred: bool,
        seed: int,
    ) -> None:
        """`micros` are those that the batch will be learnt in; `logprobs` are the policy's own, where the objective
        needs them; `referred` says whether there is a reference, `dtype` what the policy computes in.

        Raises:
            ValueError: the divergence is to be `full` and there is no reference.
        """
        self._objective = objective
        self._policy = objective if isinstance(objective, PolicyObjective) else None
        if self.full and not referred:
            raise ValueError("the full divergence needs the reference itself: update(…, reference=…)")
        aggregation = _aggregation(aggregation)
        part = _parts(batch, micros, aggregation)
        self._targets: PolicyTargets = (
            self._policy.targets(batch, aggregation, part=part, logprobs=logprobs, seed=seed)
            if self._policy
            else batch_targets(batch, aggregation, part)
        )
        self._place = batch.loss_mask.cumsum(0) - 1
        self._engine = batch.logprobs if batch.rollout_logprobs is None else batch.rollout_logprobs
        self._limit = tolerated(dtype)
        self.largest_gap = 0.0
        """Between the engine's and the learner's probabilities, in the passes so far."""

    @property
    def full(self) -> KlConfig | None:
        """The divergence over the whole vocabulary in the loss, if there is one."""
        return self._policy.full_divergence if self._policy else None

    def loss(self, micro: MicroBatch, measures: TokenMeasures) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's part of the loss, and of the metrics, which are sums over micro-batches."""
        some = self._targets.at(self._place[micro.index])
        some = replace(some, divergence=measures.divergence) if self.full else some
        gaps = token_gaps(measures.logprobs.detach(), self._engine[micro.index], self._limit)
        self.largest_gap = max(self.largest_gap, float(gaps["probs_diff"].max()))
        loss, metrics = self._objective(measures.logprobs, measures.entropy, some)
        count = len(self._targets.weights)
        return loss, metrics | {f"{name}_mean": gap.sum() / count for name, gap in gaps.items()}

    def stops(self, metrics: Mapping[str, float]) -> bool:
        """Whether the optimizer step isn't to be made, by the whole batch's metrics."""
        return self._policy is not None and self._policy.stops(metrics)

    def told(self, metrics: dict[str, float], largest_gap: float) -> dict[str, float]:
        """The metrics of an update that is done, with the largest gap of all ranks."""
        if self._policy and self._policy.config.stop_ratio is not None:
            metrics["actor/stopped_updates"] = float(self._policy.stops(metrics))
        return metrics | {"probs_diff_max": largest_gap}


class ValueUpdate:
    """The same of a critic."""

    def __init__(
        self,
        batch: Batch,
        objective: CriticObjective,
        aggregation: Aggregation | str,
        micros: Callable[[Batch], Iterable[MicroBatch]],
        mask: Tensor | None,
    ) -> None:
        """`mask` bool [N] are the own tokens whose values are learnt, None all of them; `micros` are those in which a
        batch is learnt.

        Raises:
            ValueError: the batch has no values or no returns.
        """
        if batch.values is None or batch.returns is None:
            raise ValueError("the critic learns from a batch with values and returns")
        self._objective, self._old, self._returns = objective, batch.values, batch.returns
        self.batch = batch if mask is None else replace(batch, loss_mask=batch.loss_mask & mask)
        """What is learnt."""
        aggregation = _aggregation(aggregation)
        part = _parts(self.batch, micros(self.batch), aggregation)
        self._weights = aggregation.weights(self.batch.loss_mask, batch.token_trajectory, part)

    def loss(self, micro: MicroBatch, values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's part of the loss and of the metrics, from the values at its places."""
        i = micro.index
        return self._objective(values, ValueTargets(self._weights[i], self._old[i], self._returns[i]))


def _aggregation(given: Aggregation | str) -> Aggregation:
    return Aggregation(given) if isinstance(given, str) else given


def _parts(batch: Batch, micros: Iterable[MicroBatch], aggregation: Aggregation) -> Tensor | None:
    """The number of each own token's micro-batch, int64 [N], where the aggregation depends on it."""
    if aggregation.exact:
        return None
    part = torch.zeros(len(batch.tokens), dtype=torch.long)
    for number, micro in enumerate(micros):
        part[micro.index] = number
    return part
