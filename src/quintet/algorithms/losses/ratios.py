"""Probability ratios and means over sequences, shared by several losses."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.losses.targets import PolicyLossInputs


def bounded_log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return log(new / old) [M], clamped to ±20 so that its exponential stays finite."""
    return (logprobs - old_logprobs).clamp(-20.0, 20.0)


def nothing_clipped(values: Tensor) -> Tensor:
    """Return False [M]."""
    return torch.zeros_like(values, dtype=torch.bool)


def sequence_mean(values: Tensor, targets: PolicyLossInputs) -> Tensor:
    """Return the mean over the sequence of each token, [M].

    Raises:
        ValueError: the targets have no `sequence`.
    """
    if targets.sequence is None:
        raise ValueError("this loss needs targets with `sequence`")
    _, member, count = torch.unique(targets.sequence, return_inverse=True, return_counts=True)
    means: Tensor = values.new_zeros(len(count)).index_add(0, member, values) / count
    return means[member]
