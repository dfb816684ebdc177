"""Losses that mask or penalize the few tokens with the highest covariance of log-prob and advantage.

Cui et al. 2025, "The entropy mechanism of reinforcement learning" (arXiv:2505.22617). The tokens are selected over the
whole mini-batch from a forward-only pass; verl selects within each micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.losses.ratios import nothing_clipped
from quintet.algorithms.losses.targets import PolicyLoss, PolicyLossInputs, policy_loss
from quintet.config.native.losses import ClipCovLossConfig, KlCovLossConfig


def _select_clip_cov(
    logprobs: Tensor, targets: PolicyLossInputs, config: ClipCovLossConfig, generator: torch.Generator
) -> Tensor:
    """Select a random `share` of the mini-batch's M tokens, at least one, bool [M], among those that PPO does not clip
    and whose covariance (A - mean A)(logp - mean logp) is within the bounds."""
    covariance = _covariance(logprobs, targets.advantages)
    ratio = (logprobs - targets.old_logprobs).exp()
    bounded = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    free = -targets.advantages * bounded <= -targets.advantages * ratio
    eligible = free & (covariance > config.min_covariance) & (covariance < config.max_covariance)
    candidates = eligible.nonzero().squeeze(-1)
    order = torch.randperm(len(candidates), generator=generator)
    return _marked(candidates[order[: _count(config.share, len(logprobs))]], logprobs)


@policy_loss(select=_select_clip_cov)
def clip_cov(logprobs: Tensor, targets: PolicyLossInputs, config: ClipCovLossConfig) -> PolicyLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and 0 at the selected tokens. No dual clip.

    `clipped` marks the selected tokens, as in verl. The log-ratio is not clamped.
    """
    log_ratio = logprobs - targets.old_logprobs
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss = torch.maximum(-targets.advantages * ratio, -targets.advantages * bounded)
    selected = _selected(targets)
    return PolicyLoss(loss.masked_fill(selected, 0.0), selected, nothing_clipped(loss), -log_ratio)


def _select_kl_cov(
    logprobs: Tensor, targets: PolicyLossInputs, config: KlCovLossConfig, generator: torch.Generator
) -> Tensor:
    """Select the `share` of the mini-batch's M tokens with the highest covariance, at least one, bool [M]."""
    covariance = _covariance(logprobs, targets.advantages)
    count = min(_count(config.share, len(logprobs)), len(logprobs))
    return _marked(covariance.topk(count).indices, logprobs)


@policy_loss(select=_select_kl_cov)
def kl_cov(logprobs: Tensor, targets: PolicyLossInputs, config: KlCovLossConfig) -> PolicyLoss:
    """-A r, plus `coefficient` |logp - old| at the selected tokens.

    The log-ratio is not clamped. The metric `ppo_kl` is the mean log-ratio as for all losses; in verl that of its
    absolute value.
    """
    log_ratio = logprobs - targets.old_logprobs
    pull = config.coefficient * log_ratio.abs() * _selected(targets)
    nothing = nothing_clipped(log_ratio)
    return PolicyLoss(-targets.advantages * log_ratio.exp() + pull, nothing, nothing, -log_ratio)


def _covariance(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def _count(share: float, tokens: int) -> int:
    return max(1, int(share * tokens)) if share else 0


def _marked(index: Tensor, like: Tensor) -> Tensor:
    marked = nothing_clipped(like)
    marked[index] = True
    return marked


def _selected(targets: PolicyLossInputs) -> Tensor:
    if targets.selected is None:
        raise ValueError("this loss needs targets with `selected`: see `Loss.select`")
    return targets.selected
