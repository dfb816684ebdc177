"""Sums of rewards whose comparison does not depend on rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quintet.algorithms.tokens import TokenRows, discounted_returns

UNIT_ROUNDOFF = 2.0**-53
"""Relative rounding error of one operation in float64."""


@dataclass(frozen=True, slots=True)
class RewardSums:
    """Sums of rewards with bounds of their rounding errors.

    The sums of `[-0.1, -0.1, 1.0]` and `[1.0, -0.1, -0.1]`, or of `[0.1, 0.2]` and `[0.3]`, are equal, but their last
    bits differ. Divided by a standard deviation of such differences, advantages would be up to ±√n, so sums are
    compared up to a bound of their rounding errors:

    - A reward r is the rounding of another number, such as 0.1, to the precision of the data. Its error is at most
      half of the spacing of numbers at r, ulp(r) / 2 ≤ 2⁻²⁴ |r| in float32.
    - Each of the n - 1 additions in float64 is off by at most 2⁻⁵³ Σ |r|.

    So a sum is off by at most e = Σ ulp(r) / 2 + 2⁻⁵³ n Σ |r|, which scales with the rewards, and two equal sums differ
    by at most e_i + e_j. Sums of a single reward have not been added up: they are equal only if their bits are.

    The precision of the data is float32 if all rewards of a sum are float32 numbers, whatever the dtype of their
    tensor, and float64 otherwise.
    """

    total: Tensor
    """float64 [S]."""
    error: Tensor
    """float64 [S], bound of the absolute rounding error; 0 for a sum without rewards other than 0."""
    size: Tensor
    """float64 [S], Σ |r|."""
    num_terms: Tensor
    """int64 [S], rewards other than 0."""

    @classmethod
    def from_rewards(cls, rewards: Tensor, owner: Tensor, count: int) -> RewardSums:
        """Sum `rewards` [K] of the `owner`, int64 [K], into `count` sums."""
        index = rewards.nonzero().squeeze(-1)
        terms, owner = rewards[index].double(), owner[index]
        empty = terms.new_zeros(count)
        size = empty.index_add(0, owner, terms.abs())
        num_terms = torch.bincount(owner, minlength=count)
        error = empty.index_add(0, owner, _half_ulp(terms, owner, count)) + UNIT_ROUNDOFF * num_terms * size
        return cls(_zero_within(empty.index_add(0, owner, terms), error), error, size, num_terms)

    def discounted(self, rows: TokenRows, gamma: float) -> RewardSums:
        """Return G_k = r_k + gamma G_{k+1} along `rows` of sums r.

        The multiplication and the addition of each step are off by at most 2⁻⁵³ Σ gamma^j |r_{k+j}| each. Rewards of
        later steps count twice in `num_terms` if they are multiplied: such a sum is rounded, even of a single reward.
        """

        def along_rows(values: Tensor, factor: float) -> Tensor:
            return rows.scatter(discounted_returns(rows.gather(values), factor), len(values))

        size, num_terms = along_rows(self.size, abs(gamma)), along_rows(self.num_terms, float(gamma != 0))
        if gamma not in (0.0, 1.0):
            num_terms = 2 * num_terms - self.num_terms
        error = along_rows(self.error, abs(gamma)) + 2 * UNIT_ROUNDOFF * num_terms * size
        return RewardSums(_zero_within(along_rows(self.total, gamma), error), error, size, num_terms)

    def equalized(self, group: Tensor) -> RewardSums:
        """Return the sums with the same bits for those that are equal up to rounding within a group, int64 [S].

        Neighbours in the order of their sums that are equal up to rounding form a run, and all sums of a run become
        its lowest one, unless the first and the last of the run differ: a series of small steps is a true difference.
        """
        order = self.total.argsort(stable=True)
        order = order[group[order].argsort(stable=True)]
        total, owner = self.total[order], group[order]
        starts = torch.ones_like(owner, dtype=torch.bool)
        starts[1:] = (owner[1:] != owner[:-1]) | ~self.at(order[:-1]).equals(self.at(order[1:]))
        first = starts.nonzero().squeeze(-1)
        last = torch.cat([first[1:], first.new_tensor([len(order)])])[: len(first)] - 1
        run = starts.cumsum(0) - 1
        is_equal = self.at(order[first]).equals(self.at(order[last]))[run]
        equal = torch.where(is_equal, total[first][run], total)
        return replace(self, total=torch.empty_like(total).index_copy(0, order, equal))

    def at(self, index: Tensor) -> RewardSums:
        """Return the sums with these indices, int64 [S']."""
        return RewardSums(self.total[index], self.error[index], self.size[index], self.num_terms[index])

    def equals(self, other: RewardSums) -> Tensor:
        """Return whether sums are equal up to rounding, bool [S]; NaN and infinite sums equal nothing."""
        are_single = (self.num_terms <= 1) & (other.num_terms <= 1)
        bound = torch.where(are_single, 0.0, self.error + other.error)
        return ((self.total - other.total).abs() <= bound) & bound.isfinite()


def _half_ulp(terms: Tensor, owner: Tensor, count: int) -> Tensor:
    """Return half of the spacing at each reward, float64 [K], of float32 numbers if all rewards of its sum are such."""
    absolute = terms.abs()
    single = absolute.float()
    num_double = torch.bincount(owner[single.double() != absolute], minlength=count)
    return torch.where((num_double == 0)[owner], _spacing(single), _spacing(absolute)) / 2


def _spacing(values: Tensor) -> Tensor:
    """Return the distance of positive numbers to the next larger one of the same dtype, float64 [K]; of the largest
    one, to the next smaller one."""
    largest = torch.finfo(values.dtype).max
    values = values.clamp(max=torch.nextafter(values.new_tensor(largest), values.new_tensor(0.0)))
    return torch.nextafter(values, torch.full_like(values, torch.inf)).double() - values.double()


def _zero_within(total: Tensor, error: Tensor) -> Tensor:
    """Return the sums, with 0 for those that rounding alone may have moved away from it."""
    return torch.where((total.abs() <= error) & error.isfinite(), 0.0, total)
