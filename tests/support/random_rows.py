"""Random padded rows of responses, the same for verl's functions in `scripts/make_random_golden.py` and for ours."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

NUM_BATCHES = 240
"""Every third batch has rewards of eighths, so that totals tie; every second one rejected tokens."""


def random_rows(seed: int) -> dict[str, Tensor]:
    """Return the inputs of estimators, float64 [rows, width] or [rows].

    `responses` are response tokens, with observations between them; `mask` are those of them that are not rejected,
    which may be none of a row or of a group, and without the first three in some rows. Groups have two to four rows.
    """
    draw = np.random.Generator(np.random.PCG64(seed))
    groups = np.repeat(np.arange(3), draw.integers(2, 5, 3))
    shape = (len(groups), int(draw.integers(3, 15)))
    responses = draw.random(shape) < 0.8
    responses[:, 0] = True
    rejected = draw.random(shape) < 0.3
    rejected[:, :3] |= draw.random((shape[0], 1)) < 0.3
    rejected |= (groups == 0)[:, None] & (seed % 8 == 7)
    mask = responses & ~rejected if seed % 2 else responses
    rewards = draw.integers(-4, 9, shape) / 8 if seed % 3 == 0 else draw.normal(0.3, 1.0, shape)
    rewards = rewards * responses * (draw.random(shape) < 0.5)
    rows = {
        "responses": responses,
        "mask": mask,
        "group": groups,
        "pairs": groups,
        "rewards": rewards,
        "values": draw.normal(0.0, 1.0, shape),
        "old_log_probs": -draw.exponential(0.7, shape) - 1e-3,
        "squared_mass": draw.uniform(0.1, 0.9, shape),
        "weights": draw.uniform(0.3, 2.0, shape),
        "baseline": draw.normal(0.3, 0.5, shape[0]),
        "part_right": draw.integers(0, 9, shape[0]) / 8,
        "part_form": draw.integers(0, 5, shape[0]) / 4,
    }
    tensors = {name: torch.from_numpy(values) for name, values in rows.items()}
    return {name: values if name in ("group", "pairs") else values.double() for name, values in tensors.items()}


def projected(rows: Tensor, mask: Tensor) -> float:
    """Return one number for the values within the mask, [rows, width], that depends on each of them."""
    values = (rows * mask)[mask.bool()].double()
    return float((values * torch.sin(torch.arange(1.0, len(values) + 1.0, dtype=torch.float64))).sum())
