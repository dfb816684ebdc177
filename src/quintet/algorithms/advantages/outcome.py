"""One advantage for a whole trajectory: its reward against a baseline.

The returns are the advantages; nothing here has a critic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quintet.algorithms.advantages.groups import Groups, own_tokens, played, trajectory_rewards
from quintet.algorithms.tokens import whiten
from quintet.config.native.advantages import (
    BaselineConfig,
    GdpoConfig,
    GrpoConfig,
    PassKConfig,
    ReinforcePlusPlusBaselineConfig,
)
from quintet.errors import ConfigError, nearest
from quintet.records import Batch

__all__ = ["gdpo", "gpg", "grpo", "grpo_passk", "opo", "raw", "reinforce_plus_plus_baseline", "rloo"]


def _credit(batch: Batch, advantage: Tensor, *, whitened: bool) -> tuple[Tensor, Tensor]:
    """An advantage of each trajectory, [R], on all its own tokens."""
    per_token = advantage[batch.token_trajectory] * batch.loss_mask
    if whitened:
        per_token = whiten(per_token, batch.loss_mask)
    return per_token, per_token


def _groups(batch: Batch) -> Groups:
    return Groups.of(batch.group, played(batch))


def grpo(batch: Batch, config: GrpoConfig) -> tuple[Tensor, Tensor]:
    """Group-relative advantage, the same for every token of a trajectory.

    A_i = (R_i - mean_g) / (std_g + 1e-6), Shao et al. 2024 (DeepSeekMath, arXiv:2402.03300); without the division,
    Dr. GRPO (Liu et al. 2025, arXiv:2503.20783). The deviation is unbiased; a group of one keeps its reward, as in
    verl. `brpo` takes the whole batch for one group, `arpo` every trajectory for one of its own, so that
    A_i = R_i (both RAGEN).
    """
    group = batch.group
    if config.name == "brpo":
        group = torch.zeros_like(group)
    elif config.name == "arpo":
        group = torch.arange(len(group))
    groups = Groups.of(group, played(batch))
    advantage = groups.normalized(trajectory_rewards(batch), by_deviation=config.normalize_by_std)
    return _credit(batch, advantage, whitened=config.whiten)


def grpo_passk(batch: Batch, config: PassKConfig) -> tuple[Tensor, Tensor]:
    """The best of a group is credited with its lead over the second best, all others with nothing.

    A_best = (R_best - R_second) / (std_g + 1e-6), Tang et al. 2025 (arXiv:2503.19595), as verl has it. A
    group of one has no second and gets 0, where verl raises: games drop out when their world fails.
    """
    groups, scores = _groups(batch), trajectory_rewards(batch)
    known = groups.counted.nonzero().squeeze(-1)
    ranked = known[scores[known].argsort(descending=True, stable=True)]
    ranked = ranked[groups.member[ranked].argsort(stable=True)]
    first = (groups.size.cumsum(0) - groups.size)[groups.size > 1]
    best, second = ranked[first], ranked[first + 1]
    lead = scores[best] - scores[second]
    if config.normalize_by_std:
        lead = lead / (groups.deviation(scores)[best] + 1e-6)
    return _credit(batch, torch.zeros_like(scores).index_copy(0, best, lead), whitened=config.whiten)


def rloo(batch: Batch, config: BaselineConfig) -> tuple[Tensor, Tensor]:
    """Reward less the mean of the others of its group.

    A_i = R_i - mean_{j≠i} R_j = n / (n - 1) (R_i - mean_g), Ahmadian et al. 2024 (arXiv:2402.14740). A group of one
    keeps its reward, as in verl's `rloo`; its `rloo_vectorized` gives it 0.
    """
    groups, scores = _groups(batch), trajectory_rewards(batch)
    size = groups.size[groups.member].to(scores.dtype)
    lead = (scores - groups.mean(scores)) * size / (size - 1).clamp(min=1)
    return _credit(batch, torch.where(groups.alone, scores, lead), whitened=config.whiten)


def opo(batch: Batch, config: BaselineConfig) -> tuple[Tensor, Tensor]:
    """Reward less the mean of its group weighted by length.

    A_i = R_i - Σ_j l_j R_j / Σ_j l_j with l the own tokens, Hao et al. 2025 (arXiv:2505.23585): the baseline of
    least variance where every token's gradient has the same norm. A group of one keeps its reward.
    """
    groups, scores = _groups(batch), trajectory_rewards(batch)
    length = own_tokens(batch).to(scores.dtype)
    baseline = (groups.total(length * scores) / groups.total(length).clamp(min=1))[groups.member]
    return _credit(batch, scores - baseline.masked_fill(groups.alone, 0.0), whitened=config.whiten)


def gpg(batch: Batch, config: BaselineConfig) -> tuple[Tensor, Tensor]:
    """Reward less its group's mean, scaled up by the share of trajectories that have a reward.

    A_i = α (R_i - mean_g), α = trajectories / those with R ≠ 0, Chu et al. 2025 (arXiv:2504.02546), as verl has
    it. A group of one has no mean and gets α R.
    """
    groups, scores = _groups(batch), trajectory_rewards(batch)
    rewarded = (scores[groups.counted] != 0).sum().clamp(min=1)
    scale = groups.counted.sum() / rewarded.to(scores.dtype)
    return _credit(batch, scale * groups.normalized(scores, by_deviation=False), whitened=config.whiten)


def raw(batch: Batch, config: BaselineConfig) -> tuple[Tensor, Tensor]:
    """The reward as it is: A_i = R_i, REINFORCE without a baseline (RLinf's `raw`)."""
    return _credit(batch, trajectory_rewards(batch), whitened=config.whiten)


def reinforce_plus_plus_baseline(batch: Batch, config: ReinforcePlusPlusBaselineConfig) -> tuple[Tensor, Tensor]:
    """Reward less its group's mean, then whitened over the tokens of the batch.

    x_i = R_i - mean_g, A = (x - mean) / std over own tokens, Hu et al. 2025 (arXiv:2501.03262). A group of one keeps
    its reward, as in verl.
    """
    advantage = _groups(batch).normalized(trajectory_rewards(batch), by_deviation=False)
    return _credit(batch, advantage, whitened=config.whiten)


def gdpo(batch: Batch, config: GdpoConfig) -> tuple[Tensor, Tensor]:
    """Each part of the reward compared within its group, then their weighted sum whitened over the batch.

    A = whiten(Σ_k w_k (r_k - mean_g) / (std_g + 1e-6)), Liu et al. 2026 (arXiv:2601.05242). It looks at
    `batch.parts` alone: a penalty that was laid on the rewards later doesn't enter, as in verl.

    Raises:
        ConfigError: the reward has no parts, or not one that `weights` names.
    """
    groups, parts = _groups(batch), batch.parts or {}
    weights = config.weights or dict.fromkeys(parts, 1.0)
    total = batch.rewards.new_zeros(len(batch.group))
    for name, weight in weights.items():
        if name not in parts:
            raise _no_part(name, parts)
        total = total + weight * groups.normalized(parts[name].to(total.dtype), by_deviation=config.normalize_by_std)
    if not weights:
        raise _no_part(None, parts)
    return _credit(batch, total, whitened=config.whiten)


def _no_part(name: str | None, parts: object) -> ConfigError:
    known = sorted(parts) if isinstance(parts, dict) else []
    close = nearest(name, known) if name else None
    told = f"; it has {', '.join(known)}" if known else ""
    return ConfigError(
        f"gdpo compares the parts of the reward, and the reward has no {f'part {name!r}' if name else 'parts'}{told}",
        key="algorithm.advantage.weights",
        value=name,
        hint=f"did you mean {close!r}?" if close else "let the reward function give a dict with a number for each part",
    )
