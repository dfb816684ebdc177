"""Computation for the trajectories of each domain of prompts by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from quintet.records import Batch
from quintet.training.packing import select_trajectories

COMPUTED = ("loss_mask", "rewards", "advantages", "returns")
"""Fields that a computation of rewards or advantages changes, one number per token."""


def map_domains(batch: Batch, compute: Callable[[Batch], Batch]) -> Batch:
    """Return the batch with the results of `compute` for the trajectories of each domain; without domains, for all
    trajectories.

    Statistics over a batch, such as those of whitening, are then of a domain, as in ROLL.
    """
    if batch.domain is None:
        return compute(batch)
    token_domain = batch.domain[batch.token_trajectory]
    columns: dict[str, Any] = {}
    for domain in torch.unique(token_domain).tolist():
        part = compute(select_trajectories(batch, batch.domain == domain))
        for name in COMPUTED:
            values = getattr(part, name)
            if values is not None:
                columns.setdefault(name, values.new_zeros(len(batch.tokens)))[token_domain == domain] = values
    return replace(batch, **columns)
