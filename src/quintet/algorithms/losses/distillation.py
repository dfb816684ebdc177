"""On-policy distillation: a divergence from a teacher on the policy's own responses."""

from __future__ import annotations

from torch import Tensor

from quintet.algorithms.kl import kl_estimate
from quintet.algorithms.losses.clipping import ppo, ppo_clip
from quintet.algorithms.losses.ratios import bounded_log_ratio, nothing_clipped
from quintet.algorithms.losses.targets import PolicyLoss, PolicyLossInputs, policy_loss
from quintet.config.native.losses import DistillationLossConfig


def teacher_divergence(logprobs: Tensor, targets: PolicyLossInputs, config: DistillationLossConfig) -> Tensor:
    """Return the clamped estimate of KL(policy ‖ teacher) per token, nats, [M], with the policy's `logprobs`, [M].

    Raises:
        ValueError: the targets have no `ref_logprobs`.
    """
    if targets.ref_logprobs is None:
        raise ValueError("distillation needs the teacher's log-probs: targets with `ref_logprobs`")
    divergence = kl_estimate(logprobs, targets.ref_logprobs, config.estimator)
    bound = config.max_divergence
    return divergence if bound is None else divergence.clamp(-bound, bound)


@policy_loss(applies_correction=True)
def distillation(logprobs: Tensor, targets: PolicyLossInputs, config: DistillationLossConfig) -> PolicyLoss:
    """Return weight · D, plus the policy loss on the rewards if `task` is set.

    With the divergence d from the teacher, D is `ppo_clip` with A = -d (`policy`; Lu and Thinking Machines 2025), or d
    itself (`direct`; Agarwal et al. 2024, arXiv:2306.13649), as in verl 0.9.1. Importance weights of the
    rollout–learner gap multiply policy gradients only. RLinf's `opd` takes -A logp, which has the same gradient as
    long as the policy has not been updated since sampling.
    """
    toward_teacher = _distilled(logprobs, targets, config)
    loss = config.weight * toward_teacher.loss
    if config.task is None:
        return toward_teacher._replace(loss=loss)
    task = ppo(logprobs, targets, config.task)
    return task._replace(loss=loss + _corrected(task.loss, targets))


def _distilled(logprobs: Tensor, targets: PolicyLossInputs, config: DistillationLossConfig) -> PolicyLoss:
    """Return the loss D; clipping counts for `policy` only."""
    if config.gradient == "direct":
        log_ratio = bounded_log_ratio(logprobs, targets.old_logprobs)
        unclipped = nothing_clipped(logprobs)
        return PolicyLoss(teacher_divergence(logprobs, targets, config), unclipped, unclipped, -log_ratio)
    sampled = targets.old_logprobs if config.policy_logprobs == "old" else logprobs.detach()
    advantages = -teacher_divergence(sampled, targets, config)
    parts = ppo_clip(logprobs, targets.old_logprobs, advantages, config.clip_low, config.clip_high, config.clip_dual)
    return parts._replace(loss=_corrected(parts.loss, targets))


def _corrected(loss: Tensor, targets: PolicyLossInputs) -> Tensor:
    return loss if targets.correction is None else loss * targets.correction
