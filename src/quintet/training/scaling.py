"""Losses scaled up, so that float16 gradients don't vanish."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from quintet.config.native.learners import ShardingConfig

__all__ = ["LossScale"]

START, GROWTH_STEPS = 65536.0, 2000
"""As torch's GradScaler has them."""


class LossScale:
    """A factor that halves where a gradient overflows and doubles after so many steps without (Micikevicius et al.
    2018, arXiv:1710.03740, section 3.2). Whether one did is read off the norm over all ranks, so that all agree."""

    def __init__(self, start: float | None = None, growth_steps: int | None = None) -> None:
        self.factor = START if start is None else start
        self._growth_steps = growth_steps or GROWTH_STEPS
        self._good_steps = 0

    @classmethod
    def of(cls, config: ShardingConfig) -> LossScale | None:
        """As the configuration has it; None where losses aren't scaled."""
        return cls(config.grad_scaler_start, config.grad_scaler_growth_steps) if config.grad_scaler else None

    @torch.no_grad()
    def undo(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients by it."""
        if grads := [p.grad for p in parameters if p.grad is not None]:
            torch._foreach_mul_(grads, 1.0 / self.factor)

    def update(self, *, finite: bool) -> None:
        """After a step that was made, or skipped because its gradient wasn't finite."""
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.factor /= 2.0
        elif self._good_steps == self._growth_steps:
            self.factor, self._good_steps = self.factor * 2.0, 0

    def state(self) -> dict[str, float]:
        """For a checkpoint."""
        return {"factor": self.factor, "good_steps": float(self._good_steps)}

    def load(self, state: dict[str, float]) -> None:
        """Take up what `state` gave."""
        self.factor, self._good_steps = state["factor"], int(state["good_steps"])
