"""Objectives: what a learner minimises on the tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from quintet.algorithms.kl import kl_estimate
from quintet.algorithms.losses import ppo_clip, value_clip
from quintet.config.native import AlgorithmConfig, CriticConfig, PpoLossConfig

__all__ = ["CriticObjective", "Imitation", "PolicyObjective", "PolicyTargets", "ValueTargets"]


@dataclass(frozen=True, slots=True)
class PolicyTargets:
    """Per predicted token, all [M]. `weights` are those of the whole mini-batch (`token_weights`)."""

    weights: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    ref_logprobs: Tensor | None = None


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


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Clipped policy gradient minus the entropy bonus, plus the divergence from the reference where it
    is a term of the loss."""

    config: AlgorithmConfig

    def __call__(self, logprobs: Tensor, entropy: Tensor, targets: PolicyTargets) -> tuple[Tensor, dict[str, Tensor]]:
        """See `PolicyLearning`."""
        c, loss = self.config, self.config.loss
        if not isinstance(loss, PpoLossConfig):
            raise NotImplementedError(loss.name)
        parts = ppo_clip(
            logprobs, targets.old_logprobs, targets.advantages, loss.clip_low, loss.clip_high, loss.clip_dual
        )
        policy = (parts.loss * targets.weights).sum()
        spread = (entropy * targets.weights).sum()
        metrics = {
            "actor/pg_loss": policy,
            "actor/entropy": spread,
            "actor/ppo_kl": (parts.kl * targets.weights).sum(),
            "actor/pg_clipfrac": (parts.clipped * targets.weights).sum(),
            "actor/pg_clipfrac_lower": (parts.clipped_lower * targets.weights).sum(),
        }
        total = policy - c.entropy_coefficient * spread
        if c.kl and c.kl.place == "loss" and targets.ref_logprobs is not None:
            divergence = (kl_estimate(logprobs, targets.ref_logprobs, c.kl.estimator) * targets.weights).sum()
            metrics |= {"actor/kl_loss": divergence}
            total = total + c.kl.coefficient * divergence
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
