"""Objective of a policy that outputs chunks of robot actions, and of its value head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintet.algorithms.chunks.levels import Level, level_advantages, level_sums, level_weights
from quintet.algorithms.kl import token_divergence
from quintet.algorithms.losses.critic import value_clip
from quintet.algorithms.losses.custom import loss_from_config
from quintet.algorithms.losses.ratios import bounded_log_ratio
from quintet.algorithms.losses.targets import Loss, PolicyLoss, PolicyLossInputs
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.losses import ClippedRatioSection
from quintet.embodied_records import ActionStatistics, ChunkBatch

Metrics = dict[str, Tensor]
"""Sums of `weight * value`, which add up over the micro-batches of a mini-batch."""


class ChunkNormalizer(NamedTuple):
    """Divisors of sums over a mini-batch of all ranks, at least 1."""

    policy: float
    """Of the policy loss."""
    ratios: float
    """Number of probability ratios that are trained on, for metrics."""
    entropies: float
    tokens: float
    """Of the KL divergence from the reference."""
    values: float


@dataclass(frozen=True, slots=True)
class ChunkObjective:
    """Configured policy loss with entropy bonus, KL divergence from the reference and, if the policy has a value head,
    the loss of its values.

    Raises:
        ConfigError: the loss is unknown or cannot be loaded.
    """

    config: Experiment
    policy_loss: Loss = field(init=False)
    options: Any = field(init=False)
    """`config` argument of the loss."""

    def __post_init__(self) -> None:
        loss, options = loss_from_config(self.config.algorithm.loss)
        object.__setattr__(self, "policy_loss", loss)
        object.__setattr__(self, "options", options)

    @property
    def algorithm(self) -> AlgorithmConfig:
        """Configuration of the algorithm."""
        return self.config.algorithm

    def normalizer(
        self, batch: ChunkBatch, sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x
    ) -> ChunkNormalizer:
        """Return the divisors of a mini-batch, of which `batch` has this rank's chunk steps, flattened.

        `token-mean` divides by the number of ratios, entropies, … in the mask, and `seq-mean-token-mean` by that of
        all, because its weights have the mean 1 over a rollout.
        """
        weights = {level: self._weights(batch, level) for level in LEVELS}
        trained = weights[self.algorithm.level] > 0
        value_weights = self._value_weights(batch)
        divisors = [
            self._divisor(self._policy_weights(batch)),
            trained.sum(),
            self._divisor(weights[self.algorithm.entropy_level]),
            self._divisor(weights["token"]),
            self._divisor(value_weights),
        ]
        totals = sum_over_ranks(torch.stack([divisor.double() for divisor in divisors]))
        return ChunkNormalizer(*totals.clamp(min=1.0).tolist())

    def loss(
        self, statistics: ActionStatistics, batch: ChunkBatch, normalizer: ChunkNormalizer
    ) -> tuple[Tensor, Metrics]:
        """Return loss and metrics of a micro-batch; those of all micro-batches of a mini-batch add up to its own.

        Args:
            statistics: Log-probs and entropies [N, C, D], and values [N, V], under the current policy, on any device.
            batch: The same chunk steps, flattened, with advantages.
            normalizer: Divisors of the mini-batch.

        Raises:
            ValueError: the batch lacks advantages, values or the log-probs of the reference.
        """
        batch = replace(batch, inputs={}).map(lambda tensor: tensor.to(statistics.logprobs.device))
        loss, metrics = self._policy_loss(statistics, batch, normalizer)
        entropies = level_sums(statistics.entropies, self.algorithm.entropy_level)
        weights = self._weights(batch, self.algorithm.entropy_level)
        metrics["actor/entropy"] = entropy = (entropies * weights).sum() / normalizer.entropies
        loss = loss - self.algorithm.entropy_coefficient * entropy
        kl = self.algorithm.kl
        if kl:
            divergence = token_divergence(statistics.logprobs, batch.ref_logprobs, kl, None)
            weighted = (divergence * self._weights(batch, "token")).sum() / normalizer.tokens
            metrics["actor/kl_loss"] = weighted
            loss = loss + kl.coefficient * weighted
        if self.config.needs_critic:
            value_loss, value_metrics = self._value_loss(statistics, batch, normalizer)
            loss, metrics = loss + value_loss, metrics | value_metrics
        return loss, metrics | {"actor/total_loss": loss}

    def skips_update(self, metrics: Mapping[str, float]) -> bool:
        """Return whether to skip an update because the mean ratio of its mini-batch exceeds `stop_ratio`."""
        bound = self.algorithm.stop_ratio
        return bound is not None and metrics.get("actor/ratio", 0.0) > bound

    def _policy_loss(
        self, statistics: ActionStatistics, batch: ChunkBatch, normalizer: ChunkNormalizer
    ) -> tuple[Tensor, Metrics]:
        trained = self._weights(batch, self.algorithm.level) > 0
        logprobs = level_sums(statistics.logprobs, self.algorithm.level)[trained]
        targets = self._targets(batch, trained)
        weights = self._policy_weights(batch)[trained] / normalizer.policy
        parts = self.policy_loss(logprobs, replace(targets, weights=weights), self.options)
        loss = (parts.loss * weights).sum()
        metrics = self._ratio_metrics(logprobs, targets, parts)
        means = {name: values.detach().sum() / normalizer.ratios for name, values in metrics.items()}
        return loss, {"actor/pg_loss": loss, "actor/pg_loss_abs": (parts.loss.abs() * weights).sum(), **means}

    def _ratio_metrics(self, logprobs: Tensor, targets: PolicyLossInputs, parts: PolicyLoss) -> Metrics:
        """Return metrics of each ratio, [M]."""
        ratio = bounded_log_ratio(logprobs, targets.old_logprobs).exp()
        metrics = {
            "actor/ratio": ratio,
            "actor/ratio_abs": (ratio - 1.0).abs(),
            "actor/ppo_kl": parts.kl,
            "actor/pg_clipfrac": parts.clipped,
            "actor/pg_clipfrac_lower": parts.clipped_lower,
            "actor/dual_clipped_ratio": ratio * parts.clipped_lower,
        }
        config = self.algorithm.loss
        if isinstance(config, ClippedRatioSection):
            metrics["actor/clipped_ratio"] = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
        if targets.rollout_logprobs is not None:
            metrics["actor/behavior_kl"] = targets.rollout_logprobs - targets.old_logprobs
            metrics["actor/behavior_clipfrac"] = ~self._unmasked(targets)
        return metrics

    def _value_loss(
        self, statistics: ActionStatistics, batch: ChunkBatch, normalizer: ChunkNormalizer
    ) -> tuple[Tensor, Metrics]:
        if statistics.values is None or batch.values is None or batch.returns is None:
            raise ValueError("the loss of values needs a value head, and a batch with values and returns")
        critic, weights = self.config.critic, self._value_weights(batch) / normalizer.values
        parts = value_clip(statistics.values, batch.values, batch.returns, critic.value_clip, critic.huber_delta)
        loss = (parts.loss * weights).sum()
        return loss, {"critic/vf_loss": loss, "critic/vf_clipfrac": (parts.clipped * weights).sum()}

    def _targets(self, batch: ChunkBatch, trained: Tensor) -> PolicyLossInputs:
        """Return the constants of the trained ratios, [M]; `trained`, bool, is at the level of ratios."""
        if batch.advantages is None:
            raise ValueError("the policy loss needs a batch with advantages")
        level, (_, num_actions, action_dim) = self.algorithm.level, batch.logprobs.shape
        advantages = level_advantages(batch.advantages, level, num_actions, action_dim)[trained]
        rollout = batch.rollout_logprobs
        return PolicyLossInputs(
            weights=torch.ones_like(advantages),
            old_logprobs=level_sums(batch.logprobs, level)[trained],
            advantages=advantages,
            rollout_logprobs=None if rollout is None else level_sums(rollout, level)[trained],
        )

    def _unmasked(self, targets: PolicyLossInputs) -> Tensor:
        """Return the ratios that the loss does not mask out, bool [M]."""
        if self.policy_loss.mask is None:
            return torch.ones_like(targets.advantages, dtype=torch.bool)
        return self.policy_loss.mask(targets, self.options)

    def _policy_weights(self, batch: ChunkBatch) -> Tensor:
        """Return the weight of each ratio, 0 where the loss masks it out."""
        weights = self._weights(batch, self.algorithm.level)
        if self.policy_loss.mask is None:
            return weights
        trained = weights > 0
        return weights.masked_scatter(trained, weights[trained] * self._unmasked(self._targets(batch, trained)))

    def _value_weights(self, batch: ChunkBatch) -> Tensor:
        """Return the weight of each value, [N, V]."""
        if self.algorithm.reward_level == "action":
            return self._weights(batch, "action")
        return self._weights(batch, "chunk").unsqueeze(-1)

    def _weights(self, batch: ChunkBatch, level: Level) -> Tensor:
        weights = batch.loss_mask.to(batch.logprobs.dtype) if batch.loss_weights is None else batch.loss_weights
        return level_weights(weights, self.algorithm.reward_level, level, batch.logprobs.shape[-1])

    def _divisor(self, weights: Tensor) -> Tensor:
        """Return the divisor of sums with these weights."""
        if self.algorithm.aggregation == "seq-mean-token-mean":
            return torch.tensor(weights.numel())
        return (weights > 0).sum()


LEVELS: tuple[Level, ...] = ("token", "action", "chunk")
