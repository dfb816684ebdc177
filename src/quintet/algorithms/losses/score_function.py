"""Losses with the gradient of the log-prob times a constant weight, some with a regularizer."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.losses.ratios import bounded_log_ratio, nothing_clipped
from quintet.algorithms.losses.targets import PolicyLoss, PolicyLossInputs, policy_loss
from quintet.config.native.losses import (
    CispoLossConfig,
    DppoLossConfig,
    DroLossConfig,
    KimiLossConfig,
    ReinforceLossConfig,
    SapoLossConfig,
    ToprLossConfig,
)


def reinforce(logprobs: Tensor, targets: PolicyLossInputs, config: ReinforceLossConfig) -> PolicyLoss:
    """REINFORCE, L = -A logp; Williams 1992. GPG (Chu et al. 2025, arXiv:2504.02546) has the same loss, but its own
    advantage.
    """
    nothing = nothing_clipped(logprobs)
    return PolicyLoss(-targets.advantages * logprobs, nothing, nothing, targets.old_logprobs - logprobs)


def cispo(logprobs: Tensor, targets: PolicyLossInputs, config: CispoLossConfig) -> PolicyLoss:
    """CISPO, L = -sg(clip(r, 1 - low, 1 + high)) A logp; MiniMax-M1 2025 (arXiv:2506.13585).

    Unlike in PPO, every token keeps a gradient. ROLL's `tis` is this with the weight clipped to 0 … 1.
    """
    log_ratio = bounded_log_ratio(logprobs, targets.old_logprobs)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss = -weight * targets.advantages * logprobs
    return PolicyLoss(loss, weight != ratio, nothing_clipped(loss), -log_ratio)


@policy_loss(aggregation="seq-mean-token-mean")
def sapo(logprobs: Tensor, targets: PolicyLossInputs, config: SapoLossConfig) -> PolicyLoss:
    """SAPO, L = -A sigmoid(tau (r - 1)) 4 / tau; Gao et al. 2025 (arXiv:2511.20347).

    tau is `temperature_positive` where A > 0, else `temperature_negative`; the factor 4 / tau gives the slope of
    r at r = 1. Aggregated by `seq-mean-token-mean`.
    """
    log_ratio = bounded_log_ratio(logprobs, targets.old_logprobs)
    tau = torch.full_like(logprobs, config.temperature_negative)
    tau = tau.masked_fill(targets.advantages > 0, config.temperature_positive)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1.0)) * (4.0 / tau)
    nothing = nothing_clipped(logprobs)
    return PolicyLoss(-targets.advantages * gate, nothing, nothing, -log_ratio)


def dppo_tv(logprobs: Tensor, targets: PolicyLossInputs, config: DppoLossConfig) -> PolicyLoss:
    """DPPO by total variation, L = -A sg(min(r, c)) logp where the token's probability changed little; Qi et al. 2026
    (arXiv:2602.04879).

    Tokens keep their loss if p - q <= high where A > 0, and p - q >= -low elsewhere, with new probability p and old
    probability q: the total variation of the Bernoulli distributions over this token. c is `max_ratio`.
    """
    change = (logprobs.exp() - targets.old_logprobs.exp()).detach()
    keep = torch.where(targets.advantages > 0, change <= config.clip_high, change >= -config.clip_low)
    return _within_divergence(logprobs, targets, config, keep)


def dppo_kl(logprobs: Tensor, targets: PolicyLossInputs, config: DppoLossConfig) -> PolicyLoss:
    """`dppo_tv` with the KL divergence of the Bernoulli distributions.

    Tokens keep their loss if q (log q - log p) + (1 - q) log((1 - q) / (1 - p)) <= high where A > 0, <= low
    elsewhere, or if the probability moved against the advantage. 1e-8 is added to 1 - q and 1 - p.
    """
    p, q = logprobs.detach().exp(), targets.old_logprobs.exp()
    first_term = q * (targets.old_logprobs - logprobs.detach())
    divergence = first_term + (1.0 - q) * ((1.0 - q + 1e-8) / (1.0 - p + 1e-8)).log()
    rises = (divergence <= config.clip_high) | (p <= q)
    falls = (divergence <= config.clip_low) | (p >= q)
    return _within_divergence(logprobs, targets, config, torch.where(targets.advantages > 0, rises, falls))


def _within_divergence(logprobs: Tensor, targets: PolicyLossInputs, config: DppoLossConfig, keep: Tensor) -> PolicyLoss:
    log_ratio = bounded_log_ratio(logprobs, targets.old_logprobs)
    ratio = log_ratio.detach().exp()
    loss = -targets.advantages * ratio.clamp(max=config.max_ratio) * logprobs * keep
    return PolicyLoss(loss, ~keep, keep & (ratio > config.max_ratio), -log_ratio)


def dro(logprobs: Tensor, targets: PolicyLossInputs, config: DroLossConfig) -> PolicyLoss:
    """DRO, L = -A logp + beta / 2 (logp - old)²; Richemond et al. 2024 (arXiv:2405.19107), per token, as in verl."""
    return _regularized(logprobs, targets, config.beta)


def kimi(logprobs: Tensor, targets: PolicyLossInputs, config: KimiLossConfig) -> PolicyLoss:
    """Kimi's loss, L = -A logp + tau / 2 (logp - old)²; Kimi k1.5 2025 (arXiv:2501.12599), per token, as ROLL's
    `kimi15`.

    The paper squares the log-ratio of a whole response.
    """
    return _regularized(logprobs, targets, config.tau)


def _regularized(logprobs: Tensor, targets: PolicyLossInputs, strength: float) -> PolicyLoss:
    log_ratio = logprobs - targets.old_logprobs
    loss = -targets.advantages * logprobs + 0.5 * strength * log_ratio.square()
    nothing = nothing_clipped(loss)
    return PolicyLoss(loss, nothing, nothing, -log_ratio)


def topr(logprobs: Tensor, targets: PolicyLossInputs, config: ToprLossConfig) -> PolicyLoss:
    """Tapered off-policy REINFORCE; Le Roux et al. 2025 (arXiv:2503.14286).

    L = -w+ A logp where A > 0, -w- sg(min(r, 1)) A logp elsewhere. The paper and ROLL distinguish good from bad
    responses by reward, with the ratio of the response (paper) or of the token (ROLL). Here the sign of the advantage
    decides, with the token's ratio, which is the same for `raw` advantages.
    """
    log_ratio = bounded_log_ratio(logprobs, targets.old_logprobs)
    ratio = log_ratio.detach().exp()
    good = targets.advantages > 0
    weight = torch.where(good, config.positive_weight, config.negative_weight * ratio.clamp(max=1.0))
    return PolicyLoss(
        -weight * targets.advantages * logprobs, nothing_clipped(ratio), ~good & (ratio > 1.0), -log_ratio
    )
