"""Advantages with the values of a critic as baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.tokens import TokenRows, last_tokens, whiten
from quintet.config.native.advantages import AdvantageSection, BiLevelGaeConfig, GaeConfig, TurnWiseGaeConfig
from quintet.records import Batch


def turn_ends(batch: Batch) -> Tensor:
    """Return the last response token of each turn, bool [N]; the last one of a trajectory always ends a turn."""
    return (batch.turn_end & batch.loss_mask) | last_tokens(batch.loss_mask, batch.token_trajectory)


def critic_mask(batch: Batch, config: AdvantageSection) -> Tensor:
    """Return the tokens whose value the critic learns, bool [N]: response tokens, or one token of each turn if
    the estimator defines returns only there."""
    if not isinstance(config, TurnWiseGaeConfig):
        return batch.loss_mask
    if config.turn_value == "first":
        return turn_starts(batch)
    # rejection may have narrowed the mask; a token before a rejected turn end has no return
    return batch.turn_end & batch.loss_mask


def turn_starts(batch: Batch) -> Tensor:
    """Return the first response token of each turn, bool [N]."""
    rows = TokenRows.from_mask(batch.loss_mask, batch.token_trajectory)
    return rows.scatter(_starts(rows, rows.gather(turn_ends(batch))), len(batch.tokens))


def _starts(rows: TokenRows, is_end: Tensor) -> Tensor:
    """Return the token after each turn end, and the first one of each row, bool [R, T]."""
    starts = torch.ones_like(is_end)
    starts[:, 1:] = is_end[:, :-1]
    return starts & rows.valid


def gae(batch: Batch, config: GaeConfig) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over response tokens.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}, returns A + V;
    Schulman et al. 2016 (arXiv:1506.02438). Observations between turns are skipped: the next
    response token follows directly (VAGEN's `masked_gae`, verl 0.9's `gae`).
    """
    rows = TokenRows.from_mask(batch.loss_mask, batch.token_trajectory)
    values = rows.gather(_values(batch))
    advantages = _recursion(rows.gather(batch.rewards), values, rows.valid, config.gamma, config.lam)
    return _finish(batch, rows, advantages, values, whitened=config.whiten)


def bi_level_gae(batch: Batch, config: BiLevelGaeConfig) -> tuple[Tensor, Tensor]:
    """GAE over turns, then over the tokens inside each turn (VAGEN, arXiv:2510.16907; RAGEN).

    Over turn ends e_1 … e_K: A(e_k) is GAE of r(e_k), V(e_k) with `turn_gamma`, `turn_lam`. Inside
    turn k the last token's advantage is A(e_k), and before it
    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}.

    Turn ends come from the trajectory. RAGEN's code takes every nonzero reward for a turn end, so that a turn with
    reward 0 disappears and a penalty per token makes each token a turn; `turn_ends: rewards` does the same. The
    published algorithm adds a token-level term at the last token; like the code of VAGEN and RAGEN, this does not.
    With `turn_value: first`, V(e_k) is the value of the first token of turn k, and the last token has the reward
    A(e_k) + V(e_k) (VAGEN's `turn_update_bi_level_gae`).
    """
    rows = TokenRows.from_mask(batch.loss_mask, batch.token_trajectory)
    rewards, values = rows.gather(batch.rewards), rows.gather(_values(batch))
    ends = turn_ends(batch)
    if config.turn_ends == "rewards":
        ends = (batch.rewards != 0) | last_tokens(batch.loss_mask, batch.token_trajectory)
    is_end = rows.gather(ends)
    is_value_token = _starts(rows, is_end) if config.turn_value == "first" else is_end
    by_turn = _turn_advantages(rewards, values, is_end, is_value_token, config.turn_gamma, config.turn_lam)
    at_end = by_turn
    if config.turn_value == "first":
        at_end = _at_turn_ends(by_turn + values * is_value_token, is_value_token, is_end) - values
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
    """GAE over turns; all tokens of a turn share its advantage (VAGEN's Turn-PPO).

    Over turn ends as in `bi_level_gae`, with `gamma` and `lam` per turn. Returns A + V are 0 except at turn ends: the
    critic must learn only there (`critic_mask`). Whitened by mean and standard deviation over turns, so that a long
    turn counts like a short one, or over tokens (VAGEN's `no_concat_gae`). Rewards inside a turn do not enter, as in
    VAGEN. With `turn_value: first`, values and returns are those of the first token of a turn (VAGEN's
    `high_level_gae`).
    """
    rows = TokenRows.from_mask(batch.loss_mask, batch.token_trajectory)
    values, ends = rows.gather(_values(batch)), turn_ends(batch)
    is_end = rows.gather(ends)
    is_value_token = _starts(rows, is_end) if config.turn_value == "first" else is_end
    by_turn = _turn_advantages(rows.gather(batch.rewards), values, is_end, is_value_token, config.gamma, config.lam)
    at_end = _at_turn_ends(by_turn, is_value_token, is_end)
    advantages = torch.zeros_like(values)
    carry = values.new_zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        carry = torch.where(is_end[:, t], at_end[:, t], carry)
        advantages[:, t] = carry
    size = len(batch.tokens)
    packed = rows.scatter(advantages, size)
    returns = rows.scatter((by_turn + values) * is_value_token, size)
    over = ends if config.whitens_over_turns else None
    return (whiten(packed, batch.loss_mask, over=over) if config.whiten else packed), returns


def _values(batch: Batch) -> Tensor:
    if batch.values is None:
        raise ValueError("this advantage estimator needs the values of a critic")
    return batch.values.to(batch.rewards.dtype)


def _recursion(rewards: Tensor, values: Tensor, valid: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE over the columns of left-aligned rows, [R, T]; the value after the end of a row is 0."""
    advantages = torch.zeros_like(values)
    carry = values.new_zeros(len(values))
    next_value = values.new_zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        carry = (delta + gamma * lam * carry) * valid[:, t]
        next_value = values[:, t] * valid[:, t]
        advantages[:, t] = carry
    return advantages


def _turn_advantages(
    rewards: Tensor, values: Tensor, is_end: Tensor, is_value_token: Tensor, gamma: float, lam: float
) -> Tensor:
    """GAE over turns with the rewards at their ends and the values of one token of each, all [R, T]; the
    advantages are at the value tokens, and 0 elsewhere."""
    end_rows, value_rows = _turn_rows(is_end), _turn_rows(is_value_token)
    turn_rewards, turn_values = end_rows.gather(rewards.flatten()), value_rows.gather(values.flatten())
    advantages = _recursion(turn_rewards, turn_values, end_rows.valid, gamma, lam)
    return value_rows.scatter(advantages, values.numel()).view_as(values)


def _at_turn_ends(at_value_tokens: Tensor, is_value_token: Tensor, is_end: Tensor) -> Tensor:
    """Move a number of each turn from its value token to its end, [R, T]."""
    moved = _turn_rows(is_value_token).gather(at_value_tokens.flatten())
    return _turn_rows(is_end).scatter(moved, at_value_tokens.numel()).view_as(at_value_tokens)


def _turn_rows(mask: Tensor) -> TokenRows:
    """Return the rows of one token of each turn, selected by a mask [R, T]."""
    return TokenRows.from_mask(mask.flatten(), torch.arange(len(mask)).repeat_interleave(mask.shape[1]))


def _finish(
    batch: Batch, rows: TokenRows, advantages: Tensor, values: Tensor, *, whitened: bool
) -> tuple[Tensor, Tensor]:
    size = len(batch.tokens)
    returns = rows.scatter(advantages + values, size)
    packed = rows.scatter(advantages, size)
    return (whiten(packed, batch.loss_mask) if whitened else packed), returns
