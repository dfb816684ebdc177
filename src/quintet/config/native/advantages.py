"""Configuration of each advantage estimator, and what the estimator needs of a run."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field

from quintet.config.capabilities import Capability, Requires
from quintet.config.native.registry_union import RegistryUnion
from quintet.config.native.section import Section, Share
from quintet.registry import Registry


class AdvantageSection(Section):
    """Base class of the configuration of an advantage estimator."""

    uses_values: ClassVar[bool] = False
    """Reads `Batch.values`: the run trains a critic."""
    needs_greedy_baseline: ClassVar[bool] = False
    """Reads `Batch.baseline`: one greedy episode is collected per group."""
    needs_sum_squared_probs: ClassVar[bool] = False
    """Reads `Batch.sum_squared_probs`."""
    needs_several_samples: ClassVar[bool] = False
    """Refuses `training.samples_per_group: 1`."""
    zero_for_equal_rewards: ClassVar[bool] = False
    """Groups whose episodes all have the same reward get advantage 0, unless advantages are whitened."""
    recurses_over_tokens: ClassVar[bool] = False
    """Runs backwards over the tokens of an episode: `algorithm.advantage_over_response_tokens` has an effect."""
    values_at_turn_ends_only: ClassVar[bool] = False
    """Returns are defined, and advantages whitened, at the last token of each turn only."""

    name: str
    """Advantage estimator."""
    whiten: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over the batch."""

    @property
    def trains_critic(self) -> bool:
        """Whether a critic is trained for this estimator."""
        return self.uses_values


class GrpoConfig(AdvantageSection):
    """Reward of an episode relative to the other episodes of its group (GRPO)."""

    needs_several_samples: ClassVar[bool] = True
    zero_for_equal_rewards: ClassVar[bool] = True

    name: Literal["grpo"] = "grpo"
    """Advantage estimator."""
    normalize_by_std: bool = True
    """Divide by the standard deviation of these rewards; false gives Dr. GRPO."""


class BrpoConfig(AdvantageSection):
    """Reward of an episode relative to all episodes of the step (BRPO)."""

    name: Literal["brpo"] = "brpo"
    """Advantage estimator."""
    normalize_by_std: bool = True
    """Divide by the standard deviation of these rewards."""


class ArpoConfig(AdvantageSection):
    """Unnormalized reward of an episode (RAGEN's ARPO)."""

    name: Literal["arpo"] = "arpo"
    """Advantage estimator."""
    normalize_by_std: bool = True
    """Has no effect: every episode is its own group, and a group of one is not normalized."""


class PassKConfig(AdvantageSection):
    """Only the best response of a group is credited, by its lead over the second best (Pass@k GRPO)."""

    needs_several_samples: ClassVar[bool] = True
    zero_for_equal_rewards: ClassVar[bool] = True

    name: Literal["grpo_passk"] = "grpo_passk"
    """Advantage estimator."""
    normalize_by_std: bool = True
    """Divide by the standard deviation of the group's rewards."""


class RlooConfig(AdvantageSection):
    """Reward of an episode minus the mean reward of the other episodes of its group (RLOO)."""

    zero_for_equal_rewards: ClassVar[bool] = True

    name: Literal["rloo"] = "rloo"
    """Advantage estimator."""


class OpoConfig(AdvantageSection):
    """Reward of an episode minus the length-weighted mean reward of its group (OPO)."""

    zero_for_equal_rewards: ClassVar[bool] = True

    name: Literal["opo"] = "opo"
    """Advantage estimator."""


class RemaxConfig(AdvantageSection):
    """Reward of an episode minus the reward of a greedy episode from the same start state (ReMax)."""

    needs_greedy_baseline: ClassVar[bool] = True

    name: Literal["remax"] = "remax"
    """Advantage estimator."""


class GpgConfig(AdvantageSection):
    """Reward of an episode minus the mean of its group, scaled by the share of rewarded episodes (GPG)."""

    zero_for_equal_rewards: ClassVar[bool] = True

    name: Literal["gpg"] = "gpg"
    """Advantage estimator."""


class RawConfig(AdvantageSection):
    """Unchanged reward of an episode."""

    name: Literal["raw"] = "raw"
    """Advantage estimator."""


class ReinforceConfig(AdvantageSection):
    """Discounted return of each token, without a baseline (REINFORCE)."""

    recurses_over_tokens: ClassVar[bool] = True

    name: Literal["reinforce"] = "reinforce"
    """Advantage estimator."""
    gamma: Share = 1.0
    """Discount factor per token."""


class ReinforcePlusPlusConfig(AdvantageSection):
    """Discounted return of each token, whitened over the batch (REINFORCE++)."""

    recurses_over_tokens: ClassVar[bool] = True

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """Advantage estimator."""
    gamma: Share = 1.0
    """Discount factor per token."""
    whiten: bool = True
    """Normalize advantages to mean 0 and standard deviation 1 over the batch, as published."""


class ReinforcePlusPlusBaselineConfig(AdvantageSection):
    """Reward of an episode minus the mean of its group, whitened over the batch (REINFORCE++ with baseline)."""

    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    """Advantage estimator."""
    whiten: bool = True
    """Normalize advantages to mean 0 and standard deviation 1 over the batch, as published."""


class GdpoConfig(AdvantageSection):
    """Each part of the reward normalized within its group, then their weighted sum whitened over the batch (GDPO)."""

    needs_several_samples: ClassVar[bool] = True

    name: Literal["gdpo"] = "gdpo"
    """Advantage estimator."""
    weights: Annotated[dict[str, float], Field(default_factory=dict)]
    """Weight of each part of the reward by the name that the reward function gives it; empty weighs all parts
    equally."""
    normalize_by_std: bool = True
    """Divide each part by its standard deviation within the group."""
    whiten: bool = True
    """Normalize the sum to mean 0 and standard deviation 1 over the batch, as published."""


class GaeConfig(AdvantageSection):
    """Generalized advantage estimation over response tokens, with a critic."""

    uses_values: ClassVar[bool] = True
    recurses_over_tokens: ClassVar[bool] = True

    name: Literal["gae"] = "gae"
    """Advantage estimator."""
    gamma: Share = 1.0
    """Discount factor per token."""
    lam: Share = 0.95
    """GAE λ: weight of longer returns."""
    whiten: bool = True
    """Normalize advantages to mean 0 and standard deviation 1 over the batch."""


class BiLevelGaeConfig(AdvantageSection):
    """GAE over turns with a separate discount, then over the tokens inside each turn."""

    uses_values: ClassVar[bool] = True
    recurses_over_tokens: ClassVar[bool] = True

    name: Literal["bi_level_gae"] = "bi_level_gae"
    """Advantage estimator."""
    gamma: Share = 1.0
    """Discount factor per token inside a turn."""
    lam: Share = 0.95
    """GAE λ inside a turn."""
    turn_gamma: Share = 0.95
    """Discount factor per turn."""
    turn_lam: Share = 0.95
    """GAE λ over turns."""
    turn_ends: Literal["turns", "rewards"] = "turns"
    """A turn ends at its last token (`turns`) or, as in RAGEN's code, at each nonzero reward (`rewards`)."""
    whiten: bool = True
    """Normalize advantages to mean 0 and standard deviation 1 over the batch."""


class TurnWiseGaeConfig(AdvantageSection):
    """GAE over turns: all tokens of a turn share its advantage, and the critic learns at turn ends only."""

    uses_values: ClassVar[bool] = True
    recurses_over_tokens: ClassVar[bool] = True
    values_at_turn_ends_only: ClassVar[bool] = True

    name: Literal["turn_wise_gae"] = "turn_wise_gae"
    """Advantage estimator."""
    gamma: Share = 1.0
    """Discount factor per turn."""
    lam: Share = 0.95
    """GAE λ over turns."""
    whiten: bool = True
    """Normalize advantages to mean 0 and standard deviation 1 over the turns of the batch."""


class TokenBaselineSection(AdvantageSection):
    """Return of each token minus the minimum-variance baseline at its position in the group."""

    needs_sum_squared_probs: ClassVar[bool] = True
    counts_response_tokens_only: ClassVar[bool] = False
    """Positions count response tokens only, not observations."""

    zero_tail: bool = True
    """Use no baseline for tokens of the longest response beyond the length of the second longest: there is nothing to
    compare them with."""


class OptimalTokenBaselineConfig(TokenBaselineSection):
    """Return of each token minus the minimum-variance baseline at its position, observations included (OTB)."""

    name: Literal["optimal_token_baseline"] = "optimal_token_baseline"
    """Advantage estimator."""


class TirOptimalTokenBaselineConfig(TokenBaselineSection):
    """Return of each token minus the minimum-variance baseline at its position, observations not counted (OTB for
    tool-integrated reasoning)."""

    counts_response_tokens_only: ClassVar[bool] = True

    name: Literal["tir_optimal_token_baseline"] = "tir_optimal_token_baseline"
    """Advantage estimator."""


class GrpoDynamicConfig(AdvantageSection):
    """GRPO over whole episodes or over turns (RLinf)."""

    needs_several_samples: ClassVar[bool] = True

    name: Literal["grpo_dynamic"] = "grpo_dynamic"
    """Advantage estimator."""
    level: Literal["trajectory", "turn"] = "trajectory"
    """Compare episodes by their total reward, or turns by the reward of the turn, within a group."""
    normalize_by_std: bool = True
    """Divide by the standard deviation of these rewards."""


class GigpoConfig(AdvantageSection):
    """Episodes compared within their group, plus turns compared with turns that saw the same observation (GiGPO)."""

    name: Literal["gigpo"] = "gigpo"
    """Advantage estimator."""
    turn_gamma: Share = 0.95
    """Discount factor per turn."""
    episode_weight: float = 1.0
    """Weight of the comparison of episodes."""
    turn_weight: float = 1.0
    """Weight of the comparison of turns."""
    normalize_by_std: bool = True
    """Divide by the standard deviations."""


class NoAdvantageConfig(AdvantageSection):
    """No advantages, for losses that need none."""

    requires: ClassVar = Requires(Capability.EMBODIED)

    name: Literal["none"] = "none"
    """Advantage estimator."""


class OutsideAdvantageConfig(AdvantageSection):
    """Custom function `(batch, options) -> (advantages, returns)`, both [N] like `batch.rewards`."""

    name: Literal["outside"] = "outside"
    """Advantage estimator."""
    function: str
    """`file.py:function`, `module:function`, or a name that another package registers."""
    options: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Second argument of the function; validated by the function's `config_class`, if it has one."""
    needs_critic: bool = False
    """Train a critic; the batch has its values."""

    @property
    def trains_critic(self) -> bool:
        return self.needs_critic


ADVANTAGES: Registry[Any] = Registry("advantage estimator", entry_points="quintet.advantages")
"""Estimators `(batch, config) -> (advantages [N], returns [N])`; see `quintet.algorithms.advantages`."""
_HOME = "quintet.algorithms.advantages"
for _name, _target, _config, _help in (
    ("grpo", "outcome:grpo", GrpoConfig, "reward relative to the other episodes of the group"),
    ("brpo", "outcome:brpo", BrpoConfig, "reward relative to all episodes of the step"),
    ("arpo", "outcome:arpo", ArpoConfig, "unchanged reward of the episode"),
    ("grpo_passk", "outcome:grpo_passk", PassKConfig, "lead of the best response of a group over the second best"),
    ("rloo", "outcome:rloo", RlooConfig, "reward minus the mean of the other episodes of the group"),
    ("opo", "outcome:opo", OpoConfig, "reward minus the length-weighted mean of the group"),
    ("remax", "returns:remax", RemaxConfig, "reward minus the reward of a greedy episode from the same start state"),
    ("gpg", "outcome:gpg", GpgConfig, "reward minus the group mean, scaled by the share of rewarded episodes"),
    ("raw", "outcome:raw", RawConfig, "unchanged reward of the episode"),
    ("reinforce", "returns:reinforce", ReinforceConfig, "discounted return of each token"),
    (
        "reinforce_plus_plus",
        "returns:reinforce",
        ReinforcePlusPlusConfig,
        "discounted return of each token, whitened over the batch",
    ),
    (
        "reinforce_plus_plus_baseline",
        "outcome:reinforce_plus_plus_baseline",
        ReinforcePlusPlusBaselineConfig,
        "reward minus the group mean, whitened over the batch",
    ),
    ("gdpo", "outcome:gdpo", GdpoConfig, "weighted sum of the reward's parts, each normalized within its group"),
    ("gae", "critics:gae", GaeConfig, "generalized advantage estimation with a critic"),
    ("bi_level_gae", "critics:bi_level_gae", BiLevelGaeConfig, "GAE over turns, then inside turns"),
    ("turn_wise_gae", "critics:turn_wise_gae", TurnWiseGaeConfig, "GAE over turns, one advantage per turn"),
    (
        "optimal_token_baseline",
        "token_baselines:optimal_token_baseline",
        OptimalTokenBaselineConfig,
        "return minus the minimum-variance baseline at the token's position in the group",
    ),
    (
        "tir_optimal_token_baseline",
        "token_baselines:optimal_token_baseline",
        TirOptimalTokenBaselineConfig,
        "the same, with positions counted in response tokens only",
    ),
    ("grpo_dynamic", "turns:grpo_dynamic", GrpoDynamicConfig, "GRPO over episodes or over turns"),
    ("gigpo", "turns:gigpo", GigpoConfig, "GRPO over episodes, plus turns that saw the same observation"),
    ("outside", "outside:outside", OutsideAdvantageConfig, "a function of your own"),
):
    ADVANTAGES.add(_name, f"{_HOME}.{_target}", help=_help, config=_config)

ADVANTAGE_UNION = RegistryUnion(ADVANTAGES, AdvantageSection, others=(NoAdvantageConfig,))
AdvantageConfig = Annotated[AdvantageSection, ADVANTAGE_UNION]


def advantage_class(name: str) -> type[AdvantageSection]:
    """Return the config class of the estimator of that name, with its requirements as class attributes.

    >>> advantage_class("bi_level_gae").uses_values
    True
    """
    return cast("type[AdvantageSection]", ADVANTAGE_UNION.config_class(name))
