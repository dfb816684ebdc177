"""What follows a token, discounted, less a baseline that knows nothing of the token."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.tokens import Rows, whiten
from quintet.config.native.advantages import BaselineConfig, ReinforcePlusPlusConfig, ReturnConfig
from quintet.records import Batch

__all__ = ["discounted_returns", "reinforce", "remax"]


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma G_{t+1} over the columns of rows filled from the left, [R, T]."""
    returns = torch.zeros_like(rewards)
    carry = rewards.new_zeros(len(rewards))
    for t in range(rewards.shape[1] - 1, -1, -1):
        carry = rewards[:, t] + gamma * carry
        returns[:, t] = carry
    return returns


def reinforce(batch: Batch, config: ReturnConfig | ReinforcePlusPlusConfig) -> tuple[Tensor, Tensor]:
    """The discounted sum of what follows each own token.

    G_t = r_t + gamma G_{t+1}, A = G: REINFORCE (Williams 1992). Whitened over the tokens of the batch,
    A = (G - mean) / std, it is REINFORCE++ (Hu et al. 2025, arXiv:2501.03262). What the world said between two turns
    is leapt over and costs no discount, as in verl 0.9; verl 0.4 let no reward through such a gap, ROLL discounts
    through it.
    """
    rows = Rows.of(batch.loss_mask, batch.token_trajectory)
    returns = rows.scatter(discounted_returns(rows.gather(batch.rewards), config.gamma), len(batch.tokens))
    return (whiten(returns, batch.loss_mask) if config.whiten else returns), returns


def remax(batch: Batch, config: BaselineConfig) -> tuple[Tensor, Tensor]:
    """What follows each own token, less the reward of a greedy game from the same start.

    A_t = Σ_{t' ≥ t} r_t' - b, Li et al. 2023 (arXiv:2310.10505); the returns are the sums. Like verl, and where
    rewards lie at the end like the paper: tokens behind a reward in the middle are held against the whole b.

    Raises:
        ValueError: the batch has no `baseline`.
    """
    if batch.baseline is None:
        raise ValueError("remax needs the reward of a greedy game from each start")
    rows = Rows.of(batch.loss_mask, batch.token_trajectory)
    returns = rows.scatter(discounted_returns(rows.gather(batch.rewards), 1.0), len(batch.tokens))
    advantages = (returns - batch.baseline.to(returns.dtype)[batch.token_trajectory]) * batch.loss_mask
    return (whiten(advantages, batch.loss_mask) if config.whiten else advantages), returns
