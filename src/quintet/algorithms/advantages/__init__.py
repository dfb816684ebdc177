"""Advantages: how much better each token was than expected.

Each function takes a `Batch` and its own configuration and returns `(advantages, returns)`, float32
or float64 [N] like the batch's rewards, 0 outside the loss mask. They run over whole trajectories,
however many token sequences a sliding window made of them. Trajectories that the batch has no own
tokens of (it may be a part of a larger one) take part in no mean.
"""

from __future__ import annotations

from quintet.algorithms.advantages.critics import bi_level_gae, critic_mask, gae, turn_ends, turn_wise_gae
from quintet.algorithms.advantages.groups import Groups, group_statistics, own_tokens, played, trajectory_rewards
from quintet.algorithms.advantages.outcome import (
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    raw,
    reinforce_plus_plus_baseline,
    rloo,
)
from quintet.algorithms.advantages.registry import ADVANTAGES, Advantage, outside
from quintet.algorithms.advantages.returns import reinforce, remax
from quintet.algorithms.advantages.token_baselines import optimal_token_baseline
from quintet.algorithms.advantages.turns import gigpo, grpo_dynamic

__all__ = [
    "ADVANTAGES",
    "Advantage",
    "Groups",
    "bi_level_gae",
    "critic_mask",
    "gae",
    "gdpo",
    "gigpo",
    "gpg",
    "group_statistics",
    "grpo",
    "grpo_dynamic",
    "grpo_passk",
    "opo",
    "optimal_token_baseline",
    "outside",
    "own_tokens",
    "played",
    "raw",
    "reinforce",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "trajectory_rewards",
    "turn_ends",
    "turn_wise_gae",
]
