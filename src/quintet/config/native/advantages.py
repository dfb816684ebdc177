"""Estimators of advantages, each with the options that it has."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quintet.config.capability import Capability, Waits
from quintet.config.native.section import Section, Share

__all__ = [
    "AdvantageConfig",
    "BaselineConfig",
    "BiLevelGaeConfig",
    "GaeConfig",
    "GdpoConfig",
    "GigpoConfig",
    "GrpoConfig",
    "GrpoDynamicConfig",
    "NoAdvantageConfig",
    "OutsideAdvantageConfig",
    "PassKConfig",
    "ReinforcePlusPlusBaselineConfig",
    "ReinforcePlusPlusConfig",
    "ReturnConfig",
    "TokenBaselineConfig",
    "TurnWiseGaeConfig",
]


class GrpoConfig(Section):
    """Reward of a game against others: those from the same start (`grpo`), all of the step (`brpo`), or none
    (`arpo`: the reward as it is)."""

    name: Literal["grpo", "brpo", "arpo"] = "grpo"
    """Which estimator of advantages."""
    normalize_by_std: bool = True
    """Divide by the deviation of those rewards; false gives Dr. GRPO."""
    whiten: bool = False
    """Advantages to mean 0 and deviation 1 over the batch, after that."""


class PassKConfig(Section):
    """The best reply of a group alone is credited, by its lead over the second best."""

    name: Literal["grpo_passk"]
    """Which estimator of advantages."""
    normalize_by_std: bool = True
    """Divide by the deviation of the group's rewards."""
    whiten: bool = False
    """Advantages to mean 0 and deviation 1 over the batch, after that."""


class BaselineConfig(Section):
    """Reward of a game less a baseline: the mean of the others of its group (`rloo`), the group's mean weighted by
    length (`opo`), that of a greedy reply from the same start (`remax`), the group's mean scaled by the share of
    rewarded games (`gpg`), or 0 (`raw`)."""

    name: Literal["rloo", "opo", "remax", "gpg", "raw"]
    """Which estimator of advantages."""
    whiten: bool = False
    """Advantages to mean 0 and deviation 1 over the batch, after that."""


class ReturnConfig(Section):
    """The discounted sum of what follows, without a baseline."""

    name: Literal["reinforce"]
    """Which estimator of advantages."""
    gamma: Share = 1.0
    """Discount a token."""
    whiten: bool = False
    """Advantages to mean 0 and deviation 1 over the batch."""


class ReinforcePlusPlusConfig(Section):
    """The discounted sum of what follows, against the mean of the batch."""

    name: Literal["reinforce_plus_plus"]
    """Which estimator of advantages."""
    gamma: Share = 1.0
    """Discount a token."""
    whiten: bool = True
    """Advantages to mean 0 and deviation 1 over the batch; published so."""


class ReinforcePlusPlusBaselineConfig(Section):
    """Reward of a game less its group's mean, against the deviation of the batch."""

    name: Literal["reinforce_plus_plus_baseline"]
    """Which estimator of advantages."""
    whiten: bool = True
    """Advantages to mean 0 and deviation 1 over the batch; published so."""


class GdpoConfig(Section):
    """Each part of the reward is compared within its group by itself, then their weighted sum over the batch."""

    name: Literal["gdpo"]
    """Which estimator of advantages."""
    weights: Annotated[dict[str, float], Field(default_factory=dict)]
    """Weight of each part of the reward, by the name under which the reward function gives it; none given takes
    all parts alike."""
    normalize_by_std: bool = True
    """Divide each part by the deviation within its group."""
    whiten: bool = True
    """Their sum to mean 0 and deviation 1 over the batch; published so."""


class GaeConfig(Section):
    """Generalised advantage estimation over the policy's own tokens, with a critic."""

    name: Literal["gae"] = "gae"
    """Which estimator of advantages."""
    gamma: Share = 1.0
    """Discount a token."""
    lam: Share = 0.95
    """Weight of longer returns."""
    whiten: bool = True
    """Advantages to mean 0 and deviation 1 over the batch."""


class BiLevelGaeConfig(Section):
    """GAE over turns with a discount of its own, then over the tokens inside each turn."""

    name: Literal["bi_level_gae"] = "bi_level_gae"
    """Which estimator of advantages."""
    gamma: Share = 1.0
    """Discount a token, inside a turn."""
    lam: Share = 0.95
    """Weight of longer returns (λ)."""
    turn_gamma: Share = 0.95
    """Discount a turn."""
    turn_lam: Share = 0.95
    """Weight of longer returns over turns (λ)."""
    turn_ends: Literal["turns", "rewards"] = "turns"
    """What ends a turn: its last token, or, as in RAGEN's code, every reward that isn't 0."""
    whiten: bool = True
    """Advantages to mean 0 and deviation 1 over the batch."""


class TurnWiseGaeConfig(Section):
    """GAE over turns: every token of a turn has its turn's advantage, and the critic learns at turn ends alone."""

    name: Literal["turn_wise_gae"]
    """Which estimator of advantages."""
    gamma: Share = 1.0
    """Discount a turn."""
    lam: Share = 0.95
    """Weight of longer returns over turns (λ)."""
    whiten: bool = True
    """Advantages to mean 0 and deviation 1 over the turns of the batch."""


class TokenBaselineConfig(Section):
    """The return of each token less the baseline of least variance at its place in the group; `tir_` leaves out
    what the world said when it counts places."""

    name: Literal["optimal_token_baseline", "tir_optimal_token_baseline"]
    """Which estimator of advantages."""
    zero_tail: bool = True
    """No baseline beyond the second longest reply of a group, where the longest has nobody to compare with."""
    whiten: bool = False
    """Advantages to mean 0 and deviation 1 over the batch, after that."""


class GrpoDynamicConfig(Section):
    """`grpo` of whole games or of their turns (RLinf)."""

    name: Literal["grpo_dynamic"]
    """Which estimator of advantages."""
    level: Literal["trajectory", "turn"] = "trajectory"
    """What is compared within a group: games by their whole reward, or turns by their own."""
    normalize_by_std: bool = True
    """Divide by the deviation of those rewards."""
    whiten: bool = False
    """Advantages to mean 0 and deviation 1 over the batch, after that."""


class GigpoConfig(Section):
    """Games compared within their group, and turns with those of the group that saw the same."""

    name: Literal["gigpo"]
    """Which estimator of advantages."""
    turn_gamma: Share = 0.95
    """Discount a turn."""
    game_weight: float = 1.0
    """Weight of the comparison of games …"""
    turn_weight: float = 1.0
    """… and of that of turns."""
    normalize_by_std: bool = True
    """Divide by the deviations."""
    whiten: bool = False
    """Advantages to mean 0 and deviation 1 over the batch, after that."""


class NoAdvantageConfig(Section):
    """No estimator, for what is learnt without one."""

    waits: ClassVar = Waits(Capability.EMBODIED)

    name: Literal["none"]
    """Which estimator of advantages."""
    whiten: bool = False
    """Has no effect."""


class OutsideAdvantageConfig(Section):
    """A function of your own: `(batch, options) -> (advantages, returns)`, both [N] like `batch.rewards`."""

    name: Literal["outside"]
    """Which estimator of advantages."""
    function: str
    """`file.py:function`, `module:function`, or a name that another package registered."""
    options: Annotated[dict[str, Any], Field(default_factory=dict)]
    """What the function is given besides the batch."""
    needs_critic: bool = False
    """A critic is trained, and the batch has its values."""
    whiten: bool = False
    """Advantages to mean 0 and deviation 1 over the batch, after that."""


AdvantageConfig = Annotated[
    GrpoConfig
    | PassKConfig
    | BaselineConfig
    | ReturnConfig
    | ReinforcePlusPlusConfig
    | ReinforcePlusPlusBaselineConfig
    | GdpoConfig
    | GaeConfig
    | BiLevelGaeConfig
    | TurnWiseGaeConfig
    | TokenBaselineConfig
    | GrpoDynamicConfig
    | GigpoConfig
    | NoAdvantageConfig
    | OutsideAdvantageConfig,
    Field(discriminator="name"),
]
