"""Which trajectories are learnt from; all groups are kept or dropped as a whole.

`rewards` [R] are those of whole trajectories, `group` int64 [R]. `counted`, bool [R], says which of them there are:
what isn't counted enters no mean and is never kept.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quintet.algorithms.advantages.groups import Groups
from quintet.config.native.algorithm import FilterConfig

__all__ = ["has_signal", "keep_trajectories"]

TOLERANCE = 1e-9
"""By how much of a group a share may miss a whole number: 0.3 × 10 isn't 3.0000000000000004."""


def has_signal(rewards: Tensor, group: Tensor, threshold: float = 0.0, counted: Tensor | None = None) -> Tensor:
    """Whether a trajectory's group has rewards that differ by more than `threshold` (unbiased deviation), bool [R].

    Rewards that are all the same have no signal, whatever rounding makes of their deviation. A group of one has:
    nothing is taken off its reward (`grpo`).
    """
    groups = Groups.of(group, counted)
    telling = groups.differ(rewards) & (groups.deviation(rewards) > threshold)
    return (telling | groups.alone) & groups.counted


def keep_trajectories(
    rewards: Tensor,
    group: Tensor,
    config: FilterConfig,
    *,
    signal_threshold: float | None = None,
    counted: Tensor | None = None,
) -> Tensor:
    """Trajectories of the groups that `config` keeps, bool [R].

    In this order: groups whose mean reward lies outside `min_mean` … `max_mean` go (RLinf's `filter_rewards`); with
    `signal_threshold`, so do those without signal (DAPO, arXiv:2503.14476); of those left, the ⌈`keep_share` × n⌉
    whose rewards deviate most stay, at least one where there is one (RAGEN's uncertainty filter, StarPO-S,
    arXiv:2504.20073). Of groups that deviate alike, the first stay. RAGEN rounds down and may keep none.
    """
    groups = Groups.of(group, counted)
    kept = groups.counted & _between(groups.mean(rewards), config.min_mean, config.max_mean)
    if signal_threshold is not None:
        kept = kept & has_signal(rewards, group, signal_threshold, counted)
    if config.keep_share >= 1.0:
        return kept
    return kept & _most_uncertain(Groups.of(group, kept), rewards, config.keep_share)


def _between(means: Tensor, lowest: float | None, highest: float | None) -> Tensor:
    inside = torch.ones_like(means, dtype=torch.bool)
    if lowest is not None:
        inside &= means >= lowest
    if highest is not None:
        inside &= means <= highest
    return inside


def _most_uncertain(groups: Groups, rewards: Tensor, share: float) -> Tensor:
    """Members of the share of groups, of those with members left, whose rewards deviate most, bool [R]."""
    present = groups.size > 0
    squares = groups.total((rewards - groups.mean(rewards)).square())
    spread = (squares / (groups.size - 1).clamp(min=1)).sqrt().masked_fill(~present, -torch.inf)
    count = math.ceil(share * int(present.sum()) - TOLERANCE)
    chosen = torch.zeros_like(present)
    chosen[spread.argsort(descending=True, stable=True)[:count]] = True
    return (chosen & present)[groups.member]
