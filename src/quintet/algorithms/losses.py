"""Token losses of the policy and of the critic; aggregation is `aggregation.token_weights`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["PolicyLoss", "ValueLoss", "ppo_clip", "value_clip"]


class PolicyLoss(NamedTuple):
    """`loss` [M], and what the metrics want of each token: `clipped`, `clipped_lower` bool [M],
    `kl` [M] (old against new, first order)."""

    loss: Tensor
    clipped: Tensor
    clipped_lower: Tensor
    kl: Tensor


class ValueLoss(NamedTuple):
    """`loss` [M], `clipped` bool [M]."""

    loss: Tensor
    clipped: Tensor


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None,
) -> PolicyLoss:
    """Clipped policy gradient, one loss a token, all tensors [M].

    r = exp(logp - old), L = max(-A r, -A clip(r, 1 - low, 1 + high)); Schulman et al. 2017
    (arXiv:1707.06347), with separate bounds as in DAPO (arXiv:2503.14476). Where A < 0, L is at most
    -A * clip_dual (dual clip, Ye et al. 2020, arXiv:1912.09729). The log-ratio is held within ±20
    before the exponential.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, bounded)
    clipped_lower = torch.zeros_like(loss, dtype=torch.bool)
    if clip_dual is not None:
        ceiling = -advantages * clip_dual
        clipped_lower = (advantages < 0) & (loss > ceiling)
        loss = torch.where(advantages < 0, torch.minimum(ceiling, loss), loss)
    return PolicyLoss(loss, bounded > plain, clipped_lower, -log_ratio)


def value_clip(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueLoss:
    """Half the squared error of the critic, the worse of free and clipped, all tensors [M].

    L = ½ max((V - R)², (clip(V, V_old ± clip) - R)²), as in the PPO reference code and verl.
    """
    free = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * free, torch.zeros_like(free, dtype=torch.bool))
    near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    held = (near - returns).square()
    return ValueLoss(0.5 * torch.maximum(free, held), held > free)
