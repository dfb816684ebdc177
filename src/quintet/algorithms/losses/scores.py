"""Losses whose gradient is that of the log-prob, times a constant weight or with a pull beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.losses.ratios import bounded_log_ratio, nothing_clipped
from quintet.algorithms.losses.targets import PolicyLoss, PolicyTargets
from quintet.config.native.losses import (
    CispoLossConfig,
    DppoLossConfig,
    DroLossConfig,
    KimiLossConfig,
    PlainLossConfig,
    SapoLossConfig,
    ToprLossConfig,
)

__all__ = ["cispo", "dppo_kl", "dppo_tv", "dro", "kimi", "reinforce", "sapo", "topr"]


def reinforce(logprobs: Tensor, targets: PolicyTargets, config: PlainLossConfig) -> PolicyLoss:
    """L = -A logp; Williams 1992. GPG (Chu et al. 2025, arXiv:2504.02546) has the same loss and its own advantage."""
    nothing = nothing_clipped(logprobs)
    return PolicyLoss(-targets.advantages * logprobs, nothing, nothing, targets.old_logprobs - logprobs)


def cispo(logprobs: Tensor, targets: PolicyTargets, config: CispoLossConfig) -> PolicyLoss:
    """L = -sg(clip(r, 1 - low, 1 + high)) A logp; MiniMax-M1 2025 (arXiv:2506.13585).

    Every token keeps a gradient, unlike PPO's. ROLL's `tis` is this with the weight held in 0 … 1.
    """
    log_ratio = bounded_log_ratio(logprobs, targets.old_logprobs)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss = -weight * targets.advantages * logprobs
    return PolicyLoss(loss, weight != ratio, nothing_clipped(loss), -log_ratio)


def sapo(logprobs: Tensor, targets: PolicyTargets, config: SapoLossConfig) -> PolicyLoss:
    """L = -A sigmoid(tau (r - 1)) 4 / tau; Gao et al. 2025 (arXiv:2511.20347).

    tau is `temperature_positive` where A > 0, else `temperature_negative`; the factor 4 / tau makes the slope at
    r = 1 that of r itself. Aggregated by `seq-mean-token-mean`.
    """
    log_ratio = bounded_log_ratio(logprobs, targets.old_logprobs)
    tau = torch.full_like(logprobs, config.temperature_negative)
    tau = tau.masked_fill(targets.advantages > 0, config.temperature_positive)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * (4.0 / tau)
    nothing = nothing_clipped(logprobs)
    return PolicyLoss(-targets.advantages * gate, nothing, nothing, -log_ratio)


def dppo_tv(logprobs: Tensor, targets: PolicyTargets, config: DppoLossConfig) -> PolicyLoss:
    """L = -A sg(min(r, c)) logp where the token's probability moved little; Qi et al. 2026 (arXiv:2602.04879).

    Kept are tokens with p - q <= high where A > 0, and p - q >= -low elsewhere, p being the new probability and q
    the old one: the total variation between the two seen as coins that show this token or not. c is `max_ratio`.
    """
    moved = (logprobs.exp() - targets.old_logprobs.exp()).detach()
    keep = torch.where(targets.advantages > 0, moved <= config.clip_high, moved >= -config.clip_low)
    return _within_divergence(logprobs, targets, config, keep)


def dppo_kl(logprobs: Tensor, targets: PolicyTargets, config: DppoLossConfig) -> PolicyLoss:
    """`dppo_tv` with the divergence of Kullback and Leibler between the two coins.

    q (log q - log p) + (1 - q) log((1 - q) / (1 - p)) <= high where A > 0, <= low elsewhere, or the token moved
    against its advantage anyway. 1e-8 stands beside 1 - q and 1 - p.
    """
    p, q = logprobs.detach().exp(), targets.old_logprobs.exp()
    shown = q * (targets.old_logprobs - logprobs.detach())
    divergence = shown + (1.0 - q) * ((1.0 - q + 1e-8) / (1.0 - p + 1e-8)).log()
    rises = (divergence <= config.clip_high) | (p <= q)
    falls = (divergence <= config.clip_low) | (p >= q)
    return _within_divergence(logprobs, targets, config, torch.where(targets.advantages > 0, rises, falls))


def _within_divergence(logprobs: Tensor, targets: PolicyTargets, config: DppoLossConfig, keep: Tensor) -> PolicyLoss:
    log_ratio = bounded_log_ratio(logprobs, targets.old_logprobs)
    ratio = log_ratio.detach().exp()
    loss = -targets.advantages * ratio.clamp(max=config.max_ratio) * logprobs * keep
    return PolicyLoss(loss, ~keep, keep & (ratio > config.max_ratio), -log_ratio)


def dro(logprobs: Tensor, targets: PolicyTargets, config: DroLossConfig) -> PolicyLoss:
    """L = -A logp + beta / 2 (logp - old)²; Richemond et al. 2024 (arXiv:2405.19107), at each token, as in verl."""
    return _pulled(logprobs, targets, config.beta)


def kimi(logprobs: Tensor, targets: PolicyTargets, config: KimiLossConfig) -> PolicyLoss:
    """L = -A logp + tau / 2 (logp - old)²; Kimi k1.5 2025 (arXiv:2501.12599), at each token, as ROLL's `kimi15`.

    The paper squares the log-ratio of a whole reply.
    """
    return _pulled(logprobs, targets, config.tau)


def _pulled(logprobs: Tensor, targets: PolicyTargets, strength: float) -> PolicyLoss:
    log_ratio = logprobs - targets.old_logprobs
    loss = -targets.advantages * logprobs + 0.5 * strength * log_ratio.square()
    nothing = nothing_clipped(loss)
    return PolicyLoss(loss, nothing, nothing, -log_ratio)


def topr(logprobs: Tensor, targets: PolicyTargets, config: ToprLossConfig) -> PolicyLoss:
    """Tapered off-policy REINFORCE; Le Roux et al. 2025 (arXiv:2503.14286).

    L = -w+ A logp where A > 0, -w- sg(min(r, 1)) A logp elsewhere. The paper and ROLL tell good replies from bad
    ones by their reward and take the ratio of the reply (paper) or of the token (ROLL); here the sign of the
    advantage tells, with the token's ratio: under `raw` advantages that is the same.
    """
    log_ratio = bounded_log_ratio(logprobs, targets.old_logprobs)
    ratio = log_ratio.detach().exp()
    good = targets.advantages > 0
    weight = torch.where(good, config.positive_weight, config.negative_weight * ratio.clamp(max=1.0))
    return PolicyLoss(
        -weight * targets.advantages * logprobs, nothing_clipped(ratio), ~good & (ratio > 1.0), -log_ratio
    )
