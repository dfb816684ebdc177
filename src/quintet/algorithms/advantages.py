"""Advantages: how much better each token was than expected.

Each function takes a `Batch` and its own configuration and returns `(advantages, returns)`, float32
or float64 [N] like the batch's rewards, 0 outside the loss mask. They run over whole trajectories,
however many token sequences a sliding window made of them.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quintet.algorithms.tokens import Rows, whiten
from quintet.config.native import BiLevelGaeConfig, GaeConfig, GrpoConfig
from quintet.records import Batch
from quintet.registry import Registry

__all__ = ["ADVANTAGES", "Advantage", "bi_level_gae", "gae", "group_statistics", "grpo", "trajectory_rewards"]


class Advantage(Protocol):
    """`(batch, config) -> (advantages [N], returns [N])`."""

    def __call__(self, batch: Batch, config: object, /) -> tuple[Tensor, Tensor]: ...


def trajectory_rewards(batch: Batch) -> Tensor:
    """Sum of the rewards of each trajectory, [R]."""
    return batch.rewards.new_zeros(len(batch.group)).index_add(0, batch.token_trajectory, batch.rewards)


def group_statistics(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased deviation of each trajectory's group, both [R].

    A group of one has mean 0 and deviation 1, as verl defines it: its score is its advantage.
    """
    _, member, count = torch.unique(group, return_inverse=True, return_counts=True)
    total = scores.new_zeros(len(count))
    mean = total.index_add(0, member, scores) / count
    squares = total.index_add(0, member, (scores - mean[member]).square())
    deviation = (squares / (count - 1).clamp(min=1)).sqrt()
    alone = count == 1
    return mean.masked_fill(alone, 0.0)[member], deviation.masked_fill(alone, 1.0)[member]


def grpo(batch: Batch, config: GrpoConfig) -> tuple[Tensor, Tensor]:
    """Group-relative advantage, the same for every token of a trajectory.

    A_i = (R_i - mean_g) / (std_g + 1e-6), Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300);
    without the division, Dr. GRPO (Liu et al. 2025, arXiv:2503.20783). The deviation is unbiased.
    """
    scores = trajectory_rewards(batch)
    mean, deviation = group_statistics(scores, batch.group)
    advantage = scores - mean
    if config.normalize_by_std:
        advantage = advantage / (deviation + 1e-6)
    per_token = advantage[batch.token_trajectory] * batch.loss_mask
    return per_token, per_token


def _values(batch: Batch) -> Tensor:
    if batch.values is None:
        raise ValueError("this advantage needs a critic's values")
    return batch.values


def _recursion(rewards: Tensor, values: Tensor, valid: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE over the columns of left-filled rows, [R, T]; the value after a row's end is 0."""
    advantages = torch.zeros_like(values)
    carry = values.new_zeros(len(values))
    next_value = values.new_zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        carry = (delta + gamma * lam * carry) * valid[:, t]
        next_value = values[:, t] * valid[:, t]
        advantages[:, t] = carry
    return advantages


def gae(batch: Batch, config: GaeConfig) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the policy's own tokens.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, returns A + V;
    Schulman et al. 2016 (arXiv:1506.02438). What the world said between two turns is skipped:
    the next own token follows directly (VAGEN's `masked_gae`, verl 0.9's `gae`).
    """
    rows = Rows.of(batch.loss_mask, batch.token_trajectory)
    values = rows.gather(_values(batch))
    advantages = _recursion(rows.gather(batch.rewards), values, rows.valid, config.gamma, config.lam)
    return _finish(batch, rows, advantages, values, whitened=config.whiten)


def bi_level_gae(batch: Batch, config: BiLevelGaeConfig) -> tuple[Tensor, Tensor]:
    """GAE over turns, then over the tokens inside each turn (VAGEN, RAGEN).

    Over turn ends e_1 … e_K: A(e_k) is GAE of r(e_k), V(e_k) with `turn_gamma`, `turn_lam`. Inside
    turn k the last token's advantage is A(e_k), and before it
    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}.

    Turn ends come from the trajectory. The peers' code takes every non-zero reward for one, so that
    a turn rewarded with 0 vanishes. The published algorithm adds a token-level term at the last
    token; like the peers' code, this doesn't.
    """
    rows = Rows.of(batch.loss_mask, batch.token_trajectory)
    rewards, values = rows.gather(batch.rewards), rows.gather(_values(batch))
    is_end = rows.gather(batch.turn_end.to(values.dtype)).bool()
    turns = Rows.of(is_end.flatten(), torch.arange(len(values)).repeat_interleave(values.shape[1]))
    turn_advantages = _recursion(
        turns.gather(rewards.flatten()),
        turns.gather(values.flatten()),
        turns.valid,
        config.turn_gamma,
        config.turn_lam,
    )
    at_end = turns.scatter(turn_advantages, values.numel()).view_as(values)
    advantages = torch.zeros_like(values)
    carry = values.new_zeros(len(values))
    next_value = values.new_zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + config.gamma * next_value - values[:, t]
        inside = delta + config.gamma * config.lam * carry
        carry = torch.where(is_end[:, t], at_end[:, t], inside) * rows.valid[:, t]
        next_value = values[:, t]
        advantages[:, t] = carry
    return _finish(batch, rows, advantages, values, whitened=config.whiten)


def _finish(batch: Batch, rows: Rows, advantages: Tensor, values: Tensor, *, whitened: bool) -> tuple[Tensor, Tensor]:
    size = len(batch.tokens)
    returns = rows.scatter(advantages + values, size)
    packed = rows.scatter(advantages, size)
    return (whiten(packed, batch.loss_mask) if whitened else packed), returns


ADVANTAGES: Registry[tuple[Tensor, Tensor]] = Registry("advantage", entry_points="quintet.advantages")
ADVANTAGES.add("grpo", grpo, help="reward against the other games from the same start", config=GrpoConfig)
ADVANTAGES.add("gae", gae, help="generalised advantage estimation with a critic", config=GaeConfig)
ADVANTAGES.add("bi_level_gae", bi_level_gae, help="GAE over turns, then inside turns", config=BiLevelGaeConfig)
