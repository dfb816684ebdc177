"""Loss of the critic."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.losses.targets import ValueLoss


def value_clip(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> ValueLoss:
    """Half the squared error of the critic, the maximum of unclipped and clipped, all tensors [M].

    L = ½ max((V - R)², (clip(V, V_old ± clip) - R)²), as in the PPO reference code and verl.
    """
    unclipped = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * unclipped, torch.zeros_like(unclipped, dtype=torch.bool))
    clipped_values = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    clipped = (clipped_values - returns).square()
    return ValueLoss(0.5 * torch.maximum(unclipped, clipped), clipped > unclipped)
