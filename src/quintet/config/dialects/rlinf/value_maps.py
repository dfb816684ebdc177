"""RLinf's names of native values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DTYPES: Mapping[Any, str] = {
    **dict.fromkeys(("bf16", "bf16-mixed"), "bfloat16"),
    **dict.fromkeys(("fp16", "16", "16-mixed", 16), "float16"),
    **dict.fromkeys(("fp32", "32", "32-true", 32), "float32"),
}
LEVELS = {"chunk_level": "chunk", "action_level": "action", "token_level": "token"}
LOSSES = {
    "ppo": "ppo",
    "actor": "ppo",
    "actor_critic": "ppo",
    "decoupled_actor_critic": "decoupled_ppo",
    "opd": "distillation",
    "embodied_sac": "sac",
    "embodied_nft": "nft",
}
"""The reference has `ppo`, the framework's source distinguishes `actor` and `actor_critic`."""
ADVANTAGES: Mapping[str | None, str] = {
    "grpo": "grpo",
    "gae": "gae",
    "raw": "raw",
    "grpo_dynamic": "grpo_dynamic",
    "reinpp": "reinforce_plus_plus",
    "reinpp_baseline": "reinforce_plus_plus_baseline",
    None: "none",
    "opd": "none",
    "embodied_sac": "none",
}
"""Distillation and SAC need no advantages."""
KL_ESTIMATORS = {
    "kl": "k1",
    "k1": "k1",
    "kl_penalty": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}
COMPONENTS = {
    "actor": "actor",
    "rollout": "rollout",
    "inference": "reference",
    "reward": "reward",
    "critic": "critic",
    "env": "envs",
}
"""Native components by the names in `cluster.component_placement`; `inference` computes the log-probs of the policy
and the reference."""
