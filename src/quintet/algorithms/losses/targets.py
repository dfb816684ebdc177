"""Inputs and outputs of policy losses per token, and the type of a registered loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PolicyLoss(NamedTuple):
    """Per token, all [M]: `loss`; for metrics bool `clipped`, `clipped_lower`, and `kl` (first-order estimate of
    KL(old || new))."""

    loss: Tensor
    clipped: Tensor
    clipped_lower: Tensor
    kl: Tensor


class ValueLoss(NamedTuple):
    """`loss` [M], `clipped` bool [M]."""

    loss: Tensor
    clipped: Tensor


@dataclass(frozen=True, slots=True)
class PolicyLossInputs:
    """Constants of each predicted token in a forward-backward pass, all [M]; log-probs in nats."""

    weights: Tensor
    """Weights of the policy loss over the whole mini-batch (`aggregation.Aggregation.weights`)."""
    old_logprobs: Tensor
    """Log-probs of the policy before the updates of the step."""
    advantages: Tensor
    ref_logprobs: Tensor | None = None
    """Log-probs of the reference or teacher."""
    rollout_logprobs: Tensor | None = None
    """Log-probs of the engine at sampling; None if these are `old_logprobs`."""
    correction: Tensor | None = None
    """Importance weights for the rollout–learner log-prob gap; None for none."""
    sequence: Tensor | None = None
    """int64, index of the token's sequence in the mini-batch; micro-batches do not split sequences."""
    selected: Tensor | None = None
    """bool, result of `Loss.select`."""
    divergence: Tensor | None = None
    """KL divergence from the reference over the whole vocabulary, with gradients, for the estimator `full`."""
    regularizer_weights: Tensor | None = None
    """Weights of entropy and divergence; None takes `weights`. They differ if the loss replaces the aggregation or
    masks tokens."""
    metric_weights: Tensor | None = None
    """1 / number of response tokens of the mini-batch, for metrics that are means over tokens; None takes `weights`."""

    def at(self, index: Tensor) -> PolicyLossInputs:
        """Select tokens by `index`, int64 [m]."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return PolicyLossInputs(**{name: value[index] for name, value in values.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss function with its properties; called like the function. A plain function is enough for most losses.

    >>> from quintet.algorithms.losses.clipping import gmpo
    >>> gmpo.aggregation
    'seq-mean-token-mean'
    """

    function: Callable[[Tensor, PolicyLossInputs, Any], PolicyLoss]
    """`(logprobs [M], targets, config) -> PolicyLoss`, on the tokens of one micro-batch."""
    aggregation: str | None = None
    """Aggregation of the loss that replaces `algorithm.aggregation`; entropy and divergence keep the latter."""
    mask: Callable[[PolicyLossInputs, Any], Tensor] | None = None
    """`(targets, config) -> bool [M]` over the whole mini-batch: tokens with a loss; None takes all."""
    select: Callable[[Tensor, PolicyLossInputs, Any, torch.Generator], Tensor] | None = None
    """`(logprobs, targets, config, generator) -> bool [M]` over the whole mini-batch, for `PolicyLossInputs.selected`;
    costs a forward-only pass."""
    applies_correction: bool = False
    """The function applies `PolicyLossInputs.correction`; otherwise its loss is multiplied by it."""

    def __call__(self, logprobs: Tensor, targets: PolicyLossInputs, config: Any) -> PolicyLoss:
        return self.function(logprobs, targets, config)


def policy_loss(**properties: Any) -> Callable[[Callable[..., PolicyLoss]], Loss]:
    """Make a `Loss` with these properties of the decorated function."""
    return lambda function: Loss(function, **properties)
