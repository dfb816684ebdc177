"""How token losses become one number.

The weights are computed over a whole mini-batch, then every micro-batch only adds up
`weight * loss`: the gradient doesn't depend on how the mini-batch was cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quintet.config.native import AlgorithmConfig

__all__ = ["Aggregation", "token_weights"]


def token_weights(
    mode: str, mask: Tensor, trajectory: Tensor, scale: float | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Weight of each token in the loss, [N]; 0 outside `mask`.

    With M own tokens, B trajectories of which trajectory i has m_i own tokens:

    - `token-mean`: 1 / M (DAPO, arXiv:2503.14476)
    - `seq-mean-token-sum`: 1 / B
    - `seq-mean-token-mean`: 1 / (B m_i) (GRPO, arXiv:2402.03300)
    - `seq-mean-token-sum-norm`: 1 / (B scale) (Dr. GRPO, arXiv:2503.20783), `scale` in tokens

    Trajectories without own tokens don't count in B. `mask` bool [N], `trajectory` int64 [N].

    Raises:
        ValueError: unknown mode, or one that wants a scale and has none.
    """
    _, member = torch.unique(trajectory, return_inverse=True)
    own = torch.bincount(member, weights=mask.double(), minlength=int(member.max()) + 1 if len(member) else 0)
    trajectories = (own > 0).sum().clamp(min=1)
    counted = mask.double()
    if mode == "token-mean":
        weights = counted / mask.sum().clamp(min=1)
    elif mode == "seq-mean-token-sum":
        weights = counted / trajectories
    elif mode == "seq-mean-token-mean":
        weights = counted / (trajectories * own.clamp(min=1)[member])
    elif mode == "seq-mean-token-sum-norm":
        if scale is None:
            raise ValueError(f"{mode} needs a scale, in tokens")
        weights = counted / (trajectories * scale)
    else:
        raise ValueError(f"unknown aggregation {mode!r}")
    return weights.to(dtype)


@dataclass(frozen=True, slots=True)
class Aggregation:
    """An aggregation with all that it depends on.

    >>> Aggregation("seq-mean-token-sum-norm", scale=1024).exact
    True
    """

    mode: str = "token-mean"
    """See `token_weights`."""
    scale: float | None = None
    """Tokens by which `seq-mean-token-sum-norm` divides."""
    micro_batch_weights: Literal["exact", "equal", "tokens"] = "exact"
    """`exact` is over the whole mini-batch. With the others each micro-batch is aggregated by itself, and the results
    averaged, alike (`equal`: verl before 0.5 and RLinf) or by their share of the own tokens (`tokens`: RLinf with
    `use_valid_token_scale`); both depend on how the mini-batch was cut, but for `tokens` of a `token-mean`."""

    @classmethod
    def of(cls, config: AlgorithmConfig, longest: int) -> Aggregation:
        """As configured; `longest` is the most tokens that a game can have."""
        return cls(config.aggregation, config.aggregation_scale or float(longest), config.micro_batch_weights)

    @property
    def exact(self) -> bool:
        """Whether the result is independent of micro-batches."""
        return self.micro_batch_weights == "exact"

    def weights(
        self, mask: Tensor, trajectory: Tensor, part: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Weight of each token, [N]. `part` int64 [N] is the number of each token's micro-batch, from 0; what
        isn't exact needs it.

        Raises:
            ValueError: see `token_weights`; or there is no `part`.
        """
        if self.exact:
            return token_weights(self.mode, mask, trajectory, self.scale, dtype)
        if part is None:
            raise ValueError(f"weights by {self.micro_batch_weights} need the micro-batches")
        weights = torch.zeros(len(mask), dtype=dtype)
        parts = torch.unique(part[mask]).tolist()
        for number in parts:
            inside = mask & (part == number)
            share = 1.0 / len(parts) if self.micro_batch_weights == "equal" else float(inside.sum() / mask.sum())
            weights += share * token_weights(self.mode, inside, trajectory, self.scale, dtype)
        return weights
