"""What is optimised."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from quintet.config.capability import Capability, Waits
from quintet.config.native.advantages import AdvantageConfig, GrpoConfig
from quintet.config.native.losses import LossConfig, PpoLossConfig
from quintet.config.native.section import NonNegative, Section

__all__ = [
    "AlgorithmConfig",
    "CorrectionConfig",
    "FilterConfig",
    "KlConfig",
    "RejectionConfig",
    "ShapingConfig",
]

Ratio = Annotated[float, Field(gt=0.0, le=1.0)]


class KlConfig(Section):
    """A reference, the policy as reinforcement learning found it, and what it costs to leave it."""

    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or a penalty on each token's reward."""
    coefficient: Annotated[float, Field(ge=0.0)] = 0.001
    """Weight of the divergence."""
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+", "full"] = "k3"
    """How the divergence is estimated from the tokens that were sampled; with `+`, the gradient is
    that of `k2`. `full` sums over the whole vocabulary."""
    target: PositiveFloat | None = None
    """Divergence, in nats, towards which the coefficient of a reward penalty is steered; null leaves it
    fixed."""
    horizon: PositiveInt = 10000
    """Games over which the coefficient is steered."""
    swapped: bool = False
    """Policy and reference change places in the estimate, as they do in one of RLinf's two learners."""
    refresh_every_steps: Annotated[int, Field(ge=0)] = 0
    """The reference becomes the present policy at every n-th step; 0 never."""

    @model_validator(mode="after")
    def _steers_a_penalty(self) -> Self:
        if self.target is not None and self.place == "loss":
            raise ValueError("only a reward penalty is steered to a `target`: set `place` to reward, or leave it out")
        return self


class ShapingConfig(Section):
    """What is done to the reward of a game before it is compared with others, in this order."""

    length_penalty: NonNegative = 0.0
    """Taken off the reward of a game for each token over budget, as a share of the budget."""
    length_budget: PositiveInt | None = None
    """Tokens of the policy's own that a game may have for free; null takes half of what its replies may hold."""
    center: Literal["none", "group", "batch"] = "none"
    """Over which games their mean is taken off."""
    divide: Literal["none", "group", "batch"] = "none"
    """Over which games rewards are divided by their deviation, after that."""
    clip: PositiveFloat | None = None
    """Rewards of games are held within ± this; null for no bound."""


class FilterConfig(Section):
    """Which groups are learnt from."""

    keep_share: Ratio = 1.0
    """Share of the groups, those whose rewards differ most, that is learnt from (RAGEN's uncertainty filter)."""
    min_mean: float | None = None
    """Groups whose mean reward is lower aren't learnt from …"""
    max_mean: float | None = None
    """… nor those whose mean reward is higher."""
    refill_rounds: Annotated[int, Field(ge=0)] = 0
    """Further rounds in which groups without signal are replaced by newly drawn ones (DAPO's dynamic sampling)."""


class RejectionConfig(Section):
    """Words that engine and learner judge too differently aren't learnt from."""

    estimator: Literal["k1", "k2", "k3"] = "k1"
    """By which estimate of the divergence."""
    over: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = "token"
    """For each token, or summed, averaged or maximal over a reply."""
    upper: PositiveFloat
    """Bound; of `k1`, on the ratio."""
    lower: PositiveFloat | None = None
    """Lower bound of `k1` on the ratio; null takes 1 / upper."""


class CorrectionConfig(Section):
    """Importance weights for the gap between the engine that wrote and the learner that learns."""

    level: Literal["token", "sequence"] | None = "token"
    """One weight for each token, or one for each reply, the product over its tokens; null weighs nothing."""
    upper: PositiveFloat = 2.0
    """Larger weights are cut to this (truncated importance sampling) …"""
    lower: PositiveFloat | None = None
    """… or, where this is given, weights outside `lower` … `upper` become 0."""
    normalize: bool = False
    """Weights to mean 1 over the batch."""
    reject: Annotated[tuple[RejectionConfig, ...], Field(strict=False)] = ()
    """What isn't learnt from; all of them count."""


class AlgorithmConfig(Section):
    """What is optimised."""

    advantage: AdvantageConfig = GrpoConfig()
    """How good each token was."""
    loss: LossConfig = PpoLossConfig()
    """The policy's loss."""
    entropy_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the entropy bonus."""
    kl: KlConfig | None = None
    """null knows no reference."""
    correction: CorrectionConfig | None = None
    """null takes the engine's words as the learner's own. Needs `rollout.recompute_logprobs`."""
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        "token-mean"
    )
    """How token losses become one number, always over the whole mini-batch."""
    aggregation_scale: PositiveFloat | None = None
    """By what `seq-mean-token-sum-norm` divides; null takes the longest game that there can be, in tokens."""
    micro_batch_weights: Literal["exact", "equal", "tokens"] = "exact"
    """`exact` aggregates over the whole mini-batch, however it is cut into passes. The others are other frameworks'
    ways: each pass by itself, all of them alike (`equal`), or each by its share of the tokens (`tokens`)."""
    stop_ratio: PositiveFloat | None = None
    """Mean probability ratio above which an update isn't made; null makes all."""
    shaping: ShapingConfig = ShapingConfig()
    """What is done to rewards first."""
    filter: FilterConfig = FilterConfig()
    """Which groups are learnt from."""
    drop_groups_without_signal: bool = True
    """Groups whose games all had the same reward give no gradient under `grpo`, `grpo_passk`, `rloo`, `opo` and
    `gpg`: leave them out of the update. Has no effect where something else teaches by them: whitening, a
    teacher, a divergence or a length penalty that comes off the rewards."""
    signal_threshold: Annotated[float, Field(ge=0.0)] = 0.0
    """Standard deviation of its rewards up to which a group counts as one without signal. Where each
    move costs a little, games that all failed differ a little, and `grpo` would blow that up."""
    train_on_observations: bool = False
    """The world's words are learnt like the policy's own."""
    turn_rewards: bool = True
    """Each turn's reward lies on that turn's last token; without it their sum lies on the game's last."""
    advantage_over_own_tokens: bool = True
    """Advantages leap over the world's words; without it the recursions of `gae`, `bi_level_gae`, `turn_wise_gae`,
    `reinforce` and `reinforce_plus_plus` go through them, too."""
    level: Annotated[Literal["token", "action", "chunk"], Waits(Capability.EMBODIED)] = "token"
    """What one probability ratio covers."""
    entropy_level: Annotated[Literal["token", "action", "chunk"], Waits(Capability.EMBODIED)] = "token"
    """What one entropy covers."""
    reward_level: Annotated[Literal["turn", "action", "chunk"], Waits(Capability.EMBODIED)] = "turn"
    """What one reward covers."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.loss.name == "decoupled_ppo" and self.correction is not None and self.correction.level is not None:
            raise ValueError("`decoupled_ppo` weighs the gap to the engine itself: set correction.level to null")
        if self.advantage.name == "remax" and self.shaping != ShapingConfig():
            raise ValueError("`remax` compares with greedy games, whose rewards aren't shaped: leave out shaping")
        return self
