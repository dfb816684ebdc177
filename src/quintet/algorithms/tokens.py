"""Conversion between packed tokens and one row per trajectory, and masked statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Response tokens of each trajectory as a row, without observations.

    Recursions over time run over the columns, for all trajectories at once.
    """

    index: Tensor
    """int64 [R, T], index of each response token in the packed array; 0 where `valid` is false."""
    valid: Tensor
    """bool [R, T], filled from the left."""

    @classmethod
    def from_mask(cls, mask: Tensor, trajectory: Tensor, count: int | None = None) -> TokenRows:
        """Build rows from `mask` bool [N] and `trajectory` int64 [N], ascending.

        Args:
            count: number of rows; None for the highest trajectory number + 1.
        """
        token_index = mask.nonzero().squeeze(-1)
        rows = count if count is not None else int(trajectory.max()) + 1 if trajectory.numel() else 0
        owner = trajectory[token_index]
        counts = torch.bincount(owner, minlength=rows)
        width = int(counts.max()) if rows else 0
        column = torch.arange(len(token_index)) - (counts.cumsum(0) - counts)[owner]
        index = torch.zeros(rows, width, dtype=torch.long)
        index[owner, column] = token_index
        return cls(index, torch.arange(width) < counts[:, None])

    def gather(self, packed: Tensor) -> Tensor:
        """Convert [N] to [R, T], 0 without a token."""
        return packed[self.index] * self.valid

    def scatter(self, rows: Tensor, size: int) -> Tensor:
        """Convert [R, T] to [size], 0 outside the mask."""
        packed = rows.new_zeros(size)
        packed[self.index[self.valid]] = rows[self.valid]
        return packed


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """Return G_t = r_t + gamma G_{t+1} over the columns of left-aligned rows, [R, T]."""
    returns = torch.zeros_like(rewards)
    carry = rewards.new_zeros(len(rewards))
    for t in range(rewards.shape[1] - 1, -1, -1):
        carry = rewards[:, t] + gamma * carry
        returns[:, t] = carry
    return returns


def last_tokens(mask: Tensor, trajectory: Tensor) -> Tensor:
    """Return the last token of each trajectory within the mask, bool [N]; `trajectory` int64 [N], ascending."""
    token_index = mask.nonzero().squeeze(-1)
    owner = trajectory[token_index]
    ends = torch.ones_like(token_index, dtype=torch.bool)
    ends[:-1] = owner[1:] != owner[:-1]
    is_last = torch.zeros_like(mask, dtype=torch.bool)
    is_last[token_index[ends]] = True
    return is_last


def whiten(values: Tensor, mask: Tensor, over: Tensor | None = None) -> Tensor:
    """Normalize to mean 0 and unbiased standard deviation 1 within the mask; 0 outside.

    As verl's `masked_whiten`: (x - mean) * rsqrt(var + 1e-8). Mean and variance are over `over`, bool [N], by default
    the mask. With fewer than two tokens values are unchanged, where verl raises. Equal values give exactly 0, not the
    rounding error of their mean times 1e4. Squares are in float64: in float32, those of 1e20 are infinite.
    """
    over = mask if over is None else over
    count = over.sum()
    if count < 2:
        return values * mask
    selected = values[over]
    selected = selected.double()
    mean = selected[0] if bool((selected == selected[0]).all()) else selected.mean()
    centered = values.double() - mean
    variance = centered[over].square().sum() / (count - 1)
    return (centered * torch.rsqrt(variance + 1e-8)).to(values.dtype) * mask
