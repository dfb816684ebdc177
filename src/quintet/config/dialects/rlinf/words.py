"""What RLinf calls otherwise than the native schema, and values that several of its tables take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quintet.config.dialects.takes import Takes, choice, either, list_of, optional

__all__ = [
    "ADVANTAGES",
    "COMPONENTS",
    "DTYPES",
    "KL",
    "LEVELS",
    "LOCAL_LOGGERS",
    "LOGGERS",
    "LOSSES",
    "NO_CLIPPING",
    "PRECISION",
    "PROOF",
]

PROOF = "tests/unit/config/dialects/test_rlinf.py::test_a_key_reaches_the_run"

DTYPES: Mapping[Any, str] = {
    **dict.fromkeys(("bf16", "bf16-mixed"), "bfloat16"),
    **dict.fromkeys(("fp16", "16", "16-mixed", 16), "float16"),
    **dict.fromkeys(("fp32", "32", "32-true", 32), "float32"),
}
"""Its spellings of number types."""
PRECISION = choice(*DTYPES)

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
"""The reference says `ppo` where the framework's source tells `actor` and `actor_critic` apart."""

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
"""Its estimators of advantages; distillation and SAC make none."""

KL = {
    "kl": "k1",
    "k1": "k1",
    "kl_penalty": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}

COMPONENTS = ("actor", "rollout", "inference", "reward", "critic", "env")
"""What a line of `cluster.component_placement` can place."""

NO_CLIPPING = 1.0e9
"""A global norm that no gradient reaches: Megatron's 0."""


def _loggers(*names: str) -> Takes:
    return optional(either(choice(*names), list_of(choice(*names))))


LOGGERS = _loggers("tensorboard", "wandb", "swanlab")
LOCAL_LOGGERS = _loggers("tensorboard", "wandb")
"""Those of them that this version has."""
