"""Selection of the groups to train on, by a score of each group.

`rewards` [R] are trajectory rewards, `group` int64 [R]. Trajectories outside `counted`, bool [R], enter no mean and are
never selected.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quintet.algorithms.advantages.groups import Groups
from quintet.algorithms.advantages.reward_sums import RewardSums
from quintet.config.native.algorithm import AlgorithmConfig, FilterConfig

FLOAT32_ROUNDOFF = 2.0**-24
NEGLIGIBLE = 4 * FLOAT32_ROUNDOFF
"""Scores that differ by up to this share of them are equal: rewards are rounded to float32. RAGEN's 1e-10 is
absolute."""


def has_signal(
    rewards: Tensor,
    group: Tensor,
    threshold: float = 0.0,
    counted: Tensor | None = None,
    masked: Tensor | None = None,
) -> Tensor:
    """Return whether the rewards in each trajectory's group have an unbiased standard deviation above `threshold`, bool
    [R].

    Equal rewards have no signal, whatever the rounding error of their deviation, and those that differ have one with
    threshold 0, however small they are. Rewards that are NaN have a signal, so that they stay visible. A group of one
    has a signal because `grpo` does not subtract a mean from it. A group whose counted trajectories are all `masked`,
    bool [R], has none: they are left out of the loss.
    """
    groups = Groups.from_ids(group, counted)
    differs = groups.differ(rewards)
    if threshold:
        differs &= ~(groups.deviation(rewards) <= threshold)
    signal = (differs | groups.alone) & groups.counted
    return signal if masked is None else signal & (groups.total((~masked).long()) > 0)[groups.member]


def select_groups(
    rewards: Tensor,
    group: Tensor,
    config: FilterConfig,
    *,
    counted: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return the trajectories of the groups that `config` selects, bool [R]; `lengths`, int64 [R], are their numbers of
    response tokens.

    In this order: drop groups whose mean reward is outside `min_mean` … `max_mean` (RLinf's `filter_rewards`); with
    `drop_zero`, drop groups whose score `keep_by` is 0; keep the first ⌈`keep_share` × n⌉ groups by that score, at
    least one (RAGEN's uncertainty filter, StarPO-S, arXiv:2504.20073; RAGEN rounds down); keep those of `top_p`; keep
    those of `min_p`. Ties keep the first groups. If none is left, all trajectories that count are selected with
    `keep_all_if_empty`.
    """
    groups = Groups.from_ids(group, counted)
    selected = groups.counted & _between(groups, rewards.double(), config.min_mean, config.max_mean)
    if (config.keep_share, config.top_p, config.min_p, config.drop_zero) != (1.0, 1.0, None, False):
        remaining = Groups.from_ids(group, selected)
        selected = selected & _by_score(remaining, _scores(remaining, rewards.double(), lengths, config), config)
    return groups.counted if config.keep_all_if_empty and not bool(selected.any()) else selected


def advantage_scale(share: float, config: FilterConfig) -> float:
    """Return the factor of advantages by `scale_advantages`, if this share of groups was kept."""
    return {"none": 1.0, "linear": share, "sqrt": math.sqrt(share)}[config.scale_advantages]


def drops_groups_without_signal(config: AlgorithmConfig) -> bool:
    """Return whether groups with equal rewards are left out: only if they give no gradient by any other term."""
    if config.zero_advantages:
        return False
    advantage = config.advantage
    is_relative = advantage.zero_for_equal_rewards and not advantage.whiten and not config.loss.needs_teacher
    has_penalty = config.kl_in_reward is not None or config.shaping.length_penalty
    return config.drop_groups_without_signal and is_relative and not has_penalty


def _between(groups: Groups, rewards: Tensor, minimum: float | None, maximum: float | None) -> Tensor:
    """Return the members of groups whose mean reward is within the bounds up to the rounding of float32, bool [R]: the
    mean of 0.1, 0.1 and 0.4 is 0.2."""
    means, rounding = groups.mean(rewards), FLOAT32_ROUNDOFF * groups.mean(rewards.abs())
    inside = torch.ones_like(means, dtype=torch.bool)
    if minimum is not None:
        inside &= means >= minimum - rounding
    if maximum is not None:
        inside &= means <= maximum + rounding
    return inside


def _by_score(groups: Groups, scores: Tensor, config: FilterConfig) -> Tensor:
    """Return the members of the groups that are kept by their `scores`, [G], bool [R]."""
    is_selected = groups.size > 0
    num_groups = int(is_selected.sum())
    if config.drop_zero:
        is_selected = is_selected & (scores != 0)
    if config.keep_share < 1.0:
        is_selected = _first(scores, is_selected, config, config.max_selected(num_groups))
    if config.top_p < 1.0:
        is_selected = _up_to_share(scores, is_selected, config)
    if config.min_p is not None and bool(is_selected.any()):
        is_selected = is_selected & _near_best(scores, scores[is_selected], config)
    return is_selected[groups.member]


def _order(scores: Tensor, config: FilterConfig) -> Tensor:
    """Return the indices of the scores, the first group by `keep_by` first, and of those with equal scores the first
    in the batch."""
    values, order = scores.sort(stable=True)
    starts = torch.ones_like(order)
    starts[1:] = ~(values[1:] - values[:-1] <= NEGLIGIBLE * values[1:].abs().maximum(values[:-1].abs()))
    rank = torch.empty_like(order).index_copy(0, order, starts.cumsum(0))
    return rank.argsort(descending=not _least(config), stable=True)


def _least(config: FilterConfig) -> bool:
    return config.keep_by.startswith("least_")


def _first(scores: Tensor, is_selected: Tensor, config: FilterConfig, count: int) -> Tensor:
    """Return the first `count` of the groups in `is_selected`, bool [G]."""
    remaining = is_selected.nonzero().squeeze(-1)
    return _mask(is_selected, remaining[_order(scores[remaining], config)][:count])


def _up_to_share(scores: Tensor, is_selected: Tensor, config: FilterConfig) -> Tensor:
    """Return the first of the groups in `is_selected` whose weights add up to `top_p` of their sum, bool [G].

    As in RAGEN, weights are scores or their softmax. Scores are added up while they are positive; if they do not reach
    `top_p` × sum - `top_p_tolerance`, or if this is not positive, no group is kept.
    """
    remaining = is_selected.nonzero().squeeze(-1)
    weights = scores[remaining]
    order = _order(weights, config)
    target = config.top_p * weights.sum() - config.top_p_tolerance
    if config.top_p_softmax:
        weights, target = (-weights if _least(config) else weights).softmax(0), weights.new_tensor(config.top_p)
    weights = weights[order]
    before = weights.cumsum(0) - weights
    # sums are rounded: 0.3 + 0.3 is not more than two thirds of 0.9
    target = target - NEGLIGIBLE * weights.abs().sum()
    needed = (before < target) & (weights > 0)
    count = int(needed.long().cumprod(0).sum())
    reached = bool(weights[:count].sum() >= target)
    return _mask(is_selected, remaining[order[:count]] if reached else order[:0])


def _near_best(scores: Tensor, compared: Tensor, config: FilterConfig) -> Tensor:
    """Return whether scores are at least `min_p` × the largest one, or at most the smallest one / `min_p`, bool [G]."""
    assert config.min_p is not None  # noqa: S101 - for mypy
    if _least(config):
        limit = compared.min() / config.min_p
        return scores <= limit + NEGLIGIBLE * limit.abs()
    limit = compared.max() * config.min_p
    return scores >= limit - NEGLIGIBLE * limit.abs()


def _mask(like: Tensor, indices: Tensor) -> Tensor:
    return torch.zeros_like(like).index_fill(0, indices, True)


def _scores(groups: Groups, rewards: Tensor, lengths: Tensor | None, config: FilterConfig) -> Tensor:
    """Return the number by which groups are compared, [G]."""
    kind = config.keep_by.removeprefix("least_")
    if kind == "length":
        if lengths is None:
            raise ValueError("a filter by length needs the lengths of responses")
        return groups.total(lengths.to(rewards.dtype)) / groups.size.clamp(min=1)
    if kind in ("total", "mean"):
        members = groups.counted.nonzero().squeeze(-1)
        totals = RewardSums.from_rewards(rewards[members], groups.member[members], len(groups.size)).total
        return totals if kind == "total" else totals / groups.size.clamp(min=1)
    distance = groups.centered(rewards)
    if kind == "lead":
        lowest = torch.full(groups.size.shape, -torch.inf, dtype=rewards.dtype)
        return lowest.scatter_reduce(0, groups.member[groups.counted], distance[groups.counted], "amax")
    variance = groups.total(distance.square()) / (groups.size - config.ddof).clamp(min=1)
    return variance.sqrt() if kind == "deviation" else variance
