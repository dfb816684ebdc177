"""KL divergence of a policy from its reference per token, and the reward penalty for it.

All tensors [M]; log-probs, nats, of the sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.config.native.algorithm import KlConfig


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Estimate KL(policy ‖ reference) per token; Schulman, "Approximating KL divergence" (2020).

    With x = logp - ref: `k1` x, `abs` |x|, `k2` x²/2, `k3` exp(-x) - 1 + x with x clamped to ±20 and
    the value to ±10, as in verl. The gradients of `k1`, `abs` and `k3` are zero in expectation or not that of the
    divergence; with a suffix `+`, they keep their value and take the gradient of `k2`, which is that of the divergence
    under the sampled tokens. `full` cannot be computed from the sampled tokens; see `token_divergence`.

    Raises:
        ValueError: unknown estimator.
    """
    plain = _estimate(logprobs, reference, estimator.removesuffix("+"))
    if not estimator.endswith("+"):
        return plain
    k2 = _estimate(logprobs, reference, "k2")
    return k2 - k2.detach() + plain.detach()


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
    """Return the configured divergence per token, [M]: an estimate, or `full`, the sum over the vocabulary from a
    `LogProbScorer`. With `swapped`, policy and reference change places in both.

    Raises:
        ValueError: an input of the estimator is missing.
    """
    if config.estimator == "full":
        if full is None:
            raise ValueError("the full divergence needs the distribution of the reference")
        return full
    if reference is None:
        raise ValueError("the divergence needs the log-probs of the reference")
    if config.swapped:
        return kl_estimate(reference, logprobs, config.estimator)
    return kl_estimate(logprobs, reference, config.estimator)


@dataclass(slots=True)
class KlControl:
    """Coefficient of the KL term, fixed or adapted to a target."""

    config: KlConfig
    coefficient: float

    @classmethod
    def from_config(cls, config: KlConfig) -> KlControl:
        """Start with the configured coefficient."""
        return cls(config, config.coefficient)

    def observe(self, kl: float, samples: int) -> None:
        """Adapt to the mean KL of `samples` sequences, if there is a target.

        β ← β (1 + clip(KL / target - 1, ±0.2) samples / horizon), Ziegler et al. 2019 (arXiv:1909.08593).
        """
        if self.config.target is not None:
            error = min(max(kl / self.config.target - 1.0, -0.2), 0.2)
            self.coefficient *= 1.0 + error * samples / self.config.horizon


def penalize_rewards(
    rewards: Tensor,
    logprobs: Tensor,
    reference: Tensor | None,
    mask: Tensor,
    control: KlControl,
    full: Tensor | None = None,
) -> Tensor:
    """Return rewards [N] minus the coefficient times the divergence of each token in `mask`, bool [N]; see
    `token_divergence`."""
    kl = token_divergence(logprobs, reference, control.config, full)
    return rewards - control.coefficient * torch.where(mask, kl, 0.0)
