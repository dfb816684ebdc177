"""What is done to rewards before trajectories are compared."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quintet.algorithms.advantages.groups import Groups, own_tokens, played, trajectory_rewards
from quintet.algorithms.tokens import last_tokens
from quintet.config.native.algorithm import ShapingConfig
from quintet.records import Batch

__all__ = ["shape"]

EPSILON = 1e-6


def shape(batch: Batch, config: ShapingConfig, longest: int) -> Batch:
    """The batch with its rewards shaped; `longest` is the most own tokens that a trajectory can have.

    In this order, each on the total of a trajectory:

    - `length_penalty`: coefficient × max(0, own tokens - budget) / budget comes off at the last own token.
    - `center`: the mean of the group or of the batch comes off there, too; who is alone is left.
    - `divide`: all rewards of the trajectory are divided by 1e-6 plus the unbiased deviation that the totals of the
      group or of the batch had before a mean came off; where nobody else is there, or they differ by rounding
      alone, there is nothing to divide by.
    - `clip`: rewards of a trajectory whose total is beyond ±clip are scaled down so that it is ±clip.

    Dividing and clipping scale, so that each turn keeps its sign and its share of the whole. Trajectories without own
    tokens aren't counted. ROLL (`norm_mean_type`, `norm_std_type`, `reward_clip`) does the last three in this order on
    rewards of whole replies; where totals are all the same it divides by 1e-6.
    """
    if config.length_penalty:
        batch = _shifted(batch, -config.length_penalty * _excess(batch, config.length_budget or max(longest // 2, 1)))
    totals = trajectory_rewards(batch)
    if config.center != "none":
        groups = _groups(batch, config.center)
        batch = _shifted(batch, -groups.mean(totals).masked_fill(groups.alone, 0.0))
    if config.divide != "none":
        batch = _scaled(batch, _inverse_deviation(_groups(batch, config.divide), totals))
    if config.clip is not None:
        size = trajectory_rewards(batch).abs()
        batch = _scaled(batch, torch.where(size > config.clip, config.clip / size, 1.0))
    return batch


def _excess(batch: Batch, budget: int) -> Tensor:
    """Own tokens over budget as a share of it, [R]."""
    over = (own_tokens(batch) - budget).clamp(min=0)
    return over.to(batch.rewards.dtype) / budget


def _groups(batch: Batch, over: str) -> Groups:
    group = batch.group if over == "group" else torch.zeros_like(batch.group)
    return Groups.of(group, played(batch))


def _inverse_deviation(groups: Groups, totals: Tensor) -> Tensor:
    """By what totals are multiplied so that they deviate by 1, [R]."""
    deviation = groups.deviation(totals)
    differ = deviation > EPSILON * (1.0 + groups.mean(totals).abs())
    return torch.where(differ, 1.0 / (deviation + EPSILON), 1.0)


def _shifted(batch: Batch, change: Tensor) -> Batch:
    """`change` [R] added at the last own token of each trajectory."""
    last = last_tokens(batch.loss_mask, batch.token_trajectory)
    return replace(batch, rewards=batch.rewards + change[batch.token_trajectory] * last)


def _scaled(batch: Batch, factor: Tensor) -> Batch:
    """All rewards of each trajectory times `factor`, [R]."""
    return replace(batch, rewards=batch.rewards * factor.to(batch.rewards.dtype)[batch.token_trajectory])
