"""An advantage estimator and a policy loss."""

import torch

from quintet.algorithms.advantages.groups import Groups, trajectory_rewards
from quintet.algorithms.losses.targets import PolicyLoss


def asymmetric(batch, options):
    """Reward minus the mean of the group; differences below the mean count less."""
    rewards = trajectory_rewards(batch)
    difference = rewards - Groups.from_ids(batch.group).mean(rewards)
    difference = torch.where(difference < 0, options["below_mean"] * difference, difference)
    advantages = difference[batch.token_trajectory] * batch.loss_mask
    return advantages, advantages


def truncated(logprobs, targets, options):
    """REINFORCE with importance weights of at most `max_ratio`."""
    log_ratio = (logprobs - targets.old_logprobs).detach()
    ratio = log_ratio.exp()
    loss = -ratio.clamp(max=options["max_ratio"]) * targets.advantages * logprobs
    clipped = ratio > options["max_ratio"]
    return PolicyLoss(loss, clipped, torch.zeros_like(clipped), -log_ratio)
