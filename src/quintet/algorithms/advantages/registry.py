"""The estimators by name."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quintet.algorithms.advantages import critics, outcome, returns, token_baselines, turns
from quintet.algorithms.tokens import whiten
from quintet.config.native import advantages as configs
from quintet.errors import ConfigError
from quintet.records import Batch
from quintet.registry import Registry, load_outside

__all__ = ["ADVANTAGES", "Advantage", "outside"]

ENTRY_POINTS = "quintet.advantages"
"""Group through which other packages add estimators."""


class Advantage(Protocol):
    """`(batch, config) -> (advantages [N], returns [N])`."""

    def __call__(self, batch: Batch, config: object, /) -> tuple[Tensor, Tensor]: ...


def outside(batch: Batch, config: configs.OutsideAdvantageConfig) -> tuple[Tensor, Tensor]:
    """A user's own function, `(batch, options) -> (advantages [N], returns [N])`; what it says outside the loss
    mask is put to 0.

    Raises:
        ConfigError: it can't be loaded, or gives something else.
    """
    key = "algorithm.advantage.function"
    found = load_outside(config.function, key, ENTRY_POINTS)(batch, config.options)
    if not _is_pair(found, len(batch.tokens)):
        raise ConfigError(
            f"{key} = {config.function!r} must give (advantages, returns), a tensor each with one number a token",
            key=key,
            value=config.function,
            hint="both have the shape of batch.rewards",
        )
    advantages, followed = (torch.where(batch.loss_mask, x.to(batch.rewards.dtype), 0.0) for x in found)
    return (whiten(advantages, batch.loss_mask) if config.whiten else advantages), followed


def _is_pair(found: object, size: int) -> bool:
    if not isinstance(found, tuple | list) or len(found) != 2:
        return False
    return all(isinstance(values, Tensor) and values.shape == (size,) for values in found)


ADVANTAGES: Registry[tuple[Tensor, Tensor]] = Registry("advantage", entry_points=ENTRY_POINTS)
for _name, _function, _config, _help in (
    ("grpo", outcome.grpo, configs.GrpoConfig, "reward against the other games from the same start"),
    ("brpo", outcome.grpo, configs.GrpoConfig, "reward against all games of the step"),
    ("arpo", outcome.grpo, configs.GrpoConfig, "reward as it is"),
    ("grpo_passk", outcome.grpo_passk, configs.PassKConfig, "the best of a group, by its lead over the second"),
    ("rloo", outcome.rloo, configs.BaselineConfig, "reward less the mean of the others of its group"),
    ("opo", outcome.opo, configs.BaselineConfig, "reward less the group's mean weighted by length"),
    ("remax", returns.remax, configs.BaselineConfig, "reward less that of a greedy game from the same start"),
    ("gpg", outcome.gpg, configs.BaselineConfig, "reward less the group's mean, scaled by how many are rewarded"),
    ("raw", outcome.raw, configs.BaselineConfig, "reward as it is"),
    ("reinforce", returns.reinforce, configs.ReturnConfig, "discounted sum of what follows each token"),
    (
        "reinforce_plus_plus",
        returns.reinforce,
        configs.ReinforcePlusPlusConfig,
        "discounted sum of what follows each token, whitened over the batch",
    ),
    (
        "reinforce_plus_plus_baseline",
        outcome.reinforce_plus_plus_baseline,
        configs.ReinforcePlusPlusBaselineConfig,
        "reward less the group's mean, whitened over the batch",
    ),
    ("gdpo", outcome.gdpo, configs.GdpoConfig, "each part of the reward compared within its group by itself"),
    ("gae", critics.gae, configs.GaeConfig, "generalised advantage estimation with a critic"),
    ("bi_level_gae", critics.bi_level_gae, configs.BiLevelGaeConfig, "GAE over turns, then inside turns"),
    ("turn_wise_gae", critics.turn_wise_gae, configs.TurnWiseGaeConfig, "GAE over turns, one advantage a turn"),
    (
        "optimal_token_baseline",
        token_baselines.optimal_token_baseline,
        configs.TokenBaselineConfig,
        "what follows a token, less the group's baseline of least variance at its place",
    ),
    (
        "tir_optimal_token_baseline",
        token_baselines.optimal_token_baseline,
        configs.TokenBaselineConfig,
        "the same, places counted without what the world said",
    ),
    ("grpo_dynamic", turns.grpo_dynamic, configs.GrpoDynamicConfig, "grpo of games, or of their turns"),
    ("gigpo", turns.gigpo, configs.GigpoConfig, "grpo of games, plus turns that answered the same words"),
    ("outside", outside, configs.OutsideAdvantageConfig, "a function of your own"),
):
    ADVANTAGES.add(_name, _function, help=_help, config=_config)
