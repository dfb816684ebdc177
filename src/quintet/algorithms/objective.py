"""Objectives: what a learner minimises on the tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from quintet.algorithms.aggregation import Aggregation, token_weights
from quintet.algorithms.kl import token_divergence
from quintet.algorithms.losses import Loss, PolicyTargets, loss_of, value_clip
from quintet.algorithms.losses.ratios import bounded_log_ratio
from quintet.config.native import AlgorithmConfig, CriticConfig, KlConfig
from quintet.records import Batch

__all__ = [
    "CriticObjective",
    "Imitation",
    "PolicyLearning",
    "PolicyObjective",
    "PolicyTargets",
    "ValueTargets",
    "batch_targets",
]


@dataclass(frozen=True, slots=True)
class ValueTargets:
    """Per predicted token, all [M]."""

    weights: Tensor
    old_values: Tensor
    returns: Tensor


class PolicyLearning(Protocol):
    """`(logprobs [M], entropy [M], targets) -> (loss, metrics)`: sums of `weight * value`, so that the
    parts of a mini-batch add up to its mean."""

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, targets: PolicyTargets, /
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


def batch_targets(batch: Batch, aggregation: Aggregation, part: Tensor | None = None) -> PolicyTargets:
    """What a mini-batch says of its own tokens, in its order; `part` int64 [N] numbers micro-batches (see
    `Aggregation.weights`). Without advantages they are 0."""
    mask, owner = batch.loss_mask, batch.token_trajectory
    advantages = torch.zeros_like(batch.logprobs) if batch.advantages is None else batch.advantages
    sequence = torch.arange(len(batch.lengths)).repeat_interleave(batch.lengths)
    weights = aggregation.weights(mask, owner, part, batch.logprobs.dtype)
    return PolicyTargets(
        weights=weights,
        old_logprobs=batch.logprobs,
        advantages=advantages,
        ref_logprobs=batch.ref_logprobs,
        rollout_logprobs=batch.rollout_logprobs,
        correction=batch.correction,
        sequence=sequence,
        term_weights=weights,
        shares=token_weights("token-mean", mask, owner, dtype=batch.logprobs.dtype),
    ).at(mask.nonzero().squeeze(-1))


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The configured loss, times the weights of the engine-learner gap, minus the entropy bonus, plus the divergence
    from the reference where it is a term of the loss.

    Raises:
        ConfigError: there is no such loss, or a function from outside can't be loaded.
    """

    config: AlgorithmConfig
    loss: Loss = field(init=False)
    options: Any = field(init=False)
    """What the loss takes as its configuration."""

    def __post_init__(self) -> None:
        loss, options = loss_of(self.config.loss)
        object.__setattr__(self, "loss", loss)
        object.__setattr__(self, "options", options)

    @property
    def divergence(self) -> KlConfig | None:
        """The divergence that is a term of the loss."""
        return self.config.kl if self.config.kl and self.config.kl.place == "loss" else None

    @property
    def full_divergence(self) -> KlConfig | None:
        """The same where it sums over the vocabulary: targets must bring it."""
        return self.divergence if self.divergence and self.divergence.estimator == "full" else None

    def targets(
        self,
        batch: Batch,
        aggregation: Aggregation,
        *,
        part: Tensor | None = None,
        logprobs: Callable[[Batch], Tensor],
        seed: int = 0,
    ) -> PolicyTargets:
        """`batch_targets` as this loss wants them: its own aggregation, without the tokens that it leaves out, and
        with those that it selects.

        `logprobs` gives the present policy's, [N], for a selection; `seed` decides what is drawn there.
        """
        targets = batch_targets(batch, aggregation, part)
        mask, own = batch.loss_mask.clone(), batch.loss_mask.nonzero().squeeze(-1)
        if self.loss.counted is not None:
            mask[own] = self.loss.counted(targets, self.options)
        if self.loss.aggregation is not None:
            aggregation = replace(aggregation, mode=self.loss.aggregation)
        weights = aggregation.weights(mask, batch.token_trajectory, part, batch.logprobs.dtype)[own]
        targets = replace(targets, weights=weights)
        if self.loss.select is None:
            return targets
        generator = torch.Generator().manual_seed(seed)
        selected = self.loss.select(logprobs(batch)[own], targets, self.options, generator)
        return replace(targets, selected=selected)

    def stops(self, metrics: Mapping[str, float]) -> bool:
        """Whether an update isn't to be made: the mean ratio over its mini-batch exceeds `stop_ratio`.

        RLinf's `early_stop_imp_ratio` zeroes the loss of a micro-batch by the ratio of that micro-batch alone.
        """
        bound = self.config.stop_ratio
        return bound is not None and metrics.get("actor/ratio", 0.0) > bound

    def __call__(self, logprobs: Tensor, entropy: Tensor, targets: PolicyTargets) -> tuple[Tensor, dict[str, Tensor]]:
        """See `PolicyLearning`. Loss, entropy and divergence are aggregated as configured; ratio, `ppo_kl` and the
        clipped shares are means over tokens."""
        parts = self.loss(logprobs, targets, self.options)
        each = parts.loss
        if targets.correction is not None and not self.loss.corrects:
            each = each * targets.correction
        policy = (each * targets.weights).sum()
        terms = targets.weights if targets.term_weights is None else targets.term_weights
        shares = targets.weights if targets.shares is None else targets.shares
        spread = (entropy * terms).sum()
        metrics = {
            "actor/pg_loss": policy,
            "actor/entropy": spread,
            "actor/ratio": (bounded_log_ratio(logprobs, targets.old_logprobs).detach().exp() * shares).sum(),
            "actor/ppo_kl": (parts.kl * shares).sum(),
            "actor/pg_clipfrac": (parts.clipped * shares).sum(),
            "actor/pg_clipfrac_lower": (parts.clipped_lower * shares).sum(),
        }
        total = policy
        if self.config.entropy_coefficient:
            total = total - self.config.entropy_coefficient * spread
        kl = self.divergence
        if kl and (targets.ref_logprobs is not None or targets.divergence is not None):
            divergence = (token_divergence(logprobs, targets.ref_logprobs, kl, targets.divergence) * terms).sum()
            metrics |= {"actor/kl_loss": divergence}
            total = total + kl.coefficient * divergence
        return total, metrics


@dataclass(frozen=True, slots=True)
class Imitation:
    """Cross-entropy on the demonstrator's words."""

    def __call__(self, logprobs: Tensor, entropy: Tensor, targets: PolicyTargets) -> tuple[Tensor, dict[str, Tensor]]:
        """See `PolicyLearning`. A token counts as right where its probability is above one half."""
        loss = -(logprobs * targets.weights).sum()
        right = ((logprobs > torch.log(torch.tensor(0.5))) * targets.weights).sum()
        return loss, {"sft/loss": loss, "sft/token_accuracy": right}


@dataclass(frozen=True, slots=True)
class CriticObjective:
    """Clipped squared error of the values."""

    config: CriticConfig

    def __call__(self, values: Tensor, targets: ValueTargets) -> tuple[Tensor, dict[str, Tensor]]:
        """`values` [M]; gives loss and metrics as sums of `weight * value`."""
        parts = value_clip(values, targets.old_values, targets.returns, self.config.value_clip)
        loss = (parts.loss * targets.weights).sum()
        clipped = (parts.clipped * targets.weights).sum()
        return loss, {"critic/vf_loss": loss, "critic/vf_clipfrac": clipped}
