"""Rewards, dones, log-probs, entropies and weights at the level of chunks, actions or tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "action", "chunk"]
RewardLevel = Literal["turn", "action", "chunk"]
"""`turn` is the chunk."""


def level_rewards(rewards: Tensor, level: RewardLevel) -> Tensor:
    """Return the rewards of actions [..., C], or their sum over each chunk [..., 1]."""
    return rewards if level == "action" else rewards.sum(-1, keepdim=True)


def level_flags(flags: Tensor, level: RewardLevel) -> Tensor:
    """Return flags of actions, bool [..., C], or whether any action of each chunk has the flag, bool [..., 1]."""
    return flags if level == "action" else flags.any(-1, keepdim=True)


def level_sums(tokens: Tensor, level: Level) -> Tensor:
    """Sum log-probs or entropies of tokens, [N, C, D], to [N, C] at the level of actions and to [N] at that of chunks.

    The log-prob and the entropy of a chunk are sums because its tokens are sampled independently, or one after the
    other.
    """
    if level == "token":
        return tokens
    return tokens.sum(-1) if level == "action" else tokens.sum((-2, -1))


def level_weights(weights: Tensor, reward_level: RewardLevel, level: Level, action_dim: int) -> Tensor:
    """Return the weight of each log-prob or entropy, [N, C, D], [N, C] or [N], from the weights of actions, [N, C].

    With rewards of chunks, a chunk is trained on as a whole, with the weight of its trained actions, also if the
    episode ended within it (RLinf).
    """
    if level == "chunk":
        return weights.amax(-1)
    if reward_level != "action":
        weights = weights.amax(-1, keepdim=True).expand_as(weights)
    return weights if level == "action" else weights.unsqueeze(-1).expand(*weights.shape, action_dim)


def level_advantages(advantages: Tensor, level: Level, num_actions: int, action_dim: int) -> Tensor:
    """Return the advantage of each log-prob, [N, C, D], [N, C] or [N], from those of chunks or actions, [N, V].

    Raises:
        ValueError: log-probs are those of chunks, and advantages those of actions.
    """
    if level == "chunk":
        if advantages.shape[-1] != 1:
            raise ValueError("a chunk has one ratio, but one advantage for each of its actions")
        return advantages.squeeze(-1)
    actions = advantages.expand(len(advantages), num_actions)
    return actions if level == "action" else actions.unsqueeze(-1).expand(*actions.shape, action_dim)


def to_steps(values: Tensor) -> Tensor:
    """Put the chunks or actions of each robot in their order in time: [T, B, V] to [T V, B]."""
    return values.transpose(1, 2).reshape(-1, values.shape[1])


def from_steps(steps: Tensor, size: int) -> Tensor:
    """Undo `to_steps`, with `size` = V."""
    return steps.reshape(-1, size, steps.shape[-1]).transpose(1, 2)


def episode_weights(loss_mask: Tensor, episode: Tensor) -> Tensor:
    """Return weights of actions with which all episodes have the same weight, float64 [T, B, C], 0 outside the mask.

    w = T B C / (E n), with the number of episodes E that are trained on, and the trained actions n of the action's
    episode, so that the mean of w x over all actions is the mean over episodes of the mean of x over their actions.
    RLinf's `loss_mask_sum / max_episode_steps` is 1 / w, if no episode is left out and a rollout has
    `max_episode_steps` actions.

    Args:
        loss_mask: Trained actions, bool [T, B, C].
        episode: Number of the episode of each action, int64 [T, B, C].
    """
    counts = torch.bincount(episode[loss_mask], minlength=int(episode.max()) + 1)
    num_episodes = int((counts > 0).sum())
    weights = loss_mask.numel() / (max(1, num_episodes) * counts.clamp(min=1)[episode].double())
    return weights * loss_mask
