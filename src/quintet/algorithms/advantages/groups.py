"""Trajectories compared with others: who is compared with whom, and by which mean and deviation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.records import Batch

__all__ = ["Groups", "group_statistics", "own_tokens", "played", "trajectory_rewards"]


@dataclass(frozen=True, slots=True)
class Groups:
    """Members of groups, each of any size; of what isn't `counted`, nothing enters a mean.

    >>> groups = Groups.of(torch.tensor([7, 7, 9]))
    >>> groups.mean(torch.tensor([1.0, 3.0, 5.0]))
    tensor([2., 2., 5.])
    """

    member: Tensor
    """int64 [R], number of each member's group, from 0."""
    counted: Tensor
    """bool [R]."""
    size: Tensor
    """int64 [G], counted members of each group."""

    @classmethod
    def of(cls, group: Tensor, counted: Tensor | None = None) -> Groups:
        """`group` int64 [R], any numbers; `counted` bool [R], null counts all."""
        names, member = torch.unique(group, return_inverse=True)
        counted = torch.ones_like(member, dtype=torch.bool) if counted is None else counted
        return cls(member, counted, torch.bincount(member[counted], minlength=len(names)))

    @property
    def alone(self) -> Tensor:
        """Who has nobody to be compared with, bool [R]."""
        return (self.size <= 1)[self.member]

    def total(self, values: Tensor) -> Tensor:
        """Sum over each group, [G]."""
        empty = values.new_zeros(len(self.size))
        return empty.index_add(0, self.member[self.counted], values[self.counted])

    def mean(self, values: Tensor) -> Tensor:
        """Mean of each member's group, [R]."""
        return (self.total(values) / self.size.clamp(min=1))[self.member]

    def deviation(self, values: Tensor) -> Tensor:
        """Unbiased deviation of each member's group, [R]; 0 where it has fewer than two."""
        squares = self.total((values - self.mean(values)).square())
        return (squares / (self.size - 1).clamp(min=1)).sqrt()[self.member]

    def differ(self, values: Tensor) -> Tensor:
        """Whether a group's values aren't all the same, bool [R]. Exact, where a deviation has rounding in it."""
        kept, member = values[self.counted], self.member[self.counted]
        start = values.new_full((len(self.size),), torch.inf)
        lowest = start.scatter_reduce(0, member, kept, "amin")
        highest = (-start).scatter_reduce(0, member, kept, "amax")
        return (highest > lowest)[self.member]

    def normalized(self, values: Tensor, *, by_deviation: bool) -> Tensor:
        """(x - mean) / (deviation + 1e-6) or x - mean, [R]; who is alone keeps its value, as verl defines it.

        Values that are all the same give 0, not their mean's rounding over 1e-6."""
        lead = values - self.mean(values).masked_fill(self.alone, 0.0)
        lead = torch.where(self.differ(values) | self.alone, lead, 0.0)
        if not by_deviation:
            return lead
        return lead / (self.deviation(values).masked_fill(self.alone, 1.0) + 1e-6)


def trajectory_rewards(batch: Batch) -> Tensor:
    """Sum of the rewards of each trajectory, [R]."""
    return batch.rewards.new_zeros(len(batch.group)).index_add(0, batch.token_trajectory, batch.rewards)


def own_tokens(batch: Batch) -> Tensor:
    """The policy's own tokens of each trajectory, int64 [R]."""
    return torch.bincount(batch.token_trajectory[batch.loss_mask], minlength=len(batch.group))


def played(batch: Batch) -> Tensor:
    """Trajectories that the batch has own tokens of, bool [R]: a part of a batch keeps the numbers of all."""
    return own_tokens(batch) > 0


def group_statistics(scores: Tensor, group: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and unbiased deviation of each trajectory's group, both [R].

    A group of one has mean 0 and deviation 1, as verl defines it: its score is its advantage. What isn't `counted`,
    bool [R], doesn't enter; null counts all.
    """
    groups = Groups.of(group, counted)
    mean = groups.mean(scores).masked_fill(groups.alone, 0.0)
    return mean, groups.deviation(scores).masked_fill(groups.alone, 1.0)
