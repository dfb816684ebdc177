"""Selection of the groups to train on.

`rewards` [R] are trajectory rewards, `group` int64 [R]. Trajectories outside `counted`, bool [R], enter no mean and are
never selected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.advantages.groups import Groups
from quintet.config.native.algorithm import AlgorithmConfig, FilterConfig


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
    `signal_threshold`, drop groups without signal (DAPO, arXiv:2503.14476); keep the ⌈`keep_share` × n⌉ groups that
    are first by `keep_by`, at least one (RAGEN's uncertainty filter, StarPO-S, arXiv:2504.20073). Ties keep the
    first groups. RAGEN rounds down and may keep none.
    """
    groups = Groups.from_ids(group, counted)
    selected = groups.counted & _between(groups.mean(rewards), config.min_mean, config.max_mean)
    if signal_threshold is not None:
        selected = selected & has_signal(rewards, group, signal_threshold, counted)
    if config.keep_share >= 1.0:
        return selected
    return selected & _first_groups(Groups.from_ids(group, selected), rewards, config)


def drops_groups_without_signal(config: AlgorithmConfig) -> bool:
    """Return whether groups with equal rewards are left out: only if they give no gradient by any other term."""
    advantage = config.advantage
    is_relative = advantage.zero_for_equal_rewards and not advantage.whiten and not config.loss.needs_teacher
    has_penalty = config.kl_in_reward is not None or config.shaping.length_penalty
    return config.drop_groups_without_signal and is_relative and not has_penalty


def _between(means: Tensor, minimum: float | None, maximum: float | None) -> Tensor:
    inside = torch.ones_like(means, dtype=torch.bool)
    if minimum is not None:
        inside &= means >= minimum
    if maximum is not None:
        inside &= means <= maximum
    return inside


def _first_groups(groups: Groups, rewards: Tensor, config: FilterConfig) -> Tensor:
    """Return the members of the `keep_share` of non-empty groups that are first by `keep_by`, bool [R]."""
    present = groups.size > 0
    order = _spread(groups, rewards, config).masked_fill(~present, -torch.inf).argsort(descending=True, stable=True)
    count = config.max_kept(int(present.sum()))
    chosen = torch.zeros_like(present)
    chosen[order[:count]] = True
    return (chosen & present)[groups.member]


def _spread(groups: Groups, rewards: Tensor, config: FilterConfig) -> Tensor:
    """Return the number by which groups are ordered, descending: deviation, negative deviation, or lead of the best."""
    distance = rewards - groups.mean(rewards)
    if config.keep_by == "lead":
        # members of no group do not count
        distance = distance.masked_fill(~groups.counted, -torch.inf)
        lowest = torch.full(groups.size.shape, -torch.inf, dtype=rewards.dtype)
        return lowest.scatter_reduce(0, groups.member, distance, "amax")
    deviation = (groups.total(distance.square()) / (groups.size - 1).clamp(min=1)).sqrt()
    return -deviation if config.keep_by == "least_deviation" else deviation
