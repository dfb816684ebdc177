"""Losses that treat a few tokens apart: those where log-prob and advantage vary together most.

Cui et al. 2025, "The entropy mechanism of reinforcement learning" (arXiv:2505.22617). Which tokens those are is said
of the whole mini-batch by `select_*`, from log-probs made in a pass without gradients; verl says it of each
micro-batch by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.losses.ratios import nothing_clipped
from quintet.algorithms.losses.targets import PolicyLoss, PolicyTargets
from quintet.config.native.losses import ClipCovLossConfig, KlCovLossConfig

__all__ = ["clip_cov", "kl_cov", "select_clip_cov", "select_kl_cov"]


def clip_cov(logprobs: Tensor, targets: PolicyTargets, config: ClipCovLossConfig) -> PolicyLoss:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and 0 at the tokens that `select_clip_cov` drew. No dual clip.

    `clipped` are the drawn tokens, as in verl. The log-ratio isn't held within bounds.
    """
    log_ratio = logprobs - targets.old_logprobs
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss = torch.maximum(-targets.advantages * ratio, -targets.advantages * bounded)
    drawn = _selected(targets)
    return PolicyLoss(loss.masked_fill(drawn, 0.0), drawn, nothing_clipped(loss), -log_ratio)


def select_clip_cov(
    logprobs: Tensor, targets: PolicyTargets, config: ClipCovLossConfig, generator: torch.Generator
) -> Tensor:
    """A random `share` of the mini-batch's M tokens, at least one, bool [M], out of those whose covariance
    (A - mean A)(logp - mean logp) lies between the bounds and that PPO doesn't clip already."""
    covariance = _covariance(logprobs, targets.advantages)
    ratio = (logprobs - targets.old_logprobs).exp()
    bounded = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    free = -targets.advantages * bounded <= -targets.advantages * ratio
    eligible = free & (covariance > config.min_covariance) & (covariance < config.max_covariance)
    candidates = eligible.nonzero().squeeze(-1)
    order = torch.randperm(len(candidates), generator=generator)
    return _marked(candidates[order[: _count(config.share, len(logprobs))]], logprobs)


def kl_cov(logprobs: Tensor, targets: PolicyTargets, config: KlCovLossConfig) -> PolicyLoss:
    """-A r, plus `coefficient` |logp - old| at the tokens that `select_kl_cov` found.

    The log-ratio isn't held within bounds. The metric `ppo_kl` is its mean as for all losses, in verl that of its
    absolute value.
    """
    log_ratio = logprobs - targets.old_logprobs
    pull = config.coefficient * log_ratio.abs() * _selected(targets)
    nothing = nothing_clipped(log_ratio)
    return PolicyLoss(-targets.advantages * log_ratio.exp() + pull, nothing, nothing, -log_ratio)


def select_kl_cov(
    logprobs: Tensor, targets: PolicyTargets, config: KlCovLossConfig, generator: torch.Generator
) -> Tensor:
    """The `share` of the mini-batch's M tokens whose covariance is highest, at least one, bool [M]."""
    covariance = _covariance(logprobs, targets.advantages)
    count = min(_count(config.share, len(logprobs)), len(logprobs))
    return _marked(covariance.topk(count).indices, logprobs)


def _covariance(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def _count(share: float, tokens: int) -> int:
    return max(1, int(share * tokens)) if share else 0


def _marked(index: Tensor, like: Tensor) -> Tensor:
    marked = nothing_clipped(like)
    marked[index] = True
    return marked


def _selected(targets: PolicyTargets) -> Tensor:
    if targets.selected is None:
        raise ValueError("this loss needs targets with `selected`: see `Loss.select`")
    return targets.selected
