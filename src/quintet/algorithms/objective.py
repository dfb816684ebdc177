"""Objectives that learners minimize on the tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from quintet.algorithms.aggregation import Aggregation, token_weights
from quintet.algorithms.kl import token_divergence
from quintet.algorithms.losses.critic import value_clip
from quintet.algorithms.losses.custom import loss_from_config
from quintet.algorithms.losses.distillation import teacher_divergence
from quintet.algorithms.losses.ratios import bounded_log_ratio
from quintet.algorithms.losses.targets import Loss, PolicyLossInputs
from quintet.config.native.algorithm import AlgorithmConfig, KlConfig
from quintet.config.native.learners import CriticConfig
from quintet.config.native.losses import DistillationLossConfig
from quintet.config.native.training import DistillationConfig
from quintet.records import Batch


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """Targets of the critic per predicted token, all [M]."""

    weights: Tensor
    old_values: Tensor
    returns: Tensor


class PolicyObjectiveFn(Protocol):
    """`(logprobs [M], entropy [M], targets) -> (loss, metrics)`, all sums of `weight * value`, so that the
    micro-batches of a mini-batch add up to its mean."""

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, targets: PolicyLossInputs, /
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


def batch_targets(batch: Batch, aggregation: Aggregation, part: Tensor | None = None) -> PolicyLossInputs:
    """Return the targets of a mini-batch's response tokens, in order; missing advantages are 0. `part` int64 [N]
    numbers the micro-batches (see `Aggregation.weights`)."""
    mask, owner = batch.loss_mask, batch.token_trajectory
    advantages = torch.zeros_like(batch.logprobs) if batch.advantages is None else batch.advantages
    sequence = torch.arange(len(batch.lengths)).repeat_interleave(batch.lengths)
    weights = aggregation.weights(mask, owner, part, batch.logprobs.dtype)
    return PolicyLossInputs(
        weights=weights,
        old_logprobs=batch.logprobs,
        advantages=advantages,
        ref_logprobs=batch.ref_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        correction=batch.correction,
        sequence=sequence,
        regularizer_weights=weights,
        metric_weights=token_weights("token-mean", mask, owner, dtype=batch.logprobs.dtype),
    ).at(mask.nonzero().squeeze(-1))


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Configured policy loss with rollout correction, entropy bonus, and KL divergence if it is a term of the loss.

    Raises:
        ConfigError: the loss is unknown or cannot be loaded.
    """

    config: AlgorithmConfig
    loss: Loss = field(init=False)
    options: Any = field(init=False)
    """`config` argument of the loss."""

    def __post_init__(self) -> None:
        loss, options = loss_from_config(self.config.loss)
        object.__setattr__(self, "loss", loss)
        object.__setattr__(self, "options", options)

    @property
    def divergence(self) -> KlConfig | None:
        """Config of the KL divergence if it is a term of the loss."""
        return self.config.kl_in_loss

    @property
    def full_divergence(self) -> KlConfig | None:
        """The same if it sums over the vocabulary: targets need `divergence`."""
        return self.divergence if self.divergence and self.divergence.estimator == "full" else None

    def targets(
        self,
        batch: Batch,
        aggregation: Aggregation,
        *,
        part: Tensor | None = None,
        logprobs: Callable[[Batch], Tensor],
        seed: int = 0,
    ) -> PolicyLossInputs:
        """Return `batch_targets` with the aggregation, mask and selected tokens of this loss.

        `logprobs` computes the log-probs of the current policy, [N], and `seed` is the random seed, both for selection.
        """
        targets = batch_targets(batch, aggregation, part)
        mask, response_index = batch.loss_mask.clone(), batch.loss_mask.nonzero().squeeze(-1)
        if self.loss.mask is not None:
            mask[response_index] = self.loss.mask(targets, self.options)
        if self.loss.aggregation is not None:
            aggregation = replace(aggregation, mode=self.loss.aggregation)
        weights = aggregation.weights(mask, batch.token_trajectory, part, batch.logprobs.dtype)[response_index]
        targets = replace(targets, weights=weights)
        if self.loss.select is None:
            return targets
        generator = torch.Generator().manual_seed(seed)
        selected = self.loss.select(logprobs(batch)[response_index], targets, self.options, generator)
        return replace(targets, selected=selected)

    def skips_update(self, metrics: Mapping[str, float]) -> bool:
        """Return whether to skip an update because the mean ratio of its mini-batch exceeds `stop_ratio`.

        RLinf's `early_stop_imp_ratio` zeroes the loss of a micro-batch by the ratio of that micro-batch alone.
        """
        bound = self.config.stop_ratio
        return bound is not None and metrics.get("actor/ratio", 0.0) > bound

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, targets: PolicyLossInputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `PolicyObjectiveFn`. Loss, entropy and divergence are aggregated as configured; ratio, `ppo_kl` and clip
        fractions are means over tokens."""
        parts = self.loss(logprobs, targets, self.options)
        losses = parts.loss
        if targets.correction is not None and not self.loss.applies_correction:
            losses = losses * targets.correction
        policy = (losses * targets.weights).sum()
        terms = targets.weights if targets.regularizer_weights is None else targets.regularizer_weights
        metric_weights = targets.weights if targets.metric_weights is None else targets.metric_weights
        mean_entropy = (entropy * terms).sum()
        metrics = {
            "actor/pg_loss": policy,
            "actor/entropy": mean_entropy,
            "actor/ratio": (bounded_log_ratio(logprobs, targets.old_logprobs).detach().exp() * metric_weights).sum(),
            "actor/ppo_kl": (parts.kl * metric_weights).sum(),
            "actor/pg_clipfrac": (parts.clipped * metric_weights).sum(),
            "actor/pg_clipfrac_lower": (parts.clipped_lower * metric_weights).sum(),
        }
        if isinstance(self.options, DistillationLossConfig):
            from_teacher = teacher_divergence(logprobs.detach(), targets, self.options)
            metrics["actor/teacher_kl"] = (from_teacher * metric_weights).sum()
        total = policy
        if self.config.entropy_coefficient:
            total = total - self.config.entropy_coefficient * mean_entropy
        kl = self.divergence
        if kl and (targets.ref_logprobs is not None or targets.divergence is not None):
            divergence = (token_divergence(logprobs, targets.ref_logprobs, kl, targets.divergence) * terms).sum()
            metrics |= {"actor/kl_loss": divergence}
            total = total + kl.coefficient * divergence
        return total, metrics


@dataclass(frozen=True, slots=True)
class CrossEntropyObjective:
    """Cross-entropy on demonstrated responses."""

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, targets: PolicyLossInputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `PolicyObjectiveFn`. A token counts as correct if its probability is above one half."""
        loss = -(logprobs * targets.weights).sum()
        correct = ((logprobs > torch.log(torch.tensor(0.5))) * targets.weights).sum()
        return loss, {"sft/loss": loss, "sft/likely_tokens": correct}


@dataclass(frozen=True, slots=True)
class DistillationObjective:
    """Cross-entropy on demonstrated responses, and the divergence from a teacher."""

    config: DistillationConfig

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, targets: PolicyLossInputs
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `PolicyObjectiveFn`.

        Raises:
            ValueError: the targets have no divergence.
        """
        if targets.divergence is None:
            raise ValueError("distillation needs the divergence from the teacher")
        loss, metrics = CrossEntropyObjective()(logprobs, entropy, targets)
        divergence = (targets.divergence * targets.weights).sum()
        total = (1.0 - self.config.weight) * loss + self.config.weight * divergence
        return total, metrics | {"sft/distillation_loss": divergence}


@dataclass(frozen=True, slots=True)
class CriticObjective:
    """Clipped squared error of values."""

    config: CriticConfig

    def __call__(self, values: Tensor, targets: ValueTargets) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of `values` [M] as sums of `weight * value`."""
        parts = value_clip(values, targets.old_values, targets.returns, self.config.value_clip)
        loss = (parts.loss * targets.weights).sum()
        clipped = (parts.clipped * targets.weights).sum()
        return loss, {"critic/vf_loss": loss, "critic/vf_clipfrac": clipped}
