"""Losses of the policy, each with the options that it has."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat

from quintet.config.capability import Capability, Waits
from quintet.config.native.section import NonNegative, Section, Share

__all__ = [
    "CispoLossConfig",
    "ClipCovLossConfig",
    "DecoupledPpoLossConfig",
    "DistillationLossConfig",
    "DppoLossConfig",
    "DroLossConfig",
    "EmbodiedLossConfig",
    "GmpoLossConfig",
    "GspoLossConfig",
    "KimiLossConfig",
    "KlCovLossConfig",
    "LossConfig",
    "OutsideLossConfig",
    "PlainLossConfig",
    "PpoLossConfig",
    "SapoLossConfig",
    "ToprLossConfig",
]

Dual = Annotated[float, Field(gt=1.0)] | None
Below = Annotated[float, Field(gt=0.0, lt=1.0)]


class PpoLossConfig(Section):
    """Clipped policy gradient, as in PPO, GRPO and DAPO."""

    name: Literal["ppo"] = "ppo"
    """Which loss."""
    clip_low: Below = 0.2
    """The probability ratio is clipped below 1 - clip_low …"""
    clip_high: PositiveFloat = 0.28
    """… and above 1 + clip_high."""
    clip_dual: Dual = 3.0
    """Bound on ratio × advantage where the advantage is negative; null for none."""


class DecoupledPpoLossConfig(Section):
    """PPO whose ratio is to the learner's log-probs before the update, weighted by their ratio to the engine's."""

    name: Literal["decoupled_ppo"]
    """Which loss."""
    clip_low: Below = 0.2
    """The probability ratio is clipped below 1 - clip_low …"""
    clip_high: PositiveFloat = 0.2
    """… and above 1 + clip_high."""
    clip_dual: Dual = None
    """Bound on ratio × advantage where the advantage is negative; null for none."""
    max_weight: PositiveFloat | None = None
    """Tokens whose weight is larger aren't learnt from; null learns from all."""


class GspoLossConfig(Section):
    """One ratio a reply, the geometric mean of its tokens' ratios, clipped (GSPO)."""

    name: Literal["gspo"]
    """Which loss."""
    clip_low: Below = 3e-4
    """The reply's ratio is clipped below 1 - clip_low …"""
    clip_high: PositiveFloat = 4e-4
    """… and above 1 + clip_high."""


class GmpoLossConfig(Section):
    """The geometric mean of a reply's token ratios, each clipped in its logarithm (GMPO)."""

    name: Literal["gmpo"]
    """Which loss. Every reply counts alike, whatever `algorithm.aggregation` says."""
    clip_low: PositiveFloat = 0.4
    """A token's log-ratio is held above -clip_low where its advantage is negative …"""
    clip_high: PositiveFloat = 0.4
    """… and below clip_high where it is positive."""


class CispoLossConfig(Section):
    """Policy gradient weighted by the clipped ratio, which itself has no gradient (CISPO)."""

    name: Literal["cispo"]
    """Which loss."""
    clip_low: Below = 0.2
    """The weight is at least 1 - clip_low …"""
    clip_high: PositiveFloat = 0.28
    """… and at most 1 + clip_high."""


class SapoLossConfig(Section):
    """A soft gate in place of the clip (SAPO)."""

    name: Literal["sapo"]
    """Which loss. Every reply counts alike, whatever `algorithm.aggregation` says."""
    temperature_positive: PositiveFloat = 1.0
    """How fast the gate closes where the advantage is positive …"""
    temperature_negative: PositiveFloat = 1.05
    """… and where it is negative."""


class DppoLossConfig(Section):
    """Tokens count as long as the two policies diverge little: by total variation (`dppo_tv`) or by
    Kullback and Leibler (`dppo_kl`)."""

    name: Literal["dppo_tv", "dppo_kl"]
    """Which loss."""
    clip_low: PositiveFloat = 0.2
    """Divergence up to which a token's probability may fall …"""
    clip_high: PositiveFloat = 0.28
    """… and up to which it may rise."""
    max_ratio: Annotated[float, Field(gt=1.0)] = 3.0
    """Bound on the probability ratio."""


class DroLossConfig(Section):
    """Policy gradient with a quadratic pull towards the old policy (DRO)."""

    name: Literal["dro"]
    """Which loss."""
    beta: PositiveFloat = 0.1
    """Weight of that pull."""


class ClipCovLossConfig(Section):
    """PPO in which a few tokens of high covariance between log-prob and advantage, drawn at random, aren't learnt."""

    name: Literal["clip_cov"]
    """Which loss."""
    clip_low: Below = 0.2
    """The probability ratio is clipped below 1 - clip_low …"""
    clip_high: PositiveFloat = 0.2
    """… and above 1 + clip_high."""
    share: Share = 2e-4
    """Share of the tokens that is drawn."""
    min_covariance: float = 1.0
    """They are drawn from tokens whose covariance is larger than this …"""
    max_covariance: float = 5.0
    """… and smaller than this."""


class KlCovLossConfig(Section):
    """Policy gradient with a penalty on those tokens whose covariance between log-prob and advantage is highest."""

    name: Literal["kl_cov"]
    """Which loss."""
    share: Share = 2e-4
    """Share of the tokens that is penalised."""
    coefficient: NonNegative = 1.0
    """Weight of the penalty, |log-ratio|."""


class PlainLossConfig(Section):
    """Policy gradient without ratio or clip; both names say the same."""

    name: Literal["reinforce", "gpg"]
    """Which loss."""


class KimiLossConfig(Section):
    """Policy gradient with a quadratic pull of the log-ratio to 0, as for Kimi k1.5."""

    name: Literal["kimi"]
    """Which loss."""
    tau: PositiveFloat = 0.1
    """Weight of that pull."""


class ToprLossConfig(Section):
    """Good replies are imitated, bad ones unlearnt as far as their ratio, at most 1, says (TOPR)."""

    name: Literal["topr"]
    """Which loss."""
    positive_weight: NonNegative = 1.0
    """Weight of tokens with a positive advantage …"""
    negative_weight: NonNegative = 1.0
    """… and with a negative one."""


class DistillationLossConfig(Section):
    """The policy follows a teacher, `reference.path`, on its own words: the advantage of a token is what the
    teacher thinks more likely of it than the policy does."""

    name: Literal["distillation"]
    """Which loss."""
    clip_low: Below = 0.2
    """The probability ratio is clipped below 1 - clip_low …"""
    clip_high: PositiveFloat = 0.2
    """… and above 1 + clip_high."""


class EmbodiedLossConfig(Section):
    """Losses of policies that act by continuous control."""

    waits: ClassVar = Waits(Capability.EMBODIED)

    name: Literal["sac", "nft"]
    """Which loss."""


class OutsideLossConfig(Section):
    """A function of your own, `(logprobs, targets, options) -> PolicyLoss`, one loss a token, all [M]."""

    name: Literal["outside"]
    """Which loss."""
    function: str
    """`file.py:function`, `module:function`, or a name that another package registered."""
    options: Annotated[dict[str, Any], Field(default_factory=dict)]
    """What the function is given besides."""


LossConfig = Annotated[
    PpoLossConfig
    | DecoupledPpoLossConfig
    | GspoLossConfig
    | GmpoLossConfig
    | CispoLossConfig
    | SapoLossConfig
    | DppoLossConfig
    | DroLossConfig
    | ClipCovLossConfig
    | KlCovLossConfig
    | PlainLossConfig
    | KimiLossConfig
    | ToprLossConfig
    | DistillationLossConfig
    | EmbodiedLossConfig
    | OutsideLossConfig,
    Field(discriminator="name"),
]
