"""Moving between packed tokens and one row per trajectory, and statistics over a mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Rows", "last_tokens", "masked_mean", "whiten"]


@dataclass(frozen=True, slots=True)
class Rows:
    """The policy's own tokens of each trajectory as a row: what the world said is left out.

    Recursions over time then run over columns, for all trajectories at once.
    """

    index: Tensor
    """int64 [R, T], position of each own token in the packed array; 0 where `valid` is false."""
    valid: Tensor
    """bool [R, T], filled from the left."""

    @classmethod
    def of(cls, mask: Tensor, trajectory: Tensor, count: int | None = None) -> Rows:
        """`mask` bool [N], `trajectory` int64 [N] ascending; `count` rows, or up to the highest number there is."""
        own = mask.nonzero().squeeze(-1)
        rows = count if count is not None else int(trajectory.max()) + 1 if trajectory.numel() else 0
        owner = trajectory[own]
        counts = torch.bincount(owner, minlength=rows)
        width = int(counts.max()) if rows else 0
        column = torch.arange(len(own)) - (counts.cumsum(0) - counts)[owner]
        index = torch.zeros(rows, width, dtype=torch.long)
        index[owner, column] = own
        return cls(index, torch.arange(width) < counts[:, None])

    def gather(self, packed: Tensor) -> Tensor:
        """[N] to [R, T], 0 where there is no token."""
        return packed[self.index] * self.valid

    def scatter(self, rows: Tensor, size: int) -> Tensor:
        """[R, T] to [size], 0 where the mask was false."""
        packed = rows.new_zeros(size)
        packed[self.index[self.valid]] = rows[self.valid]
        return packed


def last_tokens(mask: Tensor, trajectory: Tensor) -> Tensor:
    """The last token under `mask` of each trajectory, bool [N]; `trajectory` int64 [N] ascending."""
    own = mask.nonzero().squeeze(-1)
    owner = trajectory[own]
    ends = torch.ones_like(own, dtype=torch.bool)
    ends[:-1] = owner[1:] != owner[:-1]
    found = torch.zeros_like(mask, dtype=torch.bool)
    found[own[ends]] = True
    return found


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` where `mask` is true; 0 over nothing."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def whiten(values: Tensor, mask: Tensor, over: Tensor | None = None) -> Tensor:
    """Mean 0 and deviation 1 (unbiased) over the mask, 0 outside it.

    As in verl's `masked_whiten`: (x - mean) * rsqrt(var + 1e-8). The mean and variance are those of the tokens
    under `over`, bool [N], which is the mask itself where it isn't given. Fewer than two of those leave values
    as they are, where verl raises.
    """
    counted = mask if over is None else over
    count = counted.sum()
    if count < 2:
        return values * mask
    mean = masked_mean(values, counted)
    variance = ((values - mean).square() * counted).sum() / (count - 1)
    return (values - mean) * torch.rsqrt(variance + 1e-8) * mask
