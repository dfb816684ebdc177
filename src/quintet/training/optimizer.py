"""AdamW and its schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from quintet.config.native import OptimizerConfig

__all__ = ["learning_rate", "make_optimizer"]


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """Learning rate of step 1 … total: linear warm-up, then the schedule down to its floor."""
    warmup = config.warmup_steps or int(config.warmup_ratio * total)
    if step <= warmup:
        return config.learning_rate * step / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    left = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.schedule]
    floor = config.min_learning_rate_ratio
    return config.learning_rate * (floor + (1.0 - floor) * left)


def make_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """AdamW in its fused form: one kernel for all tensors."""
    return torch.optim.AdamW(
        list(parameters),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )
