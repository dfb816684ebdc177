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
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps))
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
