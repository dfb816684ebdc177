"""Turns compared with turns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.algorithms.advantages.groups import Groups, played, trajectory_rewards
from quintet.algorithms.advantages.returns import discounted_returns
from quintet.algorithms.tokens import Rows, whiten
from quintet.config.native.advantages import GigpoConfig, GrpoDynamicConfig
from quintet.records import Batch

__all__ = ["gigpo", "grpo_dynamic"]


@dataclass(frozen=True, slots=True)
class _Turns:
    """The turns of a batch that have own tokens, in the order they were played."""

    of_own_token: Tensor
    """int64 [own tokens], number of each one's turn."""
    trajectory: Tensor
    """int64 [turns], ascending."""
    reward: Tensor
    """[turns], sum over the turn's own tokens."""
    first: Tensor
    """int64 [turns], packed place of its first own token."""

    @classmethod
    def of(cls, batch: Batch) -> _Turns:
        own = batch.loss_mask.nonzero().squeeze(-1)
        owner = batch.token_trajectory[own]
        pairs = torch.stack([owner, batch.turn[own]], dim=1)
        found, number = torch.unique(pairs, dim=0, return_inverse=True)
        reward = batch.rewards.new_zeros(len(found)).index_add(0, number, batch.rewards[own])
        first = torch.full((len(found),), len(batch.tokens)).scatter_reduce(0, number, own, "amin")
        return cls(number, found[:, 0], reward, first)

    def spread(self, batch: Batch, values: Tensor) -> Tensor:
        """A value of each turn, [turns], on its own tokens, [N]."""
        packed = values.new_zeros(len(batch.tokens))
        packed[batch.loss_mask] = values[self.of_own_token]
        return packed


def grpo_dynamic(batch: Batch, config: GrpoDynamicConfig) -> tuple[Tensor, Tensor]:
    """`grpo` of whole trajectories, or of the turns of a group (RLinf's `grpo_dynamic`).

    `trajectory`: A = (R_i - mean_g) / (std_g + 1e-6) on all turns of i. `turn`: the same of each turn's own reward
    against all turns of the group. Deviations are unbiased. RLinf takes the mean of a trajectory's turns for R, each
    of which it gives the whole reward: the sum here is the same number. A group of one keeps its reward, as in
    `grpo`, where RLinf gets NaN.
    """
    if config.level == "trajectory":
        groups, scores = Groups.of(batch.group, played(batch)), trajectory_rewards(batch)
        lead = groups.normalized(scores, by_deviation=config.normalize_by_std)
        return _finish(batch, lead[batch.token_trajectory] * batch.loss_mask, whitened=config.whiten)
    turns = _Turns.of(batch)
    groups = Groups.of(batch.group[turns.trajectory])
    lead = groups.normalized(turns.reward, by_deviation=config.normalize_by_std)
    return _finish(batch, turns.spread(batch, lead), whitened=config.whiten)


def gigpo(batch: Batch, config: GigpoConfig) -> tuple[Tensor, Tensor]:
    """Games compared within their group, plus turns compared with those of the group that answered the same.

    A = w_g norm_g(R_i) + w_t norm_s(G_k), G_k = r_k + turn_gamma G_{k+1} over turns, norm(x) = (x - mean) / (std +
    1e-6) or x - mean; s are the turns with the same `batch.saw`. Feng et al. 2025 (arXiv:2505.10978). A game alone
    in its group keeps its reward, a turn that nobody else had gets 0, as in the authors' code. That code weights
    each game in mean_g by its number of turns; here each counts once, as in the paper.

    Raises:
        ValueError: the batch has no `saw`.
    """
    if batch.saw is None:
        raise ValueError("gigpo needs to know which turns answered the same words")
    turns = _Turns.of(batch)
    rows = Rows.of(torch.ones_like(turns.trajectory, dtype=torch.bool), turns.trajectory)
    returns = rows.scatter(discounted_returns(rows.gather(turns.reward), config.turn_gamma), len(turns.reward))
    same = Groups.of(batch.saw[turns.first])
    by_turn = same.normalized(returns, by_deviation=config.normalize_by_std).masked_fill(same.alone, 0.0)
    groups = Groups.of(batch.group, played(batch))
    by_game = groups.normalized(trajectory_rewards(batch), by_deviation=config.normalize_by_std)
    advantage = config.game_weight * by_game[turns.trajectory] + config.turn_weight * by_turn
    return _finish(batch, turns.spread(batch, advantage), whitened=config.whiten)


def _finish(batch: Batch, advantages: Tensor, *, whitened: bool) -> tuple[Tensor, Tensor]:
    if whitened:
        advantages = whiten(advantages, batch.loss_mask)
    return advantages, advantages
