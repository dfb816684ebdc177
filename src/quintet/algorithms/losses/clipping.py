"""Losses that clip the probability ratio: PPO and what was made of it."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.losses.ratios import bounded_log_ratio, nothing_clipped, sequence_mean
from quintet.algorithms.losses.targets import PolicyLoss, PolicyTargets
from quintet.config.native.losses import (
    DecoupledPpoLossConfig,
    DistillationLossConfig,
    GmpoLossConfig,
    GspoLossConfig,
    PpoLossConfig,
)

__all__ = ["decoupled_ppo", "distillation", "gmpo", "gspo", "learnt_from", "ppo", "ppo_clip"]


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


def ppo(logprobs: Tensor, targets: PolicyTargets, config: PpoLossConfig) -> PolicyLoss:
    """PPO, GRPO and DAPO: see `ppo_clip`.

    ROLL's `dual_clip_loss` has 1 + 2 * pg_clip for `clip_dual`.
    """
    return ppo_clip(
        logprobs, targets.old_logprobs, targets.advantages, config.clip_low, config.clip_high, config.clip_dual
    )


def decoupled_ppo(logprobs: Tensor, targets: PolicyTargets, config: DecoupledPpoLossConfig) -> PolicyLoss:
    """PPO around a policy that isn't the one that played: w L with w = exp(old - rollout), L from `ppo_clip`.

    Hilton et al. 2021 (arXiv:2110.00641), AReaL (arXiv:2505.24298), RLinf's `decoupled_actor_critic`. RLinf may
    interpolate the log-probs in the middle by the weights' version; here they are the learner's before the update.
    Tokens of larger weight than `max_weight` are left out by `learnt_from`.
    """
    parts = ppo_clip(
        logprobs, targets.old_logprobs, targets.advantages, config.clip_low, config.clip_high, config.clip_dual
    )
    return parts._replace(loss=parts.loss * _behaviour_weight(targets))


def _behaviour_weight(targets: PolicyTargets) -> Tensor:
    if targets.rollout_logprobs is None:
        return torch.ones_like(targets.old_logprobs)
    return bounded_log_ratio(targets.old_logprobs, targets.rollout_logprobs).exp()


def learnt_from(targets: PolicyTargets, config: DecoupledPpoLossConfig) -> Tensor:
    """Tokens whose weight is at most `max_weight`, bool [M]; the others don't count in the mean either."""
    weight = _behaviour_weight(targets)
    return torch.ones_like(weight, dtype=torch.bool) if config.max_weight is None else weight <= config.max_weight


def gspo(logprobs: Tensor, targets: PolicyTargets, config: GspoLossConfig) -> PolicyLoss:
    """One ratio for all tokens of a sequence, the geometric mean of theirs; Zheng et al. 2025 (arXiv:2507.18071).

    s = exp(mean_t(logp - old)), L = max(-A s_t, -A clip(s_t, 1 - low, 1 + high)) with
    s_t = sg(s) p / sg(p): its value is the sequence's ratio, its gradient the token's (GSPO-token). log s is held
    below 10. The paper aggregates by `seq-mean-token-mean`; here `algorithm.aggregation` says, as in verl 0.9.1.
    """
    log_ratio = logprobs - targets.old_logprobs
    mean = sequence_mean(log_ratio.detach(), targets)
    ratio = (logprobs - logprobs.detach() + mean).clamp(max=10.0).exp()
    plain = -targets.advantages * ratio
    bounded = -targets.advantages * ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return PolicyLoss(torch.maximum(plain, bounded), bounded > plain, nothing_clipped(plain), -log_ratio)


def gmpo(logprobs: Tensor, targets: PolicyTargets, config: GmpoLossConfig) -> PolicyLoss:
    """The geometric mean of a sequence's token ratios; Zhao et al. 2025 (arXiv:2507.20673).

    With d = logp - old, held in the direction that the advantage pushes: d' = min(d, high) where A > 0,
    max(d, -low) where A < 0. L = -mean_t(A) exp(mean_t(d')), the same at each token, and aggregated by
    `seq-mean-token-mean`: the mean over sequences. Where A is 0, d' is 0, as in verl. Weights of the engine-learner
    gap enter as their geometric mean over the sequence.
    """
    log_ratio = logprobs - targets.old_logprobs
    sign = targets.advantages.sign()
    near = log_ratio.clamp(-config.clip_low, config.clip_high)
    held = sign * torch.minimum(sign * log_ratio, sign * near)
    loss = -sequence_mean(targets.advantages, targets) * sequence_mean(held, targets).exp()
    if targets.correction is not None:
        loss = loss * sequence_mean((targets.correction + 1e-10).log(), targets).exp()
    clipped = log_ratio != near
    return PolicyLoss(loss, clipped & (sign > 0), clipped & (sign < 0), -log_ratio)


def distillation(logprobs: Tensor, targets: PolicyTargets, config: DistillationLossConfig) -> PolicyLoss:
    """The policy's own words under a teacher: `ppo_clip` with A = teacher - old, no dual clip.

    On-policy distillation (Agarwal et al. 2024, arXiv:2306.13649; Lu and Thinking Machines 2025): the advantage is
    minus the reverse divergence at the sampled token. RLinf's `opd` takes -A logp, which has the same gradient as
    long as no update was made since the words were written.

    Raises:
        ValueError: the targets have no `ref_logprobs`.
    """
    if targets.ref_logprobs is None:
        raise ValueError("distillation needs the teacher's log-probs: targets with `ref_logprobs`")
    advantages = targets.ref_logprobs - targets.old_logprobs
    return ppo_clip(logprobs, targets.old_logprobs, advantages, config.clip_low, config.clip_high, None)
