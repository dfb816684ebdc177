"""How far a policy is from its reference, token by token, and what that costs.

All tensors [M], log-probs in nats of the tokens that were sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.config.native import KlConfig

__all__ = ["KlControl", "kl_estimate", "penalised"]


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(policy ‖ reference) at each token; Schulman, "Approximating KL divergence" (2020).

    With x = logp - ref: `k1` x, `abs` |x|, `k2` x²/2, `k3` exp(-x) - 1 + x with x held within ±20 and
    the value within ±10, as verl has it. `k1`, `abs` and `k3` are means of zero gradient or of a
    gradient other than the divergence's; with a `+` behind them they keep their value and take the
    gradient of `k2`, which is that of the divergence under the sampled tokens.

    Raises:
        ValueError: unknown estimator.
    """
    plain = _estimate(logprobs, reference, estimator.removesuffix("+"))
    if not estimator.endswith("+"):
        return plain
    true_gradient = _estimate(logprobs, reference, "k2")
    return true_gradient - true_gradient.detach() + plain.detach()


def _estimate(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    x = logprobs - reference
    if estimator == "k1":
        return x
    if estimator == "abs":
        return x.abs()
    if estimator == "k2":
        return 0.5 * x.square()
    if estimator == "k3":
        y = (-x).clamp(-20.0, 20.0)
        return (y.exp() - y - 1.0).clamp(-10.0, 10.0)
    raise ValueError(f"unknown estimator {estimator!r}")


@dataclass(slots=True)
class KlControl:
    """The coefficient of the KL term: fixed, or steered towards a target."""

    config: KlConfig
    coefficient: float

    @classmethod
    def of(cls, config: KlConfig) -> KlControl:
        """At its configured start."""
        return cls(config, config.coefficient)

    def observe(self, kl: float, samples: int) -> None:
        """Steer by the mean KL of `samples` sequences, where there is a target.

        β ← β (1 + clip(KL / target - 1, ±0.2) samples / horizon), Ziegler et al. 2019 (arXiv:1909.08593).
        """
        if self.config.target is not None:
            error = min(max(kl / self.config.target - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * samples / self.config.horizon


def penalised(rewards: Tensor, logprobs: Tensor, reference: Tensor, mask: Tensor, control: KlControl) -> Tensor:
    """Rewards [N] less the coefficient times the KL of each token under `mask`, bool [N]."""
    kl = kl_estimate(logprobs, reference, control.config.estimator)
    return rewards - control.coefficient * torch.where(mask, kl, 0.0)
