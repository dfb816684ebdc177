"""Algorithm: advantages, loss, KL divergence, reward shaping and rollout correction."""

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from quintet.config.native.advantages import AdvantageConfig, GrpoConfig
from quintet.config.native.losses import LossConfig, PpoLossConfig
from quintet.config.native.section import Count, ListOf, NonNegative, PositiveShare, Section

ROUNDING = 1e-9
"""Tolerance for rounding of a share times a number of groups: 0.3 × 10 is 3.0000000000000004 in floating point."""


class KlConfig(Section):
    """KL divergence from a reference policy, by default the policy at the start of reinforcement learning."""

    apply_to: Literal["loss", "reward"] = "loss"
    """Add the divergence to the loss, or subtract it from the reward of each token."""
    coefficient: NonNegative = 0.001
    """Weight of the divergence."""
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+", "full"] = "k3"
    """Estimator from the sampled tokens; with `+`, its gradient is that of `k2`. `full` sums over the whole
    vocabulary."""
    target: PositiveFloat | None = None
    """Target divergence, nats, of an adaptive coefficient for the reward penalty; null keeps the coefficient fixed."""
    horizon: PositiveInt = 10000
    """Episodes over which the coefficient adapts."""
    swapped: bool = False
    """Swap policy and reference in the estimate, as in one of RLinf's learners."""
    refresh_every_steps: Count = 0
    """Replace the reference by the current policy every n-th step; 0 never does."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.target is not None and self.apply_to == "loss":
            yield "`target` needs a reward penalty", "apply_to=reward", "target=null"


class RewardKlConfig(Section):
    """Second KL divergence from the reference policy, subtracted from the reward of each token."""

    coefficient: NonNegative = 0.001
    """Weight of the divergence."""
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"] = "k1"
    """Estimator from the sampled tokens."""
    target: PositiveFloat | None = None
    """Target divergence, nats, of an adaptive coefficient; null keeps the coefficient fixed."""
    horizon: PositiveInt = 10000
    """Episodes over which the coefficient adapts."""


class ShapingConfig(Section):
    """Transformations of episode rewards before advantages are computed, in this order."""

    length_penalty: NonNegative = 0.0
    """Penalty per token over budget, as a share of the budget."""
    length_budget: PositiveInt | None = None
    """Response tokens of an episode without penalty; null uses half of the maximum."""
    center: Literal["none", "group", "batch"] = "none"
    """Episodes whose mean reward is subtracted."""
    divide: Literal["none", "group", "batch"] = "none"
    """Episodes by whose standard deviation rewards are divided, after centering."""
    clip: PositiveFloat | None = None
    """Clip rewards to ± this value; null does not clip."""
    clip_negative: PositiveFloat | None = None
    """Clip negative rewards to minus this value instead; null uses `clip`."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.clip_negative is not None and self.clip is None:
            yield "`clip_negative` has no effect without clip", f"clip={self.clip_negative}", "clip_negative=null"


class FilterConfig(Section):
    """Selection of the groups that are trained on."""

    ranges = (("min_mean", "max_mean"),)

    keep_share: PositiveShare = 1.0
    """Share of groups to keep, those that `keep_by` puts first (RAGEN's uncertainty filter)."""
    keep_by: Literal[
        "deviation",
        "least_deviation",
        "variance",
        "least_variance",
        "lead",
        "mean",
        "least_mean",
        "total",
        "least_total",
        "length",
        "least_length",
    ] = "deviation"
    """Score of a group for `keep_share`, `top_p`, `min_p` and `drop_zero`: standard deviation or variance of its
    rewards, lead of the best reward over their mean, their mean or their sum, or the mean number of response tokens.
    The largest scores come first, with `least_` the smallest."""
    ddof: Count = 1
    """Deviation and variance divide by the number of episodes minus this: 1 is unbiased, 0 is that of a population."""
    top_p: PositiveShare = 1.0
    """Keep the first groups until their scores add up to this share of all scores; 1 keeps all. If all scores are 0,
    none is kept."""
    top_p_tolerance: NonNegative = 0.0
    """Subtracted from the sum that `top_p` has to reach."""
    top_p_softmax: bool = False
    """Add up the softmax of the scores instead, with `least_` of their negatives."""
    min_p: PositiveShare | None = None
    """Keep groups with at least this share of the largest score, with `least_` those up to the smallest score divided
    by it; null keeps all."""
    drop_zero: bool = False
    """Drop groups whose score is 0, before the shares are taken. They count in the number that `keep_share` refers
    to."""
    min_mean: float | None = None
    """Drop groups with a lower mean reward; null keeps them."""
    max_mean: float | None = None
    """Drop groups with a higher mean reward; null keeps them."""
    keep_all_if_empty: bool = False
    """Train on all groups of a step in which the filter keeps none; otherwise such a step makes no update."""
    stop_after_empty_steps: Count = 0
    """End training after so many steps in a row in which the filter keeps no group; 0 never does."""
    after_advantages: bool = False
    """Select groups after advantages are computed, as VAGEN does: the others then still count in shaping, whitening and
    the mean KL divergence. Otherwise they are left out before, as in RAGEN."""
    scale_advantages: Literal["none", "linear", "sqrt"] = "none"
    """Multiply advantages by the share of groups that are kept, or by its square root."""
    refill_rounds: Count = 0
    """Additional rollouts that replace groups without a learning signal (DAPO's dynamic sampling)."""
    groups_per_round: PositiveInt | None = None
    """Groups of each of these rollouts, of which the step takes the first ones with a signal; null generates those of a
    step, and then as many as are missing."""

    def max_selected(self, groups: int) -> int:
        """Return the maximum number of `groups` that are kept, by `keep_share`."""
        return math.ceil(self.keep_share * groups - ROUNDING)


class RejectionConfig(Section):
    """Rejection of tokens whose log-probs differ too much between engine and learner."""

    ranges = (("lower", "upper"),)

    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the divergence."""
    over: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """Per token, or sum, mean or maximum over a response."""
    upper: PositiveFloat
    """Upper bound; for `k1` on the ratio."""
    lower: PositiveFloat | None = None
    """Lower bound of `k1` on the ratio; null uses 1 / upper."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.estimator == "k1" and self.lower is None and self.upper < 1:
            problem = f"`lower` is required with upper = {self.upper}: by default it is 1 / upper, which is larger"
            yield problem, f"lower={self.upper / 2:g}", "upper=1"


class CorrectionConfig(Section):
    """Rollout correction: importance weights for the log-prob gap between engine and learner."""

    ranges = (("lower", "upper"),)

    level: Literal["token", "sequence"] | None = "token"
    """One weight per token, or per response, the product over its tokens; null sets no weights."""
    upper: PositiveFloat = 2.0
    """Clip larger weights to this value (truncated importance sampling)."""
    lower: PositiveFloat | None = None
    """If set, weights outside `lower` … `upper` become 0 instead of being clipped."""
    normalize: bool = False
    """Normalize weights to mean 1 over the batch."""
    reject: ListOf[RejectionConfig] = ()
    """Rejection rules; all of them apply."""
    reject_before_advantages: bool = False
    """Compute advantages as if rejected tokens were not there, as verl does; otherwise they are computed over the whole
    episode, and rejected tokens are only left out of the loss."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.reject_before_advantages and not self.reject:
            yield "`reject_before_advantages` has no effect without `reject`", "reject_before_advantages=false"


class AlgorithmConfig(Section):
    """Algorithm."""

    advantage: AdvantageConfig = GrpoConfig()
    """Advantage estimator."""
    loss: LossConfig = PpoLossConfig()
    """Policy loss."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus."""
    kl: KlConfig | None = None
    """KL divergence from a reference; null uses no reference."""
    reward_kl: RewardKlConfig | None = None
    """Second KL divergence, in the rewards, beside `kl` in the loss; null for none."""
    correction: CorrectionConfig | None = None
    """Rollout correction; null trusts the log-probs of the engine. Needs `rollout.recompute_logprobs`."""
    aggregation: Literal[
        "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """Aggregation of token losses to one number, over the whole mini-batch."""
    aggregation_scale: PositiveFloat | None = None
    """Divisor of `seq-mean-token-sum-norm`; null uses the maximum tokens of an episode."""
    micro_batch_weights: Literal["exact", "equal", "tokens"] = "exact"
    """`exact` aggregates over the whole mini-batch, regardless of micro-batches. As in other frameworks, `equal`
    aggregates each micro-batch and averages the results with equal weights; `tokens` weights them by their number of
    tokens."""
    stop_ratio: PositiveFloat | None = None
    """Skip updates with a larger mean probability ratio; null skips none."""
    shaping: ShapingConfig = ShapingConfig()
    """Reward shaping."""
    filter: FilterConfig = FilterConfig()
    """Group filter."""
    drop_groups_without_signal: bool = True
    """Leave groups with equal rewards out of the update: they have no gradient under `grpo`, `grpo_passk`, `rloo`,
    `opo` and `gpg`. Has no effect if such groups still have a learning signal: with whitening, a teacher, a KL
    divergence, or a length penalty."""
    signal_threshold: NonNegative = 0.0
    """Standard deviation of rewards up to which a group counts as without signal. With a small cost per action, the
    rewards of failed episodes differ slightly, and `grpo` would amplify the difference."""
    train_on_observations: bool = False
    """Also train on the tokens of observations."""
    turn_rewards: bool = True
    """Put each turn's reward on the last token of the turn; otherwise their sum is on the last token of the episode."""
    advantage_over_response_tokens: bool = True
    """Skip tokens of observations in the recursions of `gae`, `bi_level_gae`, `turn_wise_gae`, `reinforce` and
    `reinforce_plus_plus`; otherwise they run over all tokens."""
    mask_truncated: bool = False
    """Leave episodes that a limit of tokens has cut out of the loss and of whitening: with a response that was cut
    off, or that ended because no room was left for another one. Limits of turns, actions and env steps do not count.
    Their rewards still count in their group; a group with only such episodes is one without signal."""
    zero_advantages: bool = False
    """Replace all advantages by 0, so that only entropy bonus and KL divergence train the policy. A critic still
    learns."""
    advantage_clip: PositiveFloat | None = None
    """Clip advantages to ± this value, after whitening; null does not clip."""
    level: Literal["token", "action", "chunk"] = "token"
    """Unit of one probability ratio."""
    entropy_level: Literal["token", "action", "chunk"] = "token"
    """Unit of one entropy."""
    reward_level: Literal["turn", "action", "chunk"] = "turn"
    """Unit of one reward."""
    bootstrap: Literal["truncated", "done"] = "truncated"
    """Episodes to whose last reward `gae` adds the discounted value of their last observation, with `env.auto_reset`:
    those that were truncated, or all that ended."""

    @property
    def kl_in_loss(self) -> KlConfig | None:
        """KL divergence that is added to the loss."""
        return self.kl if self.kl is not None and self.kl.apply_to == "loss" else None

    @property
    def kl_in_reward(self) -> KlConfig | None:
        """KL divergence that is subtracted from the rewards: `reward_kl`, or `kl` if it applies to them."""
        if self.reward_kl is not None:
            return KlConfig(apply_to="reward", **self.reward_kl.model_dump())
        return self.kl if self.kl is not None and self.kl.apply_to == "reward" else None

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.reward_kl is not None and self.kl_in_loss is None:
            problem = "`reward_kl` is a second divergence, beside one in the loss; `kl.apply_to` is for a single one"
            yield problem, "kl.apply_to=loss", "reward_kl=null"
        if self.level == "chunk" and self.reward_level == "action":
            problem = "the one ratio of a chunk cannot have an advantage for each action: `level` is chunk"
            yield problem, "level=action", "reward_level=chunk"
        if self.loss.weighs_rollout_gap and self.correction is not None and self.correction.level is not None:
            yield f"`{self.loss.name}` weighs the gap to the engine itself", "correction.level=null"
        if self.advantage.needs_greedy_baseline and self.shaping != ShapingConfig():
            problem = f"`{self.advantage.name}` compares with greedy episodes, whose rewards are not shaped"
            yield problem, "shaping={}"
