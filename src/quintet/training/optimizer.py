"""Optimizers and their schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from quintet.config.native import OptimizerConfig
from quintet.errors import ConfigError

__all__ = ["MuonAndAdamW", "fixed", "hidden_matrices", "learning_rate", "make_optimizer", "weight_decay"]

HEADS = ("lm_head", "head")
"""What the last layers of policies and critics are called."""


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
        return max(floor * peak, peak * math.sqrt(max(warmup, 1) / step)) if step <= end else floor * peak
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    return peak * (floor + (1.0 - floor) * _left(config, progress, step, end))


def fixed(config: OptimizerConfig, total: int) -> OptimizerConfig:
    """The same schedule, whose course no longer depends on how many steps there are in all."""
    warmup = config.warmup_steps or int(config.warmup_ratio * total)
    changed = {"decay_steps": config.decay_steps or total, "warmup_steps": warmup, "warmup_ratio": 0.0}
    return config.model_copy(update=changed)


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


def weight_decay(config: OptimizerConfig, step: int, total: int) -> float:
    """Weight decay of step 1 … total: from `weight_decay_start` to `weight_decay`, as in Megatron's
    `OptimizerParamScheduler`; the same throughout where it starts with nothing else."""
    end = config.weight_decay
    if config.weight_decay_start is None or config.weight_decay_schedule == "constant":
        return end
    progress = min(1.0, step / max(1, total))
    if config.weight_decay_schedule == "cosine":
        progress = 0.5 * (1.0 + math.cos(math.pi * (1.0 - progress)))
    return config.weight_decay_start + (end - config.weight_decay_start) * progress


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Weights between embedding and head that are matrices: those that Muon is made for."""
    ends = {
        id(parameter)
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding) or name.rpartition(".")[2] in HEADS
        for parameter in part.parameters()
    }
    return [one for one in module.parameters() if one.ndim == 2 and one.requires_grad and id(one) not in ends]


def make_optimizer(
    config: OptimizerConfig, parameters: Iterable[nn.Parameter], matrices: Iterable[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """AdamW in its fused form, one kernel for all tensors; plain stochastic gradient descent, without momentum, whose
    weight decay is a term of the gradient; or Muon for the `matrices` among the parameters and AdamW for the rest.
    Parameters that need no gradient are left alone.

    Raises:
        ConfigError: there is no matrix for Muon.
    """
    held = [parameter for parameter in parameters if parameter.requires_grad]
    if config.kind == "sgd":
        return torch.optim.SGD(held, lr=config.learning_rate, weight_decay=config.weight_decay)
    if config.kind == "adamw":
        return _adamw(config, held)
    own = {id(parameter) for parameter in held}
    chosen = [one for one in matrices if id(one) in own and one.ndim == 2]
    if not chosen:
        raise ConfigError(
            "optimizer.kind = muon: it steps on matrices, and here every rank has but pieces of flat tensors",
            key="optimizer.kind",
            value="muon",
            hint="take backend=fsdp2, or adamw",
        )
    return MuonAndAdamW(config, chosen, held)


def _adamw(config: OptimizerConfig, parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) on some matrices, AdamW on everything else, under one learning rate: Muon's updates
    are scaled to the root mean square of AdamW's, 0.2 √max(rows, columns) (Liu et al. 2025, arXiv:2502.16982)."""

    def __init__(self, config: OptimizerConfig, matrices: list[nn.Parameter], parameters: list[nn.Parameter]) -> None:
        """`matrices` are among the `parameters`."""
        chosen = {id(one) for one in matrices}
        rest = [one for one in parameters if id(one) not in chosen]
        muon = torch.optim.Muon(
            matrices,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        self._parts: list[torch.optim.Optimizer] = [muon, *([_adamw(config, rest)] if rest else [])]
        groups = [group for part in self._parts for group in part.param_groups]
        super().__init__([dict(group) for group in groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of both, which see the state and the groups that this one has."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.state, part.param_groups = self.state, [group]
            part.step()
