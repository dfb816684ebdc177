"""A baseline for each place in a reply."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.advantages.groups import Groups, own_tokens, played
from quintet.algorithms.advantages.returns import discounted_returns
from quintet.algorithms.tokens import Rows, whiten
from quintet.config.native.advantages import TokenBaselineConfig
from quintet.records import Batch

__all__ = ["optimal_token_baseline"]

EPSILON = 1e-8


def optimal_token_baseline(batch: Batch, config: TokenBaselineConfig) -> tuple[Tensor, Tensor]:
    """What follows each token, less the baseline of least variance at its place in the group.

    G_t = Σ_{t' ≥ t} r_t', w_t = (1 - 2 π_t + Σ π²) ρ_t², W_t = Σ_{t' ≤ t} w_t',
    A_t = G_t - Σ_j G_t W_t / (Σ_j W_t + 1e-8), the sums over the group's trajectories that have an own token at the
    place t. w is the squared norm of the score at the logits; ρ is `batch.correction`, where there is one. Li et al.
    2026 (arXiv:2602.07078), as verl has it; the returns are G. A trajectory without company has no baseline.

    Places are counted from the first own token: `tir_optimal_token_baseline` counts own tokens, so that turns line
    up; `optimal_token_baseline` counts what the world said, too. With `zero_tail` the longest trajectory, if it
    alone is longest, has no baseline from the place on that is the number of own tokens of the second longest.

    Raises:
        ValueError: the batch has no `squared_mass`.
    """
    if batch.squared_mass is None:
        raise ValueError("an optimal token baseline needs the sum of squared probabilities at each token")
    leaps = config.name == "tir_optimal_token_baseline"
    rows = Rows.of(batch.loss_mask if leaps else _from_first_own(batch), batch.token_trajectory, len(batch.group))
    own = rows.gather(batch.loss_mask)
    returns = discounted_returns(rows.gather(batch.rewards) * own, 1.0)
    energy = (rows.gather(_squared_scores(batch)) * own).cumsum(-1) * own
    baseline = _baseline(batch, returns, energy, zero_tail=config.zero_tail)
    size = len(batch.tokens)
    advantages = rows.scatter((returns - baseline) * own, size)
    if config.whiten:
        advantages = whiten(advantages, batch.loss_mask)
    return advantages, rows.scatter(returns * own, size)


def _squared_scores(batch: Batch) -> Tensor:
    """w of each token, [N]."""
    dtype = batch.rewards.dtype
    mass = torch.zeros_like(batch.rewards) if batch.squared_mass is None else batch.squared_mass.to(dtype)
    squared = 1.0 - 2.0 * batch.logprobs.to(dtype).exp() + mass
    return squared if batch.correction is None else squared * batch.correction.to(dtype).square()


def _from_first_own(batch: Batch) -> Tensor:
    """All tokens of a trajectory from its first own one on, bool [N]."""
    own = batch.loss_mask.long()
    before = own_tokens(batch).cumsum(0) - own_tokens(batch)
    return own.cumsum(0) > before[batch.token_trajectory]


def _baseline(batch: Batch, returns: Tensor, energy: Tensor, *, zero_tail: bool) -> Tensor:
    """B of each trajectory at each place, [R, T]; `energy` is 0 where there is no own token."""
    groups, length = Groups.of(batch.group, played(batch)), own_tokens(batch)
    empty = returns.new_zeros(len(groups.size), returns.shape[1])
    above = empty.index_add(0, groups.member, returns * energy)
    below = empty.index_add(0, groups.member, energy)
    baseline = (above / (below + EPSILON))[groups.member]
    baseline = baseline.masked_fill(groups.alone[:, None], 0.0)
    if not zero_tail:
        return baseline
    return baseline.masked_fill(_beyond_all_others(groups, length, returns.shape[1]), 0.0)


def _beyond_all_others(groups: Groups, length: Tensor, width: int) -> Tensor:
    """Places of a group's only longest trajectory from the length of the second longest on, bool [R, width]."""
    is_longest = length == _largest(groups, length)
    only = (groups.total(is_longest.long()) == 1)[groups.member]
    second = _largest(groups, length.masked_fill(is_longest, 0))
    return (is_longest & only)[:, None] & (torch.arange(width) >= second[:, None])


def _largest(groups: Groups, values: Tensor) -> Tensor:
    """The largest of each trajectory's group, [R]; at least 0."""
    return values.new_zeros(len(groups.size)).scatter_reduce(0, groups.member, values, "amax")[groups.member]
