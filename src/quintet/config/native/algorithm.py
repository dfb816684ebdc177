"""What is optimised."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from quintet.config.capability import Capability, Waits
from quintet.config.native.section import NonNegative, Section, Share

__all__ = [
    "AdvantageConfig",
    "AlgorithmConfig",
    "BiLevelGaeConfig",
    "EstimatorConfig",
    "GaeConfig",
    "GrpoConfig",
    "KlConfig",
]


class GrpoConfig(Section):
    """Reward of a game against the others that started from the same state."""

    name: Literal["grpo"] = "grpo"
    """Which estimator of advantages."""
    normalize_by_std: bool = True
    """Divide by the group's deviation; false gives Dr. GRPO."""
    whiten: Annotated[bool, Waits(Capability.ALGORITHMS)] = False
    """Advantages to mean 0 and deviation 1 over the batch, after that."""


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
    whiten: bool = True
    """Advantages to mean 0 and deviation 1 over the batch."""


class EstimatorConfig(Section):
    """A further estimator of advantages, by the name under which it was published."""

    waits: ClassVar = Waits(Capability.ALGORITHMS)

    name: Literal[
        "grpo_passk",
        "grpo_dynamic",
        "gdpo",
        "rloo",
        "reinforce",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "opo",
        "gpg",
        "gigpo",
        "brpo",
        "arpo",
        "turn_wise_gae",
        "optimal_token_baseline",
        "tir_optimal_token_baseline",
        "raw",
        "none",
    ]
    """Which estimator of advantages."""
    gamma: Share = 1.0
    """Discount a token."""
    lam: Share = 1.0
    """Weight of longer returns (λ)."""
    whiten: bool = True
    """Advantages to mean 0 and deviation 1 over the batch."""


AdvantageConfig = Annotated[GrpoConfig | GaeConfig | BiLevelGaeConfig | EstimatorConfig, Field(discriminator="name")]


class KlConfig(Section):
    """A reference, the policy as reinforcement learning found it, and what it costs to leave it."""

    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or a penalty on each token's reward."""
    coefficient: Annotated[float, Field(ge=0.0)] = 0.001
    """Weight of the divergence."""
    estimator: Annotated[
        Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+", "full"],
        Waits(Capability.ALGORITHMS, lacks=("full",)),
    ] = "k3"
    """How the divergence is estimated from the tokens that were sampled; with `+`, the gradient is
    that of `k2`. `full` sums over the whole vocabulary."""
    target: PositiveFloat | None = None
    """Divergence, in nats, towards which the coefficient of a reward penalty is steered; null leaves it
    fixed."""
    horizon: PositiveInt = 10000
    """Games over which the coefficient is steered."""
    refresh_every_steps: Annotated[int, Field(ge=0)] = 0
    """The reference becomes the present policy at every n-th step; 0 never."""

    @model_validator(mode="after")
    def _steers_a_penalty(self) -> Self:
        if self.target is not None and self.place == "loss":
            raise ValueError("only a reward penalty is steered to a `target`: set `place` to reward, or leave it out")
        return self


class AlgorithmConfig(Section):
    """What is optimised."""

    advantage: AdvantageConfig = GrpoConfig()
    """How good each token was."""
    loss: Annotated[
        Literal["ppo", "decoupled_ppo", "reinforce", "gspo", "cispo", "distillation", "sac", "nft"],
        Waits(Capability.ALGORITHMS),
    ] = "ppo"
    """The policy's loss."""
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """The probability ratio is clipped below 1 - clip_low …"""
    clip_high: PositiveFloat = 0.28
    """… and above 1 + clip_high."""
    clip_dual: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Bound on ratio × advantage where the advantage is negative; null for none."""
    entropy_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the entropy bonus."""
    kl: KlConfig | None = None
    """null knows no reference."""
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """How token losses become one number, always over the whole mini-batch."""
    drop_groups_without_signal: bool = True
    """Groups whose games all had the same reward give no gradient under `grpo`: leave them out of
    the update. Has no effect with a critic."""
    signal_threshold: Annotated[float, Field(ge=0.0)] = 0.0
    """Standard deviation of its rewards up to which a group counts as one without signal. Where each
    move costs a little, games that all failed differ a little, and `grpo` would blow that up."""
    train_on_observations: bool = False
    """The world's words are learnt like the policy's own."""
    turn_rewards: bool = True
    """Each turn's reward lies on that turn's last token; without it their sum lies on the game's last."""
    advantage_over_own_tokens: Annotated[bool, Waits(Capability.ALGORITHMS)] = True
    """Advantages leap over the world's words."""
    length_penalty: Annotated[NonNegative, Waits(Capability.ALGORITHMS)] = 0.0
    """Taken off the reward of a game for each token over budget, as a share of the budget."""
    stop_ratio: Annotated[PositiveFloat | None, Waits(Capability.ALGORITHMS)] = None
    """Mean probability ratio above which a micro-batch isn't learnt from."""
    scale_by_valid_tokens: Annotated[bool, Waits(Capability.ALGORITHMS)] = False
    """Each micro-batch counts by its share of the mini-batch's tokens."""
    level: Annotated[Literal["token", "action", "chunk"], Waits(Capability.EMBODIED)] = "token"
    """What one probability ratio covers."""
    entropy_level: Annotated[Literal["token", "action", "chunk"], Waits(Capability.EMBODIED)] = "token"
    """What one entropy covers."""
    reward_level: Annotated[Literal["turn", "action", "chunk"], Waits(Capability.EMBODIED)] = "turn"
    """What one reward covers."""
