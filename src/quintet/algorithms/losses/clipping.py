"""Losses that clip the probability ratio: PPO and its variants."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.losses.ratios import bounded_log_ratio, nothing_clipped, sequence_mean
from quintet.algorithms.losses.targets import PolicyLoss, PolicyLossInputs, policy_loss
from quintet.config.native.losses import (
    DecoupledPpoLossConfig,
    GmpoLossConfig,
    GspoLossConfig,
    PpoLossConfig,
)


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None,
) -> PolicyLoss:
    """Token-level PPO loss with dual clip, all tensors [M].

    r = exp(logp - old), L = max(-A r, -A clip(r, 1 - low, 1 + high)); Schulman et al. 2017
    (arXiv:1707.06347), with separate bounds as in DAPO (arXiv:2503.14476). Where A < 0, L is at most
    -A * clip_dual (dual clip, Ye et al. 2020, arXiv:1912.09729). The log-ratio is clamped to
    ±20.
    """
    log_ratio = bounded_log_ratio(logprobs, old_logprobs)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, bounded)
    clipped_lower = nothing_clipped(loss)
    if clip_dual is not None:
        ceiling = -advantages * clip_dual
        clipped_lower = (advantages < 0) & (loss > ceiling)
        loss = torch.where(advantages < 0, torch.minimum(ceiling, loss), loss)
    return PolicyLoss(loss, bounded > plain, clipped_lower, -log_ratio)


def ppo(logprobs: Tensor, targets: PolicyLossInputs, config: PpoLossConfig) -> PolicyLoss:
    """PPO, GRPO and DAPO loss; see `ppo_clip`.

    ROLL's `dual_clip_loss` uses 1 + 2 * pg_clip as `clip_dual`.
    """
    return ppo_clip(
        logprobs, targets.old_logprobs, targets.advantages, config.clip_low, config.clip_high, config.clip_dual
    )


def _behavior_weight(targets: PolicyLossInputs) -> Tensor:
    if targets.rollout_logprobs is None:
        return torch.ones_like(targets.old_logprobs)
    return bounded_log_ratio(targets.old_logprobs, targets.rollout_logprobs).exp()


def _small_weights(targets: PolicyLossInputs, config: DecoupledPpoLossConfig) -> Tensor:
    weight = _behavior_weight(targets)
    return torch.ones_like(weight, dtype=torch.bool) if config.max_weight is None else weight <= config.max_weight


@policy_loss(mask=_small_weights)
def decoupled_ppo(logprobs: Tensor, targets: PolicyLossInputs, config: DecoupledPpoLossConfig) -> PolicyLoss:
    """PPO relative to a proximal policy: w L with w = exp(old - rollout) and L from `ppo_clip`.

    Hilton et al. 2021 (arXiv:2110.00641), AReaL (arXiv:2505.24298), RLinf's `decoupled_actor_critic`. RLinf may
    interpolate the proximal log-probs by weight version; here they are the learner's before the update. Tokens with a
    weight above `max_weight` are masked.
    """
    parts = ppo_clip(
        logprobs, targets.old_logprobs, targets.advantages, config.clip_low, config.clip_high, config.clip_dual
    )
    return parts._replace(loss=parts.loss * _behavior_weight(targets))


def gspo(logprobs: Tensor, targets: PolicyLossInputs, config: GspoLossConfig) -> PolicyLoss:
    """GSPO: one ratio per sequence, the geometric mean of its tokens' ratios; Zheng et al. 2025 (arXiv:2507.18071).

    s = exp(mean_t(logp - old)), L = max(-A s_t, -A clip(s_t, 1 - low, 1 + high)) with s_t = sg(s) p / sg(p), with the
    value of the sequence's ratio and the gradient of the token's (GSPO-token). log s is clamped to 10. The paper
    aggregates by `seq-mean-token-mean`; here `algorithm.aggregation` decides, as in verl 0.9.1.
    """
    log_ratio = logprobs - targets.old_logprobs
    mean = sequence_mean(log_ratio.detach(), targets)
    ratio = (logprobs - logprobs.detach() + mean).clamp(max=10.0).exp()
    plain = -targets.advantages * ratio
    bounded = -targets.advantages * ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return PolicyLoss(torch.maximum(plain, bounded), bounded > plain, nothing_clipped(plain), -log_ratio)


@policy_loss(aggregation="seq-mean-token-mean", applies_correction=True)
def gmpo(logprobs: Tensor, targets: PolicyLossInputs, config: GmpoLossConfig) -> PolicyLoss:
    """Geometric mean of a sequence's token ratios; Zhao et al. 2025 (arXiv:2507.20673).

    With d = logp - old, clipped in the direction of the advantage: d' = min(d, high) where A > 0, max(d, -low) where
    A < 0, and 0 where A is 0, as in verl. L = -mean_t(A) exp(mean_t(d')), the same at each token, aggregated by
    `seq-mean-token-mean`: the mean over sequences. Importance weights of the rollout–learner gap enter as their
    geometric mean over the sequence.
    """
    log_ratio = logprobs - targets.old_logprobs
    sign = targets.advantages.sign()
    bounded = log_ratio.clamp(-config.clip_low, config.clip_high)
    clipped_ratio = sign * torch.minimum(sign * log_ratio, sign * bounded)
    loss = -sequence_mean(targets.advantages, targets) * sequence_mean(clipped_ratio, targets).exp()
    if targets.correction is not None:
        loss = loss * sequence_mean((targets.correction + 1e-10).log(), targets).exp()
    clipped = log_ratio != bounded
    return PolicyLoss(loss, clipped & (sign > 0), clipped & (sign < 0), -log_ratio)
