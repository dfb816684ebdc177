"""Advantages and returns of the chunks or actions of a rollout.

Estimators take the steps of all robots and their configuration, and return (advantages, returns), both [S, B]. They
have the names and the configuration of the estimators over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quintet.algorithms.advantages.groups import Groups
from quintet.algorithms.advantages.reward_sums import RewardSums
from quintet.algorithms.chunks.levels import episode_weights, from_steps, level_flags, level_rewards, to_steps
from quintet.algorithms.filters import drops_groups_without_signal, has_signal, select_groups
from quintet.config.native.advantages import (
    AdvantageSection,
    GaeConfig,
    GrpoConfig,
    RawConfig,
    ReinforceConfig,
    ReinforcePlusPlusBaselineConfig,
)
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.experiment import Experiment
from quintet.embodied_records import ChunkBatch


def add_chunk_advantages(batch: ChunkBatch, config: Experiment) -> tuple[ChunkBatch, dict[str, float]]:
    """Return the rollout of all robots, [T, B, …], with advantages, returns and loss weights, without the groups that
    are not trained on in its mask; and metrics. Inputs, actions and log-probs are not read.

    Raises:
        ValueError: the estimator is not defined for chunks of actions, or needs values, and the batch has none.
    """
    algorithm = config.algorithm
    steps = RobotSteps.from_batch(batch, algorithm)
    loss_mask, metrics = _select_groups(batch.loss_mask, steps, algorithm)
    steps = replace(steps, mask=to_steps(level_flags(loss_mask, algorithm.reward_level)))
    advantages, returns = estimate(steps, algorithm.advantage)
    size = len(steps.mask) // len(loss_mask)
    result = replace(
        batch,
        advantages=from_steps(advantages, size),
        returns=from_steps(returns, size),
        loss_mask=loss_mask,
        loss_weights=_loss_weights(loss_mask, from_steps(steps.episode, size), algorithm).to(batch.rewards.dtype),
    )
    return result, metrics | _metrics(steps, advantages, returns)


def estimate(steps: RobotSteps, config: AdvantageSection) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) of the configured estimator, [S, B], 0 outside the mask.

    Raises:
        ValueError: the estimator is not defined for chunks of actions, or needs values, and there are none.
    """
    if config.name not in ESTIMATORS:
        raise ValueError(f"{config.name} is not defined for chunks of actions, but {', '.join(ESTIMATORS)}")
    advantages, returns = ESTIMATORS[config.name](steps, config)
    return (whiten(advantages, steps.mask) if config.whiten else advantages), returns


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return (A - mean) / (std + 1e-5) with mean and unbiased standard deviation over the mask, 0 outside (RLinf).

    With fewer than two steps, values are unchanged, where RLinf gives NaN.
    """
    selected = advantages[mask]
    if len(selected) < 2:
        return advantages * mask
    mean = selected[0] if bool((selected == selected[0]).all()) else selected.mean()
    return (advantages - mean) / (selected.std() + 1e-5) * mask


def gae(steps: RobotSteps, config: GaeConfig) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the steps of an episode.

    delta_t = r_t + gamma V_{t+1} (1 - done_t) - V_t, A_t = delta_t + gamma lam (1 - done_t) A_{t+1}, returns A + V;
    Schulman et al. 2016 (arXiv:1506.02438). With automatic resets, r_t of the last step of a truncated episode, or with
    `algorithm.bootstrap: done` of every episode, includes gamma V of the last observation (RLinf).
    """
    if steps.values is None:
        raise ValueError("gae needs values: a rollout of a policy with a value head")
    rewards = steps.rewards if steps.bootstrap is None else steps.rewards + config.gamma * steps.bootstrap
    advantages = _recursion(rewards, steps.values, steps.dones, config.gamma, config.lam)
    return advantages * steps.mask, (advantages + steps.values[:-1]) * steps.mask


def grpo(steps: RobotSteps, config: GrpoConfig) -> tuple[Tensor, Tensor]:
    """Return of an episode relative to its group: A = (R - mean_g) / (std_g + 1e-6), the same for all steps.

    Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300). An episode that an automatic reset began and the end of the
    rollout cut off gets 0.
    """
    returns = steps.groups.normalized(steps.episode_returns, by_deviation=config.normalize_by_std)
    return _of_episodes(steps, returns)


def raw(steps: RobotSteps, config: RawConfig) -> tuple[Tensor, Tensor]:
    """Unchanged return of an episode: A = R."""
    return _of_episodes(steps, steps.episode_returns)


def reinforce_plus_plus_baseline(steps: RobotSteps, config: ReinforcePlusPlusBaselineConfig) -> tuple[Tensor, Tensor]:
    """Return of an episode minus the mean of its group, A = R - mean_g; Hu et al. 2025 (arXiv:2501.03262)."""
    return _of_episodes(steps, steps.groups.normalized(steps.episode_returns, by_deviation=False))


def reinforce(steps: RobotSteps, config: ReinforceConfig) -> tuple[Tensor, Tensor]:
    """Discounted return to the end of the episode, A_t = r_t + gamma (1 - done_t) A_{t+1}; Williams 1992."""
    no_values = steps.rewards.new_zeros(len(steps.rewards) + 1, steps.rewards.shape[1])
    returns = _recursion(steps.rewards, no_values, steps.dones, config.gamma, 1.0) * steps.mask
    return returns, returns


ESTIMATORS: dict[str, Callable[[RobotSteps, Any], tuple[Tensor, Tensor]]] = {
    "gae": gae,
    "grpo": grpo,
    "raw": raw,
    "reinforce": reinforce,
    "reinforce_plus_plus": reinforce,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}
"""By `algorithm.advantage.name`: those whose configuration has `supports_chunks`."""


def _recursion(rewards: Tensor, values: Tensor, dones: Tensor, gamma: float, lam: float) -> Tensor:
    """Return GAE over rows, [S, B]; `values` [S + 1, B]."""
    advantages = torch.zeros_like(rewards)
    carry = torch.zeros_like(rewards[0])
    continues = (~dones).to(rewards.dtype)
    for t in range(len(rewards) - 1, -1, -1):
        delta = rewards[t] + gamma * values[t + 1] * continues[t] - values[t]
        carry = delta + gamma * lam * continues[t] * carry
        advantages[t] = carry
    return advantages


def _of_episodes(steps: RobotSteps, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Assign the advantage of each episode, [E], to its steps; 0 if it is not compared."""
    of_steps = steps.of_steps(advantages * steps.compared)
    return of_steps, of_steps


def _loss_weights(loss_mask: Tensor, episode: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return the weight of each action in the loss, [T, B, C], see `ChunkBatch.loss_weights`."""
    if config.aggregation == "seq-mean-token-mean":
        return episode_weights(loss_mask, episode.expand(loss_mask.shape))
    return loss_mask


def _select_groups(loss_mask: Tensor, steps: RobotSteps, config: AlgorithmConfig) -> tuple[Tensor, dict[str, float]]:
    """Return the mask of actions, bool [T, B, C], without the groups that are not trained on, and metrics.

    Groups without signal stay if there are no others, as in runs on tokens.
    """
    returns, compared = steps.episode_returns, steps.compared
    signal = has_signal(returns, steps.group, config.signal_threshold, compared)
    selected = select_groups(returns, steps.group, config.filter, counted=compared)
    metrics = {
        "training/groups_with_signal": _share_of_groups(steps, signal),
        "training/groups_kept": _share_of_groups(steps, selected),
        "critic/rewards/mean": float(returns[compared].sum() / compared.sum().clamp(min=1)),
    }
    if drops_groups_without_signal(config) and bool((selected & signal).any()):
        selected = selected & signal
    in_selected_group = torch.isin(steps.group, steps.group[selected])
    return loss_mask & from_steps(in_selected_group[steps.episode], len(steps.mask) // len(loss_mask)), metrics


def _share_of_groups(steps: RobotSteps, episodes: Tensor) -> float:
    """Return the share of groups with at least one of the `episodes`, bool [E]."""
    groups = torch.unique(steps.group[steps.compared])
    return float(torch.isin(groups, steps.group[episodes]).sum()) / max(1, len(groups))


def _metrics(steps: RobotSteps, advantages: Tensor, returns: Tensor) -> dict[str, float]:
    """Return statistics over the trained steps."""
    if not bool(steps.mask.any()):
        return {}
    selected, targets = advantages[steps.mask], returns[steps.mask]
    metrics = {
        "critic/advantages/mean": float(selected.mean()),
        "critic/advantages/max": float(selected.max()),
        "critic/advantages/min": float(selected.min()),
        "critic/returns/mean": float(targets.mean()),
    }
    if steps.values is None:
        return metrics
    values = steps.values[:-1][steps.mask]
    explained = 1.0 - (targets - values).var(correction=0) / (targets.var(correction=0) + 1e-5)
    return metrics | {"critic/values/mean": float(values.mean()), "critic/vf_explained_var": float(explained)}


@dataclass(frozen=True, slots=True)
class RobotSteps:
    """A rollout in the order of time; S = T or T · C steps, chunks or actions."""

    rewards: Tensor
    """[S, B], 0 outside the mask."""
    dones: Tensor
    """bool [S, B], after each step."""
    mask: Tensor
    """bool [S, B], steps that are trained on."""
    episode: Tensor
    """int64 [S, B], number of the episode, from 0."""
    group: Tensor
    """int64 [E], group of each episode."""
    compared: Tensor
    """bool [E], episodes that enter statistics: those with trained steps, without those that began with an automatic
    reset and were cut off by the end of the rollout, whose return is not complete."""
    values: Tensor | None
    """[S + 1, B], before each step and after the last one."""
    bootstrap: Tensor | None
    """[S, B], value of the last observation of an episode at its last step, where it is added to the reward."""
    episode_returns: Tensor
    """[E], sum of the rewards of each episode's actions; those of a group that are equal up to rounding have the same
    bits, see `RewardSums`."""

    @classmethod
    def from_batch(cls, batch: ChunkBatch, config: AlgorithmConfig) -> RobotSteps:
        """Build from the rollout of all robots, [T, B, …]."""
        level = config.reward_level
        dones, mask = (to_steps(level_flags(flags, level)) for flags in (batch.dones, batch.loss_mask))
        ended_before = dones.cumsum(0) - dones.long()
        columns = torch.arange(dones.shape[1]) * (len(dones) + 1)
        names, episode = torch.unique(columns + ended_before, return_inverse=True)
        group = batch.group.new_empty(len(names))
        group[episode] = batch.group.repeat_interleave(len(dones) // len(batch.group), 0)
        is_first = names % (len(dones) + 1) == 0
        is_complete = is_first | _any_of_episode(dones, episode, len(names))
        rewards = batch.rewards * batch.loss_mask
        of_actions = from_steps(episode, dones.shape[0] // len(rewards)).expand_as(rewards)
        returns = RewardSums.from_rewards(rewards.flatten(), of_actions.flatten(), len(names))
        if config.advantage.whiten:
            returns = returns.equalized(torch.zeros_like(group))
        return cls(
            rewards=to_steps(level_rewards(rewards, level)),
            dones=dones,
            mask=mask,
            episode=episode,
            group=group,
            compared=_any_of_episode(mask, episode, len(names)) & is_complete,
            values=_values(batch),
            bootstrap=_bootstrap(batch, config),
            episode_returns=returns.equalized(group).total.to(batch.rewards.dtype),
        )

    @property
    def groups(self) -> Groups:
        """Groups of the compared episodes."""
        return Groups.from_ids(self.group, self.compared)

    def of_steps(self, values: Tensor) -> Tensor:
        """Assign a number of each episode, [E], to its trained steps, [S, B]; 0 elsewhere."""
        return values[self.episode] * self.mask


def _any_of_episode(flags: Tensor, episode: Tensor, count: int) -> Tensor:
    """Return the episodes in which a step has the flag, bool [E]."""
    result = torch.zeros(count, dtype=torch.bool)
    result[episode[flags]] = True
    return result


def _values(batch: ChunkBatch) -> Tensor | None:
    if batch.values is None or batch.last_values is None:
        return None
    return torch.cat([to_steps(batch.values), batch.last_values[:, :1].T]).to(batch.rewards.dtype)


def _bootstrap(batch: ChunkBatch, config: AlgorithmConfig) -> Tensor | None:
    if batch.final_values is None or batch.truncated is None:
        return None
    ended = level_flags(batch.dones if config.bootstrap == "done" else batch.truncated, config.reward_level)
    return to_steps(batch.final_values[..., :1] * ended).to(batch.rewards.dtype)
