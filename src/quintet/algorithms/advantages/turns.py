"""Advantages of turns relative to other turns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.algorithms.advantages.groups import Groups, has_response, trajectory_rewards
from quintet.algorithms.advantages.reward_sums import RewardSums
from quintet.algorithms.tokens import TokenRows, whiten
from quintet.config.native.advantages import (
    AgenticReinforceConfig,
    GigpoConfig,
    GrpoDynamicConfig,
    StepReinforceConfig,
)
from quintet.records import Batch


@dataclass(frozen=True, slots=True)
class _Turns:
    """Turns of a batch with response tokens, in order."""

    index: Tensor
    """int64 [response tokens], index of each token's turn."""
    trajectory: Tensor
    """int64 [turns], ascending."""
    rewards: RewardSums
    """Sums over the response tokens of each turn."""
    dtype: torch.dtype
    """Of the rewards of the batch."""
    first: Tensor
    """int64 [turns], packed index of its first response token."""

    @classmethod
    def from_batch(cls, batch: Batch) -> _Turns:
        response_index = batch.loss_mask.nonzero().squeeze(-1)
        owner = batch.token_trajectory[response_index]
        pairs = torch.stack([owner, batch.turn[response_index]], dim=1)
        turns, index = torch.unique(pairs, dim=0, return_inverse=True)
        rewards = RewardSums.from_rewards(batch.rewards[response_index], index, len(turns))
        first = torch.full((len(turns),), len(batch.tokens)).scatter_reduce(0, index, response_index, "amin")
        return cls(index, turns[:, 0], rewards, batch.rewards.dtype, first)

    def compared(self, sums: RewardSums, group: Tensor) -> Tensor:
        """Return sums of each turn, [turns], with the same bits if they are equal up to rounding within a `group`."""
        return sums.equalized(group).total.to(self.dtype)

    def to_tokens(self, batch: Batch, values: Tensor) -> Tensor:
        """Assign the value of each turn, [turns], to its response tokens, [N]."""
        packed = values.new_zeros(len(batch.tokens))
        packed[batch.loss_mask] = values[self.index]
        return packed


def grpo_dynamic(batch: Batch, config: GrpoDynamicConfig) -> tuple[Tensor, Tensor]:
    """`grpo` over whole trajectories, or over the turns of a group (RLinf's `grpo_dynamic`).

    `trajectory`: A = (R_i - mean_g) / (std_g + 1e-6) on all turns of i. `turn`: the same with the reward of each
    turn relative to all turns of the group. Standard deviations are unbiased. RLinf takes R as the mean over a
    trajectory's turns, each with the total reward, which is the same number. A group of one keeps its reward, as in
    `grpo`, where RLinf gets NaN.
    """
    if config.level == "trajectory":
        groups = Groups.from_ids(batch.group, has_response(batch))
        scores = trajectory_rewards(batch, across_groups=config.whiten)
        advantage = groups.normalized(scores, by_deviation=config.normalize_by_std)
        return _finish(batch, advantage[batch.token_trajectory] * batch.loss_mask, whitened=config.whiten)
    turns = _Turns.from_batch(batch)
    group = batch.group[turns.trajectory]
    rewards = turns.compared(turns.rewards, group)
    advantage = Groups.from_ids(group).normalized(rewards, by_deviation=config.normalize_by_std)
    return _finish(batch, turns.to_tokens(batch, advantage), whitened=config.whiten)


def gigpo(batch: Batch, config: GigpoConfig) -> tuple[Tensor, Tensor]:
    """Episodes compared within their group, plus turns compared with turns that saw the same observation.

    A = w_g norm_g(R_i) + w_t norm_s(G_k), G_k = r_k + turn_gamma G_{k+1} over turns, norm(x) = (x - mean) / (std +
    1e-6) or x - mean; s are the turns with the same `batch.observation_group`. Feng et al. 2025 (arXiv:2505.10978).
    As in the authors' code, the only episode of a group keeps its reward, and a unique turn gets 0. That code weights
    each episode in mean_g by its number of turns; here each counts once, as in the paper. With `compare=turns`, norm_g
    is over the returns G_k of all turns of the group, and 0 for the only turn of one.

    Raises:
        ValueError: the batch has no `observation_group`.
    """
    if batch.observation_group is None:
        raise ValueError("gigpo needs a batch with `observation_group`")
    turns = _Turns.from_batch(batch)
    returns = _turn_returns(turns, config.turn_gamma)
    by_turn = _relative_returns(turns, returns, batch.observation_group[turns.first], config)
    if config.compare == "turns":
        in_group = _relative_returns(turns, returns, batch.group[turns.trajectory], config)
    else:
        groups = Groups.from_ids(batch.group, has_response(batch))
        totals = trajectory_rewards(batch, across_groups=config.whiten)
        by_episode = groups.normalized(totals, by_deviation=config.normalize_by_std)
        in_group = by_episode[turns.trajectory]
    advantage = config.episode_weight * in_group + config.turn_weight * by_turn
    return _finish(batch, turns.to_tokens(batch, advantage), whitened=config.whiten)


def _relative_returns(turns: _Turns, returns: RewardSums, group: Tensor, config: GigpoConfig) -> Tensor:
    """Return the returns of turns relative to their `group`, int64 [turns]; 0 for the only turn of one."""
    groups = Groups.from_ids(group)
    relative = groups.normalized(turns.compared(returns, group), by_deviation=config.normalize_by_std)
    return relative.masked_fill(groups.alone, 0.0)


def step_reinforce(batch: Batch, config: StepReinforceConfig) -> tuple[Tensor, Tensor]:
    """Discounted return of each turn, relative to those of other turns (ROLL's `step_reinforce`).

    A = (G_k - mean) / (std + 1e-6) on all tokens of turn k, G_k = r_k + turn_gamma G_{k+1}; mean and unbiased standard
    deviation are over all turns of the group or of the batch, each optional. With a deviation of at most 1e-6, or of a
    single turn, A = 0.
    """
    turns = _Turns.from_batch(batch)
    returns = _turn_returns(turns, config.turn_gamma)
    scopes = {"group": batch.group[turns.trajectory], "batch": torch.zeros_like(turns.trajectory)}
    advantage = returns.total.to(turns.dtype)
    if config.center != "none":
        scope = scopes[config.center]
        compared = turns.compared(returns, scope)
        advantage = Groups.from_ids(scope).centered(compared)
    if config.divide != "none":
        groups = Groups.from_ids(scopes[config.divide])
        deviation = groups.deviation(turns.compared(returns, scopes[config.divide]))
        is_flat = groups.alone | (deviation <= 1e-6)
        advantage = torch.where(is_flat, 0.0, advantage / (deviation + 1e-6))
    return _finish(batch, turns.to_tokens(batch, advantage), whitened=config.whiten)


def agentic_reinforce(batch: Batch, config: AgenticReinforceConfig) -> tuple[Tensor, Tensor]:
    """Total reward of the trajectory, discounted by the turns that follow (ROLL's `agentic_reinforce`).

    A = gamma^(n - k) R on all tokens of turn k of n; R is shaped before, by `algorithm.shaping`.
    """
    turns = _Turns.from_batch(batch)
    num_turns = torch.bincount(turns.trajectory, minlength=len(batch.group))
    ends = num_turns.cumsum(0)[turns.trajectory]
    following = ends - 1 - torch.arange(len(ends))
    rewards = trajectory_rewards(batch, across_groups=config.whiten)[turns.trajectory]
    advantage = rewards * torch.pow(rewards.new_tensor(config.gamma), following)
    return _finish(batch, turns.to_tokens(batch, advantage), whitened=config.whiten)


def _turn_returns(turns: _Turns, gamma: float) -> RewardSums:
    """Return G_k = r_k + gamma G_{k+1} of each turn."""
    rows = TokenRows.from_mask(torch.ones_like(turns.trajectory, dtype=torch.bool), turns.trajectory)
    return turns.rewards.discounted(rows, gamma)


def _finish(batch: Batch, advantages: Tensor, *, whitened: bool) -> tuple[Tensor, Tensor]:
    if whitened:
        advantages = whiten(advantages, batch.loss_mask)
    return advantages, advantages
