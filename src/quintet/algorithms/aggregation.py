"""How token losses become one number.

The weights are computed over a whole mini-batch, then every micro-batch only adds up
`weight * loss`: the gradient doesn't depend on how the mini-batch was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["token_weights"]


def token_weights(mode: str, mask: Tensor, trajectory: Tensor) -> Tensor:
    """Weight of each token in the loss, float32 [N]; 0 outside `mask`.

    With M own tokens, B trajectories of which trajectory i has m_i own tokens:

    - `token-mean`: 1 / M (DAPO, arXiv:2503.14476)
    - `seq-mean-token-sum`: 1 / B (Dr. GRPO, arXiv:2503.20783)
    - `seq-mean-token-mean`: 1 / (B m_i) (GRPO, arXiv:2402.03300)

    Trajectories without own tokens don't count in B. `mask` bool [N], `trajectory` int64 [N].

    Raises:
        ValueError: unknown mode.
    """
    _, member = torch.unique(trajectory, return_inverse=True)
    own = torch.bincount(member, weights=mask.double(), minlength=int(member.max()) + 1 if len(member) else 0)
    trajectories = (own > 0).sum().clamp(min=1)
    if mode == "token-mean":
        weights = mask / mask.sum().clamp(min=1)
    elif mode == "seq-mean-token-sum":
        weights = mask / trajectories
    elif mode == "seq-mean-token-mean":
        weights = mask / (trajectories * own.clamp(min=1)[member])
    else:
        raise ValueError(f"unknown aggregation {mode!r}")
    return weights.float()
