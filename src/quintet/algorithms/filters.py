"""Selection of the groups to train on.

`rewards` [R] are trajectory rewards, `group` int64 [R]. Trajectories outside `counted`, bool [R], enter no mean and are
never selected.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quintet.algorithms.advantages.groups import Groups
from quintet.config.native.algorithm import FilterConfig

TOLERANCE = 1e-9
"""Tolerance for rounding of a share times a number of groups: 0.3 × 10 is 3.0000000000000004 in floating point."""


def has_signal(rewards: Tensor, group: Tensor, threshold: float = 0.0, counted: Tensor | None = None) -> Tensor:
    """Return whether the rewards in each trajectory's group have an unbiased standard deviation above `threshold`, bool
    [R].

    Equal rewards have no signal, whatever the rounding error of their deviation. A group of one has a signal because
    `grpo` does not subtract a mean from it.
    """
    groups = Groups.from_ids(group, counted)
    differs = groups.differ(rewards) & (groups.deviation(rewards) > threshold)
    return (differs | groups.alone) & groups.counted


def select_groups(
    rewards: Tensor,
    group: Tensor,
    config: FilterConfig,
    *,
    signal_threshold: float | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Return the trajectories of the groups that `config` selects, bool [R].

    In this order: drop groups whose mean reward is outside `min_mean` … `max_mean` (RLinf's `filter_rewards`); with
    `signal_threshold`, drop groups without signal (DAPO, arXiv:2503.14476); keep the ⌈`keep_share` × n⌉ groups with the
    largest standard deviation, at least one (RAGEN's uncertainty filter, StarPO-S, arXiv:2504.20073). Ties keep the
    first groups. RAGEN rounds down and may keep none.
    """
    groups = Groups.from_ids(group, counted)
    selected = groups.counted & _between(groups.mean(rewards), config.min_mean, config.max_mean)
    if signal_threshold is not None:
        selected = selected & has_signal(rewards, group, signal_threshold, counted)
    if config.keep_share >= 1.0:
        return selected
    return selected & _highest_deviation(Groups.from_ids(group, selected), rewards, config.keep_share)


def _between(means: Tensor, minimum: float | None, maximum: float | None) -> Tensor:
    inside = torch.ones_like(means, dtype=torch.bool)
    if minimum is not None:
        inside &= means >= minimum
    if maximum is not None:
        inside &= means <= maximum
    return inside


def _highest_deviation(groups: Groups, rewards: Tensor, share: float) -> Tensor:
    """Return the members of the share of non-empty groups with the largest standard deviation, bool [R]."""
    present = groups.size > 0
    squares = groups.total((rewards - groups.mean(rewards)).square())
    spread = (squares / (groups.size - 1).clamp(min=1)).sqrt().masked_fill(~present, -torch.inf)
    count = math.ceil(share * int(present.sum()) - TOLERANCE)
    chosen = torch.zeros_like(present)
    chosen[spread.argsort(descending=True, stable=True)[:count]] = True
    return (chosen & present)[groups.member]
