"""Loss of the critic."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.losses.targets import ValueLoss


def value_clip(
    values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None, huber_delta: float | None = None
) -> ValueLoss:
    """Half the squared error of the critic, the maximum of unclipped and clipped, all tensors [M].

    L = max(h(V - R), h(clip(V, V_old ± clip) - R)) with h(e) = ½ e², as in the PPO reference code and verl; with
    `huber_delta` d, h(e) = d (|e| - ½ d) for |e| ≥ d (Huber 1964), as in RLinf.
    """
    error = values - returns
    if clip is None:
        return ValueLoss(_half_square(error, huber_delta), torch.zeros_like(error, dtype=torch.bool))
    clipped_error = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip) - returns
    plain, clipped = _half_square(error, huber_delta), _half_square(clipped_error, huber_delta)
    return ValueLoss(torch.maximum(plain, clipped), clipped > plain)


def _half_square(error: Tensor, delta: float | None) -> Tensor:
    """Return ½ e², linear where |e| is at least `delta`."""
    square = 0.5 * error.square()
    return square if delta is None else torch.where(error.abs() < delta, square, delta * (error.abs() - 0.5 * delta))
