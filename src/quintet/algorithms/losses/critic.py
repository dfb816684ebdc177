"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.losses.targets import ValueLoss

__all__ = ["value_clip"]


def value_clip(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueLoss:
    """Half the squared error of the critic, the worse of free and clipped, all tensors [M].

    L = ½ max((V - R)², (clip(V, V_old ± clip) - R)²), as in the PPO reference code and verl.
    """
    free = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * free, torch.zeros_like(free, dtype=torch.bool))
    near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    held = (near - returns).square()
    return ValueLoss(0.5 * torch.maximum(free, held), held > free)
