"""Schedules of learning rate and weight decay."""

from __future__ import annotations

import math

from quintet.config.native.learners import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """Return the learning rate of step 1 … total: linear warm-up, then decay to `min_learning_rate_ratio`.

    Cosine with `cycles` waves as in verl; `inverse_square_root` and `wsd` (warm-up, stable, decay) as in
    Megatron's `OptimizerParamScheduler`.
    """
    peak, end = config.learning_rate, config.decay_steps or total
    warmup = config.warmup_steps or int(config.warmup_ratio * total)
    if step <= warmup:
        return config.warmup_start + (peak - config.warmup_start) * step / warmup
    floor = config.min_learning_rate_ratio
    if config.schedule == "inverse_square_root":
        return max(floor * peak, peak * math.sqrt(max(warmup, 1) / step)) if step <= end else floor * peak
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    return peak * (floor + (1.0 - floor) * _decay_factor(config, progress, step, end))


def resolve_schedule(config: OptimizerConfig, total: int) -> OptimizerConfig:
    """Return the schedule with warm-up and decay in steps, independent of the total number of steps."""
    warmup = config.warmup_steps or int(config.warmup_ratio * total)
    update = {"decay_steps": config.decay_steps or total, "warmup_steps": warmup, "warmup_ratio": 0.0}
    return config.model_copy(update=update)


def _decay_factor(config: OptimizerConfig, progress: float, step: int, end: int) -> float:
    """Return the position between floor (0) and peak (1)."""
    if config.schedule == "wsd":
        steps = config.stable_decay_steps or max(1, end // 10)
        return _wsd_decay_factor(config.stable_decay, min(1.0, max(0.0, (step - (end - steps)) / steps)))
    if config.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(2.0 * math.pi * config.cycles * progress))
    return 1.0 - progress if config.schedule == "linear" else 1.0


def _wsd_decay_factor(kind: str, progress: float) -> float:
    """Return the factor, from 1 to 0, in the decay phase of `wsd` (warm-up, stable, decay)."""
    return {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
        "exponential": 2.0 * math.pow(0.5, progress) - 1.0,
        "minus_sqrt": 1.0 - math.sqrt(progress),
    }[kind]


def weight_decay(config: OptimizerConfig, step: int, total: int) -> float:
    """Return the weight decay of step 1 … total: from `weight_decay_start`, if set, to `weight_decay`, as in Megatron's
    `OptimizerParamScheduler`."""
    end = config.weight_decay
    if config.weight_decay_start is None or config.weight_decay_schedule == "constant":
        return end
    progress = min(1.0, step / max(1, total))
    if config.weight_decay_schedule == "cosine":
        progress = 0.5 * (1.0 + math.cos(math.pi * (1.0 - progress)))
    return config.weight_decay_start + (end - config.weight_decay_start) * progress
