"""Aggregation of token losses.

Weights are computed over a whole mini-batch; micro-batches only sum `weight * loss`, so that the gradient does not
depend on the split into micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quintet.config.native.algorithm import AlgorithmConfig


def token_weights(
    mode: str, mask: Tensor, trajectory: Tensor, scale: float | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the weight of each token in the loss, [N]; 0 outside `mask`.

    With M response tokens in B trajectories, m_i of them in trajectory i:

    - `token-mean`: 1 / M (DAPO, arXiv:2503.14476)
    - `token-sum`: 1
    - `seq-mean-token-sum`: 1 / B
    - `seq-mean-token-mean`: 1 / (B m_i) (GRPO, arXiv:2402.03300)
    - `seq-mean-token-sum-norm`: 1 / (B scale) (Dr. GRPO, arXiv:2503.20783), `scale` in tokens

    Trajectories without response tokens do not count in B. `mask` bool [N], `trajectory` int64 [N].

    Raises:
        ValueError: the mode is unknown, or needs a scale and has none.
    """
    _, member = torch.unique(trajectory, return_inverse=True)
    lengths = torch.bincount(member, weights=mask.double(), minlength=int(member.max()) + 1 if len(member) else 0)
    num_trajectories = (lengths > 0).sum().clamp(min=1)
    in_mask = mask.double()
    if mode == "token-mean":
        weights = in_mask / mask.sum().clamp(min=1)
    elif mode == "token-sum":
        weights = in_mask
    elif mode == "seq-mean-token-sum":
        weights = in_mask / num_trajectories
    elif mode == "seq-mean-token-mean":
        weights = in_mask / (num_trajectories * lengths.clamp(min=1)[member])
    elif mode == "seq-mean-token-sum-norm":
        if scale is None:
            raise ValueError(f"{mode} needs a scale, in tokens")
        weights = in_mask / (num_trajectories * scale)
    else:
        raise ValueError(f"unknown aggregation {mode!r}")
    return weights.to(dtype)


@dataclass(frozen=True, slots=True)
class Aggregation:
    """Aggregation mode with its parameters.

    >>> Aggregation("seq-mean-token-sum-norm", scale=1024).exact
    True
    """

    mode: str = "token-mean"
    """See `token_weights`."""
    scale: float | None = None
    """Divisor of `seq-mean-token-sum-norm`, tokens."""
    micro_batch_weights: Literal["exact", "equal", "tokens"] = "exact"
    """`exact` aggregates over the whole mini-batch. The others aggregate each micro-batch and average the results
    equally (`equal`: verl before 0.5, RLinf) or by their share of the response tokens (`tokens`: RLinf with
    `use_valid_token_scale`); both depend on the split into micro-batches, except `tokens` with `token-mean`."""

    @classmethod
    def from_config(cls, config: AlgorithmConfig, max_episode_tokens: int) -> Aggregation:
        """Build from the config; `max_episode_tokens` is the default scale."""
        return cls(
            config.aggregation, config.aggregation_scale or float(max_episode_tokens), config.micro_batch_weights
        )

    @property
    def exact(self) -> bool:
        """Whether the result is independent of micro-batches."""
        return self.micro_batch_weights == "exact"

    def weights(
        self, mask: Tensor, trajectory: Tensor, part: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the weight of each token, [N]. `part` int64 [N] is the index of each token's micro-batch, required
        unless `exact`.

        Raises:
            ValueError: see `token_weights`; or `part` is missing.
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
