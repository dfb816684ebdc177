"""One advantage for a whole trajectory: its reward against a baseline.

The returns are the advantages; nothing here has a critic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.advantages.groups import Groups, has_response, num_response_tokens, trajectory_rewards
from quintet.algorithms.tokens import whiten
from quintet.config.native.advantages import (
    AdvantageSection,
    ArpoConfig,
    BrpoConfig,
    GdpoConfig,
    GpgConfig,
    GrpoConfig,
    OpoConfig,
    PassKConfig,
    RawConfig,
    ReinforcePlusPlusBaselineConfig,
    RlooConfig,
)
from quintet.errors import ConfigError, did_you_mean
from quintet.records import Batch


def _to_tokens(batch: Batch, advantage: Tensor, *, whitened: bool) -> tuple[Tensor, Tensor]:
    """Assign the advantage of each trajectory, [R], to all its response tokens."""
    per_token = advantage[batch.token_trajectory] * batch.loss_mask
    if whitened:
        per_token = whiten(per_token, batch.loss_mask)
    return per_token, per_token


def _groups(batch: Batch) -> Groups:
    return Groups.from_ids(batch.group, has_response(batch))


def _rewards(batch: Batch, config: AdvantageSection) -> Tensor:
    """Return the total reward of each trajectory, [R]. Whitening also compares those of different groups."""
    return trajectory_rewards(batch, across_groups=config.whiten)


def grpo(batch: Batch, config: GrpoConfig) -> tuple[Tensor, Tensor]:
    """Group-relative advantage, the same for every token of a trajectory.

    A_i = (R_i - mean_g) / (std_g + 1e-6), Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300); without the division,
    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783). The standard deviation is unbiased; a group of one keeps its reward,
    as in verl. With `length_weight`, see `_weighted_by_length`; with `deviation_weight`, `Groups.relative_deviation`.
    """
    groups, rewards = _groups(batch), _rewards(batch, config)
    advantage = groups.normalized(rewards, by_deviation=config.normalize_by_std)
    if config.deviation_weight:
        advantage = advantage * groups.relative_deviation(rewards)
    return _to_tokens(batch, _weighted_by_length(batch, advantage, config), whitened=config.whiten)


def brpo(batch: Batch, config: BrpoConfig) -> tuple[Tensor, Tensor]:
    """`grpo` with the whole batch as one group (RAGEN)."""
    return _group_relative(batch, torch.zeros_like(batch.group), config)


def arpo(batch: Batch, config: ArpoConfig) -> tuple[Tensor, Tensor]:
    """`grpo` with every trajectory in a group of one: A_i = R_i (RAGEN)."""
    return _group_relative(batch, torch.arange(len(batch.group)), config)


def _weighted_by_length(batch: Batch, advantage: Tensor, config: GrpoConfig | RawConfig) -> Tensor:
    """Divide advantages, [R], by the response tokens of the trajectory relative to their mean, l_i / mean_j l_j over
    trajectories with tokens in the loss mask, if `length_weight` is set (RAGEN's `grpo_advantage_length_weight`)."""
    if not config.length_weight:
        return advantage
    length = num_response_tokens(batch).to(advantage.dtype)
    trained = length > 0
    mean = length.sum() / trained.sum().clamp(min=1)
    return torch.where(trained, advantage * mean / length.clamp(min=1), advantage)


def _group_relative(batch: Batch, group: Tensor, config: BrpoConfig | ArpoConfig) -> tuple[Tensor, Tensor]:
    groups = Groups.from_ids(group, has_response(batch))
    rewards = trajectory_rewards(batch, across_groups=True)
    advantage = groups.normalized(rewards, by_deviation=config.normalize_by_std)
    return _to_tokens(batch, advantage, whitened=config.whiten)


def grpo_passk(batch: Batch, config: PassKConfig) -> tuple[Tensor, Tensor]:
    """Credit the best trajectory of a group with its lead over the second best, and all others with 0.

    A_best = (R_best - R_second) / (std_g + 1e-6), Tang et al. 2025 (arXiv:2503.19595), as in verl. A
    group of one gets 0, where verl raises, because episodes are dropped if their env fails.
    """
    groups, scores = _groups(batch), _rewards(batch, config)
    counted = groups.counted.nonzero().squeeze(-1)
    ranked = counted[scores[counted].argsort(descending=True, stable=True)]
    ranked = ranked[groups.member[ranked].argsort(stable=True)]
    first = (groups.size.cumsum(0) - groups.size)[groups.size > 1]
    best, second = ranked[first], ranked[first + 1]
    lead = scores[best] - scores[second]
    if config.normalize_by_std:
        lead = lead / (groups.deviation(scores)[best] + 1e-6)
    advantage = _weighted_by_length(batch, torch.zeros_like(scores).index_copy(0, best, lead), config)
    return _to_tokens(batch, advantage, whitened=config.whiten)


def rloo(batch: Batch, config: RlooConfig) -> tuple[Tensor, Tensor]:
    """Reward minus the mean of the other trajectories of its group.

    A_i = R_i - mean_{j≠i} R_j = n / (n - 1) (R_i - mean_g), Ahmadian et al. 2024 (arXiv:2402.14740). A group of one
    keeps its reward, as in verl's `rloo`; its `rloo_vectorized` gives it 0.
    """
    groups, scores = _groups(batch), _rewards(batch, config)
    size = groups.size[groups.member].to(scores.dtype)
    advantage = groups.centered(scores) * size / (size - 1).clamp(min=1)
    return _to_tokens(batch, torch.where(groups.alone, scores, advantage), whitened=config.whiten)


def opo(batch: Batch, config: OpoConfig) -> tuple[Tensor, Tensor]:
    """Reward minus the length-weighted mean of its group.

    A_i = R_i - Σ_j l_j R_j / Σ_j l_j with l the numbers of response tokens, Hao et al. 2025 (arXiv:2505.23585): the
    minimum-variance baseline if every token's gradient has the same norm. A group of one keeps its reward.
    """
    groups, scores = _groups(batch), _rewards(batch, config)
    length = num_response_tokens(batch).double()
    baseline = (groups.total(length * scores) / groups.total(length).clamp(min=1))[groups.member]
    advantage = torch.where(groups.differ(scores), (scores - baseline).to(scores.dtype), 0.0)
    return _to_tokens(batch, torch.where(groups.alone, scores, advantage), whitened=config.whiten)


def gpg(batch: Batch, config: GpgConfig) -> tuple[Tensor, Tensor]:
    """Reward minus the mean of its group, scaled by the inverse share of rewarded trajectories.

    A_i = α (R_i - mean_g), α = trajectories / those with R ≠ 0, Chu et al. 2025 (arXiv:2504.02546), as in
    verl. A group of one gets α R.
    """
    groups, scores = _groups(batch), _rewards(batch, config)
    rewarded = (scores[groups.counted] != 0).sum().clamp(min=1)
    scale = groups.counted.sum() / rewarded.to(scores.dtype)
    return _to_tokens(batch, scale * groups.normalized(scores, by_deviation=False), whitened=config.whiten)


def raw(batch: Batch, config: RawConfig) -> tuple[Tensor, Tensor]:
    """Unchanged reward: A_i = R_i, REINFORCE without a baseline (RLinf's `raw`). With `length_weight`, see
    `_weighted_by_length`."""
    advantage = _weighted_by_length(batch, _rewards(batch, config), config)
    return _to_tokens(batch, advantage, whitened=config.whiten)


def reinforce_plus_plus_baseline(batch: Batch, config: ReinforcePlusPlusBaselineConfig) -> tuple[Tensor, Tensor]:
    """Reward minus the mean of its group, then whitened over the tokens of the batch.

    x_i = R_i - mean_g, A = (x - mean) / std over response tokens, Hu et al. 2025 (arXiv:2501.03262). A group of one
    keeps its reward, as in verl.
    """
    advantage = _groups(batch).normalized(_rewards(batch, config), by_deviation=False)
    return _to_tokens(batch, advantage, whitened=config.whiten)


def gdpo(batch: Batch, config: GdpoConfig) -> tuple[Tensor, Tensor]:
    """Weighted sum of the reward's parts, each normalized within its group, then whitened over the batch.

    A = whiten(Σ_k w_k (r_k - mean_g) / (std_g + 1e-6)), Liu et al. 2026 (arXiv:2601.05242). It only
    reads `batch.parts`: a penalty added to the rewards later does not enter, as in verl.

    Raises:
        ConfigError: the reward has no parts, or lacks one that `weights` names.
    """
    groups, parts = _groups(batch), batch.reward_components or {}
    weights = config.weights or dict.fromkeys(parts, 1.0)
    total = batch.rewards.new_zeros(len(batch.group))
    for name, weight in weights.items():
        if name not in parts:
            raise _missing_part(name, parts)
        total = total + weight * groups.normalized(parts[name].to(total.dtype), by_deviation=config.normalize_by_std)
    if not weights:
        raise _missing_part(None, parts)
    return _to_tokens(batch, total, whitened=config.whiten)


def _missing_part(name: str | None, parts: object) -> ConfigError:
    part_names = sorted(parts) if isinstance(parts, dict) else []
    available = f"; it has {', '.join(part_names)}" if part_names else ""
    return ConfigError(
        f"gdpo needs the parts of the reward, but the reward has no {f'part {name!r}' if name else 'parts'}{available}",
        key="algorithm.advantage.weights",
        value=name,
        hint=did_you_mean(name or "", part_names) or "return a dict with a number per part from the reward function",
    )
