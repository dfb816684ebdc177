"""Dynamic loss scaling, which prevents underflow of float16 gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from quintet.config.native.learners import ShardingConfig

START, GROWTH_STEPS = 65536.0, 2000
"""Defaults of torch's GradScaler."""


class LossScale:
    """A loss factor that halves when a gradient overflows and doubles after `growth_steps` steps without overflow
    (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2). Overflow is detected by the gradient norm over all
    ranks, so that the ranks agree."""

    def __init__(self, start: float | None = None, growth_steps: int | None = None) -> None:
        self.factor = START if start is None else start
        self._growth_steps = growth_steps or GROWTH_STEPS
        self._good_steps = 0

    @classmethod
    def from_config(cls, config: ShardingConfig) -> LossScale | None:
        """Return the configured loss scale; None if losses are not scaled."""
        return cls(config.grad_scaler_start, config.grad_scaler_growth_steps) if config.grad_scaler else None

    @torch.no_grad()
    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by the factor."""
        if grads := [p.grad for p in parameters if p.grad is not None]:
            torch._foreach_mul_(grads, 1.0 / self.factor)

    def update(self, *, finite: bool) -> None:
        """Adapt the factor after a step; `finite` is False if it was skipped because of an overflow."""
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.factor /= 2.0
        elif self._good_steps == self._growth_steps:
            self.factor, self._good_steps = self.factor * 2.0, 0

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"factor": self.factor, "good_steps": float(self._good_steps)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load the result of `state_dict`."""
        self.factor, self._good_steps = state["factor"], int(state["good_steps"])
