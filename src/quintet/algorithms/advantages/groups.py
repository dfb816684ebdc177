"""Statistics over groups of trajectories."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
        """Return the mean of each member's group, [R]."""
        return (self.total(values) / self.size.clamp(min=1))[self.member]

    def deviation(self, values: Tensor) -> Tensor:
        """Return the unbiased standard deviation of each member's group, [R]; 0 with fewer than two members."""
        squares = self.total((values - self.mean(values)).square())
        return (squares / (self.size - 1).clamp(min=1)).sqrt()[self.member]

    def relative_deviation(self, values: Tensor) -> Tensor:
        """Return std_g / (max_g std_g + 1e-6), [R], RAGEN's weight of a group; the only member of one has std 1."""
        deviation = self.deviation(values).masked_fill(self.alone, 1.0) * self.counted
        return deviation / (deviation.max() + 1e-6) if len(deviation) else deviation

    def differ(self, values: Tensor) -> Tensor:
        """Return whether the values of each member's group differ, bool [R]; exact, unlike a standard deviation.

        A NaN differs from all values, so that it stays visible in the statistics."""
        counted, member = values[self.counted], self.member[self.counted]
        start = values.new_full((len(self.size),), torch.inf)
        lowest = start.scatter_reduce(0, member, counted, "amin")
        highest = (-start).scatter_reduce(0, member, counted, "amax")
        return ((highest != lowest) & (self.size > 0))[self.member]

    def normalized(self, values: Tensor, *, by_deviation: bool) -> Tensor:
        """Return (x - mean) / (std + 1e-6) or x - mean, [R]. The only member of a group keeps its value, as in verl.

        Equal values give 0, not the rounding error of their mean over 1e-6."""
        centered = values - self.mean(values).masked_fill(self.alone, 0.0)
        centered = torch.where(self.differ(values) | self.alone, centered, 0.0)
        if not by_deviation:
            return centered
        return centered / (self.deviation(values).masked_fill(self.alone, 1.0) + 1e-6)


def trajectory_rewards(batch: Batch) -> Tensor:
    """Return the total reward of each trajectory, [R]."""
    return batch.rewards.new_zeros(len(batch.group)).index_add(0, batch.token_trajectory, batch.rewards)


def num_response_tokens(batch: Batch) -> Tensor:
    """Return the number of response tokens of each trajectory, int64 [R]."""
    return torch.bincount(batch.token_trajectory[batch.loss_mask], minlength=len(batch.group))


def has_response(batch: Batch) -> Tensor:
    """Return which trajectories have response tokens, bool [R]; a part of a batch keeps the indices of the whole.

    A trajectory whose tokens are all rejected still has a reward, which counts in its group: the turn ends stay."""
    responses = batch.loss_mask | batch.turn_end
    return torch.bincount(batch.token_trajectory[responses], minlength=len(batch.group)) > 0
