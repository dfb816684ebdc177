"""Discounted returns, with a baseline that does not depend on the token."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.advantages.reward_sums import RewardSums
from quintet.algorithms.tokens import TokenRows, discounted_returns, whiten
from quintet.config.native.advantages import ReinforceConfig, ReinforcePlusPlusConfig, RemaxConfig
from quintet.records import Batch


def reinforce(batch: Batch, config: ReinforceConfig | ReinforcePlusPlusConfig) -> tuple[Tensor, Tensor]:
    """Discounted return of each response token.

    G_t = r_t + gamma G_{t+1}, A = G: REINFORCE (Williams 1992). Whitened over the tokens of the batch,
    A = (G - mean) / std, it is REINFORCE++ (Hu et al. 2025, arXiv:2501.03262). Observations between turns are
    skipped without a discount, as in verl 0.9; verl 0.4 passed no reward across them, ROLL discounts over them.
    """
    rows = TokenRows.from_mask(batch.loss_mask, batch.token_trajectory)
    returns = rows.scatter(discounted_returns(rows.gather(batch.rewards), config.gamma), len(batch.tokens))
    return (whiten(returns, batch.loss_mask) if config.whiten else returns), returns


def remax(batch: Batch, config: RemaxConfig) -> tuple[Tensor, Tensor]:
    """Return of each response token minus the reward of a greedy episode from the same start state.

    A_t = Σ_{t' ≥ t} r_t' - b, Li et al. 2023 (arXiv:2310.10505); the returns are the sums. As in verl, and,
    with a reward at the end only, as in the paper: tokens after an intermediate reward are compared with the whole b.

    Raises:
        ValueError: the batch has no `baseline`.
    """
    if batch.baseline is None:
        raise ValueError("remax needs the reward of a greedy episode per start state")
    rows = TokenRows.from_mask(batch.loss_mask, batch.token_trajectory)
    returns = rows.scatter(discounted_returns(rows.gather(batch.rewards), 1.0), len(batch.tokens))
    advantages = (returns - batch.baseline.to(returns.dtype)[batch.token_trajectory]) * batch.loss_mask
    advantages = torch.where(_equals_baseline(batch, rows), 0.0, advantages)
    return (whiten(advantages, batch.loss_mask) if config.whiten else advantages), returns


def _equals_baseline(batch: Batch, rows: TokenRows) -> Tensor:
    """Return the tokens whose undiscounted return equals the baseline up to rounding, bool [N]."""
    assert batch.baseline is not None  # noqa: S101 - for mypy
    size, trajectories = len(batch.tokens), len(batch.group)
    token = torch.arange(size)
    returns = RewardSums.from_rewards(batch.rewards * batch.loss_mask, token, size).discounted(rows, 1.0)
    baseline = RewardSums.from_rewards(batch.baseline, torch.arange(trajectories), trajectories)
    return returns.equals(baseline.at(batch.token_trajectory))
