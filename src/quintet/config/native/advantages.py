"""Configuration of each advantage estimator, and what the estimator needs of a run."""

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from quintet.config.capabilities import Capability, Requires
from quintet.config.native.registry_union import NamedSection, RegistryUnion, register
from quintet.config.native.section import RunsCode, Share
from quintet.registry import Registry

ADVANTAGES: Registry[Any] = Registry("advantage estimator", entry_points="quintet.advantages")
"""Estimators `(batch, config) -> (advantages [N], returns [N])`; see `quintet.algorithms.advantages`."""
_register = partial(register, ADVANTAGES, "quintet.algorithms.advantages")


TurnValue = Literal["last", "first"]


class AdvantageSection(NamedSection):
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
    compares_within_group: ClassVar[bool] = False
    """Without whitening, the advantages of an episode depend on its own group alone, so that a group can be trained
    before others are complete."""
    recurses_over_tokens: ClassVar[bool] = False
    """Runs backwards over the tokens of an episode: `algorithm.advantage_over_response_tokens` has an effect."""
    supports_chunks: ClassVar[bool] = False
    """Is defined for chunks of robot actions; see `quintet.algorithms.chunks`."""

    name: str = ""
    """Advantage estimator."""
    whiten: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over the batch."""

    @property
    def trains_critic(self) -> bool:
        """Whether a critic is trained for this estimator."""
        return self.uses_values

    @property
    def whitens_over_turns(self) -> bool:
        """Whether advantages are whitened by mean and standard deviation over turns, not over tokens."""
        return False


@_register("outcome:grpo", "reward relative to the other episodes of the group")
class GrpoConfig(AdvantageSection, name="grpo"):
    """Reward of an episode relative to the other episodes of its group (GRPO)."""

    compares_within_group: ClassVar[bool] = True
    supports_chunks: ClassVar[bool] = True
    needs_several_samples: ClassVar[bool] = True
    zero_for_equal_rewards: ClassVar[bool] = True

    normalize_by_std: bool = True
    """Divide by the standard deviation of these rewards; false gives Dr. GRPO."""
    length_weight: bool = False
    """Divide the advantages of an episode by its response tokens relative to their mean over the batch, so that short
    episodes count as much as long ones."""
    deviation_weight: bool = False
    """Multiply the advantages of a group by its standard deviation of rewards relative to the largest one of the batch
    (RAGEN's soft reweighting)."""


@_register("outcome:brpo", "reward relative to all episodes of the step")
class BrpoConfig(AdvantageSection, name="brpo"):
    """Reward of an episode relative to all episodes of the step (BRPO)."""

    normalize_by_std: bool = True
    """Divide by the standard deviation of these rewards."""


@_register("outcome:arpo", "unchanged reward of the episode")
class ArpoConfig(AdvantageSection, name="arpo"):
    """Unnormalized reward of an episode (RAGEN's ARPO)."""

    compares_within_group: ClassVar[bool] = True

    normalize_by_std: bool = True
    """Has no effect: every episode is its own group, and a group of one is not normalized."""


@_register("outcome:grpo_passk", "lead of the best response of a group over the second best")
class PassKConfig(GrpoConfig, name="grpo_passk"):
    """Only the best response of a group is credited, by its lead over the second best (Pass@k GRPO)."""

    supports_chunks: ClassVar[bool] = False

    normalize_by_std: bool = True
    """Divide by the standard deviation of the group's rewards."""


@_register("outcome:rloo", "reward minus the mean of the other episodes of the group")
class RlooConfig(AdvantageSection, name="rloo"):
    """Reward of an episode minus the mean reward of the other episodes of its group (RLOO)."""

    compares_within_group: ClassVar[bool] = True
    zero_for_equal_rewards: ClassVar[bool] = True


@_register("outcome:opo", "reward minus the length-weighted mean of the group")
class OpoConfig(AdvantageSection, name="opo"):
    """Reward of an episode minus the length-weighted mean reward of its group (OPO)."""

    compares_within_group: ClassVar[bool] = True
    zero_for_equal_rewards: ClassVar[bool] = True


@_register("returns:remax", "reward minus the reward of a greedy episode from the same start state")
class RemaxConfig(AdvantageSection, name="remax"):
    """Reward of an episode minus the reward of a greedy episode from the same start state (ReMax)."""

    needs_greedy_baseline: ClassVar[bool] = True


@_register("outcome:gpg", "reward minus the group mean, scaled by the share of rewarded episodes")
class GpgConfig(AdvantageSection, name="gpg"):
    """Reward of an episode minus the mean of its group, scaled by the share of rewarded episodes (GPG)."""

    zero_for_equal_rewards: ClassVar[bool] = True


@_register("outcome:raw", "unchanged reward of the episode")
class RawConfig(AdvantageSection, name="raw"):
    """Unchanged reward of an episode."""

    compares_within_group: ClassVar[bool] = True
    supports_chunks: ClassVar[bool] = True

    length_weight: bool = False
    """Divide the advantages of an episode by its response tokens relative to their mean over the batch."""


@_register("returns:reinforce", "discounted return of each token")
class ReinforceConfig(AdvantageSection, name="reinforce"):
    """Discounted return of each token, without a baseline (REINFORCE)."""

    compares_within_group: ClassVar[bool] = True
    supports_chunks: ClassVar[bool] = True
    recurses_over_tokens: ClassVar[bool] = True

    gamma: Share = 1.0
    """Discount factor per token."""


@_register("returns:reinforce", "discounted return of each token, whitened over the batch")
class ReinforcePlusPlusConfig(ReinforceConfig, name="reinforce_plus_plus"):
    """Discounted return of each token, whitened over the batch (REINFORCE++)."""

    whiten: bool = True
    """Normalize advantages to mean 0 and standard deviation 1 over the batch, as published."""


@_register("outcome:reinforce_plus_plus_baseline", "reward minus the group mean, whitened over the batch")
class ReinforcePlusPlusBaselineConfig(AdvantageSection, name="reinforce_plus_plus_baseline"):
    """Reward of an episode minus the mean of its group, whitened over the batch (REINFORCE++ with baseline)."""

    compares_within_group: ClassVar[bool] = True
    supports_chunks: ClassVar[bool] = True

    whiten: bool = True
    """Normalize advantages to mean 0 and standard deviation 1 over the batch, as published."""


@_register("outcome:gdpo", "weighted sum of the reward's parts, each normalized within its group")
class GdpoConfig(AdvantageSection, name="gdpo"):
    """GDPO: normalize each part of the reward within its group, then whiten their weighted sum over the batch."""

    compares_within_group: ClassVar[bool] = True
    needs_several_samples: ClassVar[bool] = True

    weights: Annotated[dict[str, float], Field(default_factory=dict)]
    """Weight of each part of the reward by the name that the reward function gives it; empty weighs all parts
    equally."""
    normalize_by_std: bool = True
    """Divide each part by its standard deviation within the group."""
    whiten: bool = True
    """Normalize the sum to mean 0 and standard deviation 1 over the batch, as published."""


@_register("gae:gae", "generalized advantage estimation with a critic")
class GaeConfig(AdvantageSection, name="gae"):
    """Generalized advantage estimation over response tokens, with a critic."""

    uses_values: ClassVar[bool] = True
    recurses_over_tokens: ClassVar[bool] = True
    supports_chunks: ClassVar[bool] = True

    gamma: Share = 1.0
    """Discount factor per token."""
    lam: Share = 0.95
    """GAE λ: weight of longer returns."""
    whiten: bool = True
    """Normalize advantages to mean 0 and standard deviation 1 over the batch."""


@_register("gae:bi_level_gae", "GAE over turns, then inside turns")
class BiLevelGaeConfig(GaeConfig, name="bi_level_gae"):
    """GAE over turns with a separate discount, then over the tokens inside each turn."""

    supports_chunks: ClassVar[bool] = False

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
    turn_value: TurnValue = "last"
    """Token whose value is that of a turn in the estimate over turns: the last one of a response, or the first one."""


@_register("gae:turn_wise_gae", "GAE over turns, one advantage per turn")
class TurnWiseGaeConfig(GaeConfig, name="turn_wise_gae"):
    """GAE over turns: all tokens of a turn share its advantage, and the critic learns at turn ends only."""

    supports_chunks: ClassVar[bool] = False

    gamma: Share = 1.0
    """Discount factor per turn."""
    lam: Share = 0.95
    """GAE λ over turns."""
    whiten: bool = True
    """Normalize advantages to mean 0 and standard deviation 1 over the batch."""
    whiten_over: Literal["turns", "tokens"] = "turns"
    """What mean and standard deviation are over: the turns, or all response tokens, so that long turns count more."""
    turn_value: TurnValue = "last"
    """Token at which the critic learns the value of a turn: the last one of a response, or the first one."""

    @property
    def whitens_over_turns(self) -> bool:
        return self.whiten_over == "turns"


class TokenBaselineSection(AdvantageSection):
    """Return of each token minus the minimum-variance baseline at its position in the group."""

    needs_sum_squared_probs: ClassVar[bool] = True
    counts_response_tokens_only: ClassVar[bool] = False
    """Positions count response tokens only, not observations."""

    zero_tail: bool = True
    """Use no baseline for tokens of the longest response beyond the length of the second longest: there is nothing to
    compare them with."""


@_register(
    "token_baselines:optimal_token_baseline",
    "return minus the minimum-variance baseline at the token's position in the group",
)
class OptimalTokenBaselineConfig(TokenBaselineSection, name="optimal_token_baseline"):
    """Return of each token minus the minimum-variance baseline at its position, observations included (OTB)."""


@_register("token_baselines:optimal_token_baseline", "the same, with positions counted in response tokens only")
class TirOptimalTokenBaselineConfig(TokenBaselineSection, name="tir_optimal_token_baseline"):
    """Return of each token minus the minimum-variance baseline at its position, observations not counted (OTB for
    tool-integrated reasoning)."""

    counts_response_tokens_only: ClassVar[bool] = True


@_register("turns:grpo_dynamic", "GRPO over episodes or over turns")
class GrpoDynamicConfig(AdvantageSection, name="grpo_dynamic"):
    """GRPO over whole episodes or over turns (RLinf)."""

    compares_within_group: ClassVar[bool] = True
    needs_several_samples: ClassVar[bool] = True

    level: Literal["trajectory", "turn"] = "trajectory"
    """Compare episodes by their total reward, or turns by the reward of the turn, within a group."""
    normalize_by_std: bool = True
    """Divide by the standard deviation of these rewards."""


@_register("turns:gigpo", "GRPO over episodes, plus turns that saw the same observation")
class GigpoConfig(AdvantageSection, name="gigpo"):
    """Episodes compared within their group, plus turns compared with turns that saw the same observation (GiGPO)."""

    compare: Literal["episodes", "turns"] = "episodes"
    """What is compared within the group: the rewards of its episodes, or the discounted returns of all their turns
    (VAGEN's `turn_update_grpo`)."""
    turn_gamma: Share = 0.95
    """Discount factor per turn."""
    episode_weight: float = 1.0
    """Weight of the comparison of episodes."""
    turn_weight: float = 1.0
    """Weight of the comparison of turns."""
    normalize_by_std: bool = True
    """Divide by the standard deviations."""


@_register("turns:step_reinforce", "discounted return of each turn, relative to those of other turns")
class StepReinforceConfig(AdvantageSection, name="step_reinforce"):
    """Discounted return of each turn, compared with the returns of all turns of its group or of the batch (ROLL)."""

    compares_within_group: ClassVar[bool] = True

    turn_gamma: Share = 0.95
    """Discount factor per turn."""
    center: Literal["none", "group", "batch"] = "group"
    """Turns whose mean return is subtracted."""
    divide: Literal["none", "group", "batch"] = "group"
    """Turns by whose standard deviation of returns is divided; with fewer than two, or equal returns, the advantage is
    0."""


@_register("turns:agentic_reinforce", "total reward of the episode, discounted by the turns that follow")
class AgenticReinforceConfig(AdvantageSection, name="agentic_reinforce"):
    """Total reward of an episode, discounted by the turns that follow (ROLL)."""

    compares_within_group: ClassVar[bool] = True

    gamma: Share = 1.0
    """Discount factor per turn."""


class NoAdvantageConfig(AdvantageSection, name="none"):
    """No advantages, for losses that need none."""

    requires: ClassVar = Requires(Capability.ROBOT_ALGORITHMS)


@_register("custom:custom_advantage", "a function of your own")
class CustomAdvantageConfig(AdvantageSection, name="custom"):
    """Custom function `(batch, options) -> (advantages, returns)`, both [N] like `batch.rewards`."""

    function: Annotated[str, RunsCode()]
    """`file.py:function`, `module:function`, or a name that another package registers."""
    options: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Second argument of the function; validated by the function's `config_class`, if it has one."""
    needs_critic: bool = False
    """Train a critic; the batch has its values."""

    @property
    def trains_critic(self) -> bool:
        return self.needs_critic


ADVANTAGE_UNION = RegistryUnion(ADVANTAGES, AdvantageSection, others=(NoAdvantageConfig,))
AdvantageConfig = Annotated[AdvantageSection, ADVANTAGE_UNION]
