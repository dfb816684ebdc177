"""Probability ratios, and means over sequences; what several losses are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.losses.targets import PolicyTargets

__all__ = ["bounded_log_ratio", "nothing_clipped", "sequence_mean"]


def bounded_log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """log(new / old) [M], held within ±20 so that its exponential stays finite."""
    return (logprobs - old_logprobs).clamp(-20.0, 20.0)


def nothing_clipped(values: Tensor) -> Tensor:
    """False [M]."""
    return torch.zeros_like(values, dtype=torch.bool)


def sequence_mean(values: Tensor, targets: PolicyTargets) -> Tensor:
    """At each token the mean over its sequence, [M].

    Raises:
        ValueError: the targets don't say what belongs to which sequence.
    """
    if targets.sequence is None:
        raise ValueError("this loss needs targets with `sequence`")
    _, member, count = torch.unique(targets.sequence, return_inverse=True, return_counts=True)
    means: Tensor = values.new_zeros(len(count)).index_add(0, member, values) / count
    return means[member]
