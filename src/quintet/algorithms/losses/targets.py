"""What a loss is told of each token, and what it says of it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from torch import Tensor

__all__ = ["PolicyLoss", "PolicyTargets", "ValueLoss"]


class PolicyLoss(NamedTuple):
    """`loss` [M], and what the metrics want of each token: `clipped`, `clipped_lower` bool [M],
    `kl` [M] (old against new, first order)."""

    loss: Tensor
    clipped: Tensor
    clipped_lower: Tensor
    kl: Tensor


class ValueLoss(NamedTuple):
    """`loss` [M], `clipped` bool [M]."""

    loss: Tensor
    clipped: Tensor


@dataclass(frozen=True, slots=True)
class PolicyTargets:
    """What is known of each predicted token before the pass, all [M]; log-probs in nats."""

    weights: Tensor
    """Of the policy's loss, from the whole mini-batch (`aggregation.Aggregation.weights`)."""
    old_logprobs: Tensor
    """Of the policy before the step's updates."""
    advantages: Tensor
    ref_logprobs: Tensor | None = None
    """Of the reference or teacher."""
    rollout_logprobs: Tensor | None = None
    """As the engine sampled; None where the engine's are `old_logprobs`."""
    correction: Tensor | None = None
    """Importance weights of the engine-learner gap, constants; None weighs nothing."""
    sequence: Tensor | None = None
    """int64, the sequence of the mini-batch that a token belongs to; a pass holds sequences whole."""
    selected: Tensor | None = None
    """bool, what `Loss.select` chose."""
    divergence: Tensor | None = None
    """The divergence from the reference over the whole vocabulary, with gradients, where the objective wants it."""
    term_weights: Tensor | None = None
    """Of entropy and divergence; None takes `weights`. They differ where a loss has an aggregation of its own or
    leaves tokens out."""
    shares: Tensor | None = None
    """1 / all own tokens of the mini-batch, for metrics that are means over tokens; None takes `weights`."""

    def at(self, index: Tensor) -> PolicyTargets:
        """Those of some tokens, `index` int64 [m]."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return PolicyTargets(**{name: value[index] for name, value in given.items() if value is not None})
