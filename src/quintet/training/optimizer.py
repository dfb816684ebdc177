"""Optimizers and their schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from quintet.config.native import OptimizerConfig
from quintet.errors import ConfigError

__all__ = ["learning_rate", "make_optimizer"]


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """Learning rate of step 1 … total: linear warm-up, then the schedule down to its floor.

    Cosine as in verl, `cycles` waves of it; `inverse_square_root` and `wsd` (warm-up, stable, decay) as in
    Megatron's `OptimizerParamScheduler`.
    """
    peak, end = config.learning_rate, config.decay_steps or total
    warmup = config.warmup_steps or int(config.warmup_ratio * total)
    if step <= warmup:
        return config.warmup_start + (peak - config.warmup_start) * step / warmup
    floor = config.min_learning_rate_ratio
    if config.schedule == "inverse_square_root":
        return max(floor * peak, peak * math.sqrt(max(warmup, 1) / step))
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    return peak * (floor + (1.0 - floor) * _left(config, progress, step, end))


def _left(config: OptimizerConfig, progress: float, step: int, end: int) -> float:
    """Share of the way from the floor to the peak that is left."""
    if config.schedule == "wsd":
        steps = config.stable_decay_steps or max(1, end // 10)
        return _decayed(config.stable_decay, min(1.0, max(0.0, (step - (end - steps)) / steps)))
    if config.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(2.0 * math.pi * config.cycles * progress))
    return 1.0 - progress if config.schedule == "linear" else 1.0


def _decayed(kind: str, progress: float) -> float:
    """Of a stable schedule's end, from 1 to 0."""
    return {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "exponential": 2.0 * math.pow(0.5, progress) - 1.0,
        "minus_sqrt": 1.0 - math.sqrt(progress),
    }[kind]


def make_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW in its fused form, one kernel for all tensors; or plain stochastic gradient descent, without momentum,
    whose weight decay is a term of the gradient. Parameters that need no gradient are left alone.

    Raises:
        ConfigError: an optimizer that isn't there yet.
    """
    held = [parameter for parameter in parameters if parameter.requires_grad]
    if config.kind == "sgd":
        return torch.optim.SGD(held, lr=config.learning_rate, weight_decay=config.weight_decay)
    if config.kind != "adamw":
        raise ConfigError(
            f"the optimizer {config.kind!r} isn't there yet",
            key="optimizer.kind",
            value=config.kind,
            hint="take adamw or sgd",
        )
    return torch.optim.AdamW(
        held,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )
