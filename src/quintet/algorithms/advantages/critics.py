"""Advantages that a critic's values are the baseline of."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.tokens import Rows, last_tokens, whiten
from quintet.config.native.advantages import BiLevelGaeConfig, GaeConfig, TurnWiseGaeConfig
from quintet.records import Batch

__all__ = ["bi_level_gae", "critic_mask", "gae", "turn_ends", "turn_wise_gae"]


def turn_ends(batch: Batch) -> Tensor:
    """The last own token of each turn, bool [N]; a trajectory's last own token always ends one."""
    return (batch.turn_end & batch.loss_mask) | last_tokens(batch.loss_mask, batch.token_trajectory)


def critic_mask(batch: Batch, config: object) -> Tensor:
    """The tokens whose value the critic learns, bool [N]: all own ones, or turn ends alone for `turn_wise_gae`,
    whose returns are known only there. `config` is that of the advantage."""
    if isinstance(config, TurnWiseGaeConfig):
        # the mask may have been narrowed since; a token before a rejected turn end has no return
        return batch.turn_end & batch.loss_mask
    return batch.loss_mask


def gae(batch: Batch, config: GaeConfig) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the policy's own tokens.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, returns A + V;
    Schulman et al. 2016 (arXiv:1506.02438). What the world said between two turns is skipped:
    the next own token follows directly (VAGEN's `masked_gae`, verl 0.9's `gae`).
    """
    rows = Rows.of(batch.loss_mask, batch.token_trajectory)
    values = rows.gather(_values(batch))
    advantages = _recursion(rows.gather(batch.rewards), values, rows.valid, config.gamma, config.lam)
    return _finish(batch, rows, advantages, values, whitened=config.whiten)


def bi_level_gae(batch: Batch, config: BiLevelGaeConfig) -> tuple[Tensor, Tensor]:
    """GAE over turns, then over the tokens inside each turn (VAGEN, arXiv:2510.16907; RAGEN).

    Over turn ends e_1 … e_K: A(e_k) is GAE of r(e_k), V(e_k) with `turn_gamma`, `turn_lam`. Inside
    turn k the last token's advantage is A(e_k), and before it
    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}.

    Turn ends come from the trajectory. RAGEN's code takes every non-zero reward for one, so that a turn rewarded
    with 0 vanishes and a penalty on each token makes each a turn; `turn_ends: rewards` does the same. The
    published algorithm adds a token-level term at the last token; like the peers' code, this doesn't.
    """
    rows = Rows.of(batch.loss_mask, batch.token_trajectory)
    rewards, values = rows.gather(batch.rewards), rows.gather(_values(batch))
    ends = turn_ends(batch)
    if config.turn_ends == "rewards":
        ends = (batch.rewards != 0) | last_tokens(batch.loss_mask, batch.token_trajectory)
    is_end = rows.gather(ends)
    at_end = _turn_advantages(rewards, values, is_end, config.turn_gamma, config.turn_lam)
    advantages = torch.zeros_like(values)
    carry = values.new_zeros(len(values))
    next_value = values.new_zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + config.gamma * next_value - values[:, t]
        inside = delta + config.gamma * config.lam * carry
        carry = torch.where(is_end[:, t], at_end[:, t], inside) * rows.valid[:, t]
        next_value = values[:, t]
        advantages[:, t] = carry
    return _finish(batch, rows, advantages, values, whitened=config.whiten)


def turn_wise_gae(batch: Batch, config: TurnWiseGaeConfig) -> tuple[Tensor, Tensor]:
    """GAE over turns; every token of a turn has the turn's advantage (VAGEN's Turn-PPO).

    Over turn ends as in `bi_level_gae`, with `gamma` and `lam` a turn. Returns A + V stand at turn ends and are 0
    elsewhere: the critic must learn there alone (`critic_mask`). Whitened by the mean and deviation over turns,
    so that a long turn counts like a short one. Rewards inside a turn don't enter; the peers' code is the same.
    """
    rows = Rows.of(batch.loss_mask, batch.token_trajectory)
    values, ends = rows.gather(_values(batch)), turn_ends(batch)
    is_end = rows.gather(ends)
    at_end = _turn_advantages(rows.gather(batch.rewards), values, is_end, config.gamma, config.lam)
    advantages = torch.zeros_like(values)
    carry = values.new_zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        carry = torch.where(is_end[:, t], at_end[:, t], carry)
        advantages[:, t] = carry
    size = len(batch.tokens)
    packed = rows.scatter(advantages, size)
    returns = rows.scatter(advantages + values, size) * ends
    return (whiten(packed, batch.loss_mask, over=ends) if config.whiten else packed), returns


def _values(batch: Batch) -> Tensor:
    if batch.values is None:
        raise ValueError("this advantage needs a critic's values")
    return batch.values.to(batch.rewards.dtype)


def _recursion(rewards: Tensor, values: Tensor, valid: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE over the columns of left-filled rows, [R, T]; the value after a row's end is 0."""
    advantages = torch.zeros_like(values)
    carry = values.new_zeros(len(values))
    next_value = values.new_zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        carry = (delta + gamma * lam * carry) * valid[:, t]
        next_value = values[:, t] * valid[:, t]
        advantages[:, t] = carry
    return advantages


def _turn_advantages(rewards: Tensor, values: Tensor, is_end: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE from turn end to turn end, all [R, T]; 0 where none is."""
    row = torch.arange(len(values)).repeat_interleave(values.shape[1])
    turns = Rows.of(is_end.flatten(), row)
    found = _recursion(turns.gather(rewards.flatten()), turns.gather(values.flatten()), turns.valid, gamma, lam)
    return turns.scatter(found, values.numel()).view_as(values)


def _finish(batch: Batch, rows: Rows, advantages: Tensor, values: Tensor, *, whitened: bool) -> tuple[Tensor, Tensor]:
    size = len(batch.tokens)
    returns = rows.scatter(advantages + values, size)
    packed = rows.scatter(advantages, size)
    return (whiten(packed, batch.loss_mask) if whitened else packed), returns
