"""Statistics over groups of trajectories."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.algorithms.advantages.reward_sums import RewardSums
from quintet.records import Batch


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of any size; only `counted` members enter statistics.

    >>> groups = Groups.from_ids(torch.tensor([7, 7, 9]))
    >>> groups.mean(torch.tensor([1.0, 3.0, 5.0]))
    tensor([2., 2., 5.])
    """

    member: Tensor
    """int64 [R], index of each member's group, from 0."""
    counted: Tensor
    """bool [R]."""
    size: Tensor
    """int64 [G], number of counted members."""

    @classmethod
    def from_ids(cls, group: Tensor, counted: Tensor | None = None) -> Groups:
        """Build from group ids, int64 [R]; `counted` bool [R], None counts all."""
        names, member = torch.unique(group, return_inverse=True)
        counted = torch.ones_like(member, dtype=torch.bool) if counted is None else counted
        return cls(member, counted, torch.bincount(member[counted], minlength=len(names)))

    @property
    def alone(self) -> Tensor:
        """Whether each member is the only one of its group, bool [R]."""
        return (self.size <= 1)[self.member]

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over each group, [G]."""
        empty = values.new_zeros(len(self.size))
        return empty.index_add(0, self.member[self.counted], values[self.counted])

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of each member's group, [R]; of equal values exactly their value."""
        return torch.where(self.differ(values), self._mean(values).to(values.dtype), self._highest(values)[self.member])

    def centered(self, values: Tensor) -> Tensor:
        """Return x - mean, [R], with the mean in float64: beside 1e6, 0.1 and 0.2 are on both sides of their mean.
        Exactly 0 for equal values, not the rounding error of their mean."""
        return torch.where(self.differ(values), (values.double() - self._mean(values)).to(values.dtype), 0.0)

    def _mean(self, values: Tensor) -> Tensor:
        return (self.total(values.double()) / self.size.clamp(min=1))[self.member]

    def deviation(self, values: Tensor) -> Tensor:
        """Return the unbiased standard deviation of each member's group, [R]; 0 with fewer than two members.
        Squares are in float64: in float32, those of 1e20 are infinite."""
        squares = self.total(self.centered(values.double()).square())
        return (squares / (self.size - 1).clamp(min=1)).sqrt()[self.member].to(values.dtype)

    def relative_deviation(self, values: Tensor) -> Tensor:
        """Return std_g / (max_g std_g + 1e-6), [R], RAGEN's weight of a group; the only member of one has std 1."""
        deviation = self.deviation(values).masked_fill(self.alone, 1.0) * self.counted
        return deviation / (deviation.max() + 1e-6) if len(deviation) else deviation

    def differ(self, values: Tensor) -> Tensor:
        """Return whether the values of each member's group differ, bool [R]; exact, unlike a standard deviation.
        `RewardSums.equalized` makes sums of rewards comparable.

        NaN and infinite values differ from all values, so that they stay visible in the statistics."""
        return ((self._highest(values) + self._highest(-values)) != 0)[self.member]

    def _highest(self, values: Tensor) -> Tensor:
        """Return the highest value of each group, [G]; 0 for a group without counted members."""
        start = values.new_zeros(len(self.size))
        member = self.member[self.counted]
        return start.scatter_reduce(0, member, values[self.counted], "amax", include_self=False)

    def normalized(self, values: Tensor, *, by_deviation: bool) -> Tensor:
        """Return (x - mean) / (std + 1e-6) or x - mean, [R]. The only member of a group keeps its value, as in verl.

        Equal values give exactly 0."""
        centered = torch.where(self.alone, values, self.centered(values))
        if not by_deviation:
            return centered
        return centered / (self.deviation(values).masked_fill(self.alone, 1.0) + 1e-6)


def trajectory_rewards(batch: Batch, *, across_groups: bool = False) -> Tensor:
    """Return the total reward of each trajectory, [R], summed in float64. Totals of a group that are equal up to
    rounding have the same bits, see `RewardSums`; with `across_groups` also those of different groups, so that they
    depend on the other groups of the batch."""
    sums = trajectory_sums(batch)
    if across_groups:
        sums = sums.equalized(torch.zeros_like(batch.group))
    return sums.equalized(batch.group).total.to(batch.rewards.dtype)


def trajectory_sums(batch: Batch) -> RewardSums:
    """Return the total reward of each trajectory, [R], before any comparison."""
    return RewardSums.from_rewards(batch.rewards, batch.token_trajectory, len(batch.group))


def num_response_tokens(batch: Batch) -> Tensor:
    """Return the number of response tokens in the loss mask of each trajectory, int64 [R]: sampled ones only, also if
    observations are trained on."""
    trained = torch.bincount(batch.token_trajectory[batch.loss_mask], minlength=len(batch.group))
    return trained if batch.response_tokens is None else trained.minimum(batch.response_tokens)


def has_response(batch: Batch) -> Tensor:
    """Return which trajectories have response tokens, bool [R]; a part of a batch keeps the indices of the whole.

    A trajectory whose tokens are all rejected still has a reward, which counts in its group: the turn ends stay."""
    responses = batch.loss_mask | batch.turn_end
    return torch.bincount(batch.token_trajectory[responses], minlength=len(batch.group)) > 0
