"""Reward shaping before trajectories are compared."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quintet.algorithms.advantages.groups import Groups, has_response, num_response_tokens, trajectory_rewards
from quintet.algorithms.tokens import last_tokens
from quintet.config.native.algorithm import ShapingConfig
from quintet.records import Batch

EPSILON = 1e-6


def shape_rewards(batch: Batch, config: ShapingConfig, max_response_tokens: int) -> Batch:
    """Return the batch with shaped rewards; `max_response_tokens` is the maximum number of response tokens of a
    trajectory.

    In this order, each on the total reward of a trajectory:

    - `length_penalty`: subtract coefficient × max(0, response tokens - budget) / budget at the last response token.
    - `center`: subtract the mean of the group or batch there, except from a group of one.
    - `divide`: divide all rewards of the trajectory by 1e-6 plus the unbiased standard deviation of the totals in the
      group or batch before centering; totals of a group of one, or equal up to rounding, are not divided.
    - `clip`: scale the rewards of a trajectory whose total is beyond ±clip down to ±clip; that of a negative total down
      to -`clip_negative` if it is set.

    Dividing and clipping scale, so that each turn keeps its sign and its share of the total. Trajectories without
    response tokens are not counted. ROLL (`norm_mean_type`, `norm_std_type`, `reward_clip`) does the last three in this
    order on rewards of whole responses, and divides equal totals by 1e-6.
    """
    if config.length_penalty:
        batch = _shifted(
            batch, -config.length_penalty * _excess(batch, config.length_budget or max(max_response_tokens // 2, 1))
        )
    totals = shaped = trajectory_rewards(batch, across_groups="batch" in (config.center, config.divide))
    if config.center != "none":
        groups = _groups(batch, config.center)
        shaped = torch.where(groups.alone, totals, groups.centered(totals))
        batch = _with_totals(batch, shaped)
    if config.divide != "none":
        factor = _inverse_deviation(_groups(batch, config.divide), totals)
        batch = _with_totals(_scaled(batch, factor), shaped * factor)
    if config.clip is not None:
        totals = trajectory_rewards(batch)
        negative = config.clip if config.clip_negative is None else config.clip_negative
        limit = torch.where(totals < 0, totals.new_tensor(negative), totals.new_tensor(config.clip))
        factor = torch.where(totals.abs() > limit, limit / totals.abs(), 1.0)
        batch = _with_totals(_scaled(batch, factor), totals * factor)
    return batch


def _excess(batch: Batch, budget: int) -> Tensor:
    """Return the response tokens over budget relative to the budget, [R]."""
    over = (num_response_tokens(batch) - budget).clamp(min=0)
    return over.to(batch.rewards.dtype) / budget


def _groups(batch: Batch, over: str) -> Groups:
    group = batch.group if over == "group" else torch.zeros_like(batch.group)
    return Groups.from_ids(group, has_response(batch))


def _inverse_deviation(groups: Groups, totals: Tensor) -> Tensor:
    """Return the factor that gives the totals a standard deviation of 1, [R]."""
    return torch.where(groups.differ(totals), 1.0 / (groups.deviation(totals) + EPSILON), 1.0)


def _shifted(batch: Batch, change: Tensor) -> Batch:
    """Add `change` [R] at the last response token of each trajectory."""
    last = last_tokens(batch.loss_mask, batch.token_trajectory)
    return replace(batch, rewards=batch.rewards + change[batch.token_trajectory] * last)


def _with_totals(batch: Batch, totals: Tensor) -> Batch:
    """Change the reward of the last response token of each trajectory so that the total is `totals` [R], up to half of
    the spacing at that reward: a total of 0 stays recognisable, see `RewardSums`."""
    exact = totals.double().new_zeros(len(totals)).index_add(0, batch.token_trajectory, batch.rewards.double())
    last = last_tokens(batch.loss_mask, batch.token_trajectory)
    change = (totals.double() - exact)[batch.token_trajectory] * last
    return replace(batch, rewards=(batch.rewards.double() + change).to(batch.rewards.dtype))


def _scaled(batch: Batch, factor: Tensor) -> Batch:
    """Multiply all rewards of each trajectory by `factor`, [R]."""
    return replace(batch, rewards=batch.rewards * factor.to(batch.rewards.dtype)[batch.token_trajectory])
