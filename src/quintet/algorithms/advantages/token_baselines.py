"""Minimum-variance baselines per token position."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.advantages.groups import Groups, has_response
from quintet.algorithms.advantages.reward_sums import RewardSums
from quintet.algorithms.tokens import TokenRows, whiten
from quintet.config.native.advantages import TokenBaselineSection
from quintet.records import Batch

EPSILON = 1e-8


def optimal_token_baseline(batch: Batch, config: TokenBaselineSection) -> tuple[Tensor, Tensor]:
    """Return of each token minus the minimum-variance baseline at its position in the group.

    G_t = Σ_{t' ≥ t} r_t', w_t = (1 - 2 π_t + Σ π²) ρ_t², W_t = Σ_{t' ≤ t} w_t',
    A_t = G_t - Σ_j G_t W_t / (Σ_j W_t + 1e-8), summed over the group's trajectories with a response token at
    position t. If all of them have the same return there up to rounding, A_t is 0, where verl leaves
    1e-8 G_t / Σ_j W_t. w is the squared norm of the score at the logits; ρ is `batch.correction`, if set. Li et al.
    2026 (arXiv:2602.07078), as in verl; the returns are G. The only trajectory of a group has no baseline; a trajectory
    whose tokens are all rejected counts as another one in `optimal_token_baseline` alone.

    Positions are counted from the first response token: `tir_optimal_token_baseline` counts response tokens, so that
    turns align; `optimal_token_baseline` counts observations and rejected tokens, too. With `zero_tail`, the longest
    trajectory of a group has no baseline from the position on that is the length of the second longest.

    Raises:
        ValueError: the batch has no `sum_squared_probs`.
    """
    if batch.sum_squared_probs is None:
        raise ValueError("an optimal token baseline needs the sum of squared probabilities at each token")
    rows = TokenRows.from_mask(
        batch.loss_mask if config.counts_response_tokens_only else _from_first_response(batch),
        batch.token_trajectory,
        len(batch.group),
    )
    response_mask = rows.gather(batch.loss_mask)
    returns = _returns(batch, rows)
    energy = (rows.gather(_squared_scores(batch)) * response_mask).cumsum(-1) * response_mask
    length = response_mask.bool().sum(-1)
    groups = Groups.from_ids(batch.group, length > 0 if config.counts_response_tokens_only else has_response(batch))
    baseline = _baseline(groups, length, returns, energy, response_mask, zero_tail=config.zero_tail)
    size = len(batch.tokens)
    advantages = rows.scatter((returns - baseline) * response_mask, size)
    if config.whiten:
        advantages = whiten(advantages, batch.loss_mask)
    return advantages, rows.scatter(returns * response_mask, size)


def _returns(batch: Batch, rows: TokenRows) -> Tensor:
    """Return the undiscounted return of each token, [R, T]; returns at a position of a group that are equal up to
    rounding have the same bits, see `RewardSums`."""
    size, width = len(batch.tokens), rows.index.shape[1]
    rewards = RewardSums.from_rewards(batch.rewards * batch.loss_mask, torch.arange(size), size)
    group = Groups.from_ids(batch.group).member
    position = rows.scatter(torch.arange(width).expand_as(rows.index), size)
    compared = torch.where(batch.loss_mask, group[batch.token_trajectory] * width + position, -1)
    return rows.gather(rewards.discounted(rows, 1.0).equalized(compared).total.to(batch.rewards.dtype))


def _squared_scores(batch: Batch) -> Tensor:
    """Return w of each token, [N]."""
    dtype = batch.rewards.dtype
    mass = torch.zeros_like(batch.rewards) if batch.sum_squared_probs is None else batch.sum_squared_probs.to(dtype)
    squared = 1.0 - 2.0 * batch.logprobs.to(dtype).exp() + mass
    return squared if batch.correction is None else squared * batch.correction.to(dtype).square()


def _from_first_response(batch: Batch) -> Tensor:
    """Return all tokens of a trajectory from its first response token on, bool [N], also if that one is rejected."""
    responses = batch.loss_mask if batch.trained_mask is None else batch.loss_mask | ~batch.trained_mask
    counts = torch.bincount(batch.token_trajectory[responses], minlength=len(batch.group))
    before = counts.cumsum(0) - counts
    return responses.long().cumsum(0) > before[batch.token_trajectory]


def _baseline(
    groups: Groups, length: Tensor, returns: Tensor, energy: Tensor, response_mask: Tensor, *, zero_tail: bool
) -> Tensor:
    """Return the baseline of each trajectory and position, [R, T]; `energy` is 0 outside response tokens, of which
    there are `length`, int64 [R]."""
    empty = returns.new_zeros(len(groups.size), returns.shape[1])
    numerator = empty.index_add(0, groups.member, returns * energy)
    denominator = empty.index_add(0, groups.member, energy)
    baseline = (numerator / (denominator + EPSILON))[groups.member]
    baseline = torch.where(_differ(groups, returns, response_mask.bool()), baseline, returns)
    baseline = baseline.masked_fill(groups.alone[:, None], 0.0)
    if not zero_tail:
        return baseline
    return baseline.masked_fill(_beyond_all_others(groups, length, returns.shape[1]), 0.0)


def _differ(groups: Groups, returns: Tensor, is_response: Tensor) -> Tensor:
    """Return whether the returns [R, T] of a group's trajectories with a response token differ at each position, bool
    [R, T]; NaN differs from every return, so that it stays visible."""
    group = groups.member[:, None].expand_as(returns)
    lowest = returns.new_full((len(groups.size), returns.shape[1]), torch.inf)
    highest = (-lowest).scatter_reduce(0, group, returns.masked_fill(~is_response, -torch.inf), "amax")
    lowest = lowest.scatter_reduce(0, group, returns.masked_fill(~is_response, torch.inf), "amin")
    return (highest != lowest)[groups.member] | ~is_response


def _beyond_all_others(groups: Groups, length: Tensor, width: int) -> Tensor:
    """Return the positions of a group's unique longest trajectory beyond the second longest, bool [R, width]."""
    is_longest = length == _largest(groups, length)
    is_unique = (groups.total(is_longest.long()) == 1)[groups.member]
    second = _largest(groups, length.masked_fill(is_longest, 0))
    return (is_longest & is_unique)[:, None] & (torch.arange(width) >= second[:, None])


def _largest(groups: Groups, values: Tensor) -> Tensor:
    """Return the maximum of each trajectory's group, [R]; at least 0."""
    return values.new_zeros(len(groups.size)).scatter_reduce(0, groups.member, values, "amax")[groups.member]
