"""Steps of robots in a rollout, and their episodes, of which a robot may have several, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.algorithms.advantages.groups import Groups
from quintet.algorithms.advantages.reward_sums import RewardSums
from quintet.algorithms.chunks.levels import from_steps, level_flags, level_rewards, to_steps
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.embodied_records import ChunkBatch


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
