"""How far a policy is from its reference, token by token, and what that costs.

All tensors [M], log-probs in nats of the tokens that were sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.config.native import KlConfig

__all__ = ["KlControl", "kl_estimate", "penalised", "token_divergence"]


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """An estimate of KL(policy ‖ reference) at each token; Schulman, "Approximating KL divergence" (2020).

    With x = logp - ref: `k1` x, `abs` |x|, `k2` x²/2, `k3` exp(-x) - 1 + x with x held within ±20 and
    the value within ±10, as verl has it. `k1`, `abs` and `k3` are means of zero gradient or of a
    gradient other than the divergence's; with a `+` behind them they keep their value and take the
    gradient of `k2`, which is that of the divergence under the sampled tokens. `full` can't be told from
    the sampled tokens: see `token_divergence`.

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


def token_divergence(logprobs: Tensor, reference: Tensor | None, config: KlConfig, full: Tensor | None) -> Tensor:
    """The divergence at each token as configured, [M]: an estimate, or `full`, the sum over the vocabulary that a
    `Scorer` makes. With `swapped`, policy and reference have changed places in either.

    Raises:
        ValueError: what the estimator needs is missing.
    """
    if config.estimator == "full":
        if full is None:
            raise ValueError("the full divergence is made by a Scorer, from the reference's own distribution")
        return full
    if reference is None:
        raise ValueError("a divergence needs the reference's log-probs")
    if config.swapped:
        return kl_estimate(reference, logprobs, config.estimator)
    return kl_estimate(logprobs, reference, config.estimator)


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


def penalised(
    rewards: Tensor,
    logprobs: Tensor,
    reference: Tensor | None,
    mask: Tensor,
    control: KlControl,
    full: Tensor | None = None,
) -> Tensor:
    """Rewards [N] less the coefficient times the divergence of each token under `mask`, bool [N]; see
    `token_divergence`."""
    kl = token_divergence(logprobs, reference, control.config, full)
    return rewards - control.coefficient * torch.where(mask, kl, 0.0)
