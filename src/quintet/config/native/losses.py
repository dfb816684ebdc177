"""Configuration of each policy loss, and what the loss needs of a run."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat

from quintet.config.capabilities import Capability, Requires
from quintet.config.native.registry_union import RegistryUnion
from quintet.config.native.section import NonNegative, Section, Share
from quintet.registry import Registry

DualClipBound = Annotated[float, Field(gt=1.0)] | None
UnitInterval = Annotated[float, Field(gt=0.0, lt=1.0)]


class LossSection(Section):
    """Base class of the configuration of a policy loss."""

    needs_teacher: ClassVar[bool] = False
    """Reads the log-probs of a teacher model, `reference.path`, and learns also where all rewards are equal."""
    weighs_rollout_gap: ClassVar[bool] = False
    """Weighs tokens by the gap between learner and engine: log-probs are recomputed by the learner, and
    `algorithm.correction.level` must be null."""

    name: str
    """Policy loss."""


class PpoLossConfig(LossSection):
    """Clipped policy gradient, as in PPO, GRPO and DAPO."""

    name: Literal["ppo"] = "ppo"
    """Policy loss."""
    clip_low: UnitInterval = 0.2
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.28
    """The probability ratio is clipped above 1 + clip_high."""
    clip_dual: DualClipBound = 3.0
    """Bound on ratio × advantage for negative advantages; null for none."""


class DecoupledPpoLossConfig(LossSection):
    """PPO relative to the learner's log-probs before the update, weighted by their ratio to the engine's log-probs
    (decoupled PPO)."""

    weighs_rollout_gap: ClassVar[bool] = True

    name: Literal["decoupled_ppo"] = "decoupled_ppo"
    """Policy loss."""
    clip_low: UnitInterval = 0.2
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The probability ratio is clipped above 1 + clip_high."""
    clip_dual: DualClipBound = None
    """Bound on ratio × advantage for negative advantages; null for none."""
    max_weight: PositiveFloat | None = None
    """Tokens with a larger weight are masked out; null masks none."""


class GspoLossConfig(LossSection):
    """One clipped ratio per response, the geometric mean of its tokens' ratios (GSPO)."""

    name: Literal["gspo"] = "gspo"
    """Policy loss."""
    clip_low: UnitInterval = 3e-4
    """The response's ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 4e-4
    """The response's ratio is clipped above 1 + clip_high."""


class GmpoLossConfig(LossSection):
    """Geometric mean of a response's token ratios, each clipped in log space (GMPO)."""

    name: Literal["gmpo"] = "gmpo"
    """Policy loss. All responses have the same weight, whatever `algorithm.aggregation` is."""
    clip_low: PositiveFloat = 0.4
    """Lower bound -clip_low on a token's log-ratio if its advantage is negative."""
    clip_high: PositiveFloat = 0.4
    """Upper bound on a token's log-ratio if its advantage is positive."""


class CispoLossConfig(LossSection):
    """Policy gradient weighted by the clipped ratio, through which no gradient flows (CISPO)."""

    name: Literal["cispo"] = "cispo"
    """Policy loss."""
    clip_low: UnitInterval = 0.2
    """The weight is at least 1 - clip_low."""
    clip_high: PositiveFloat = 0.28
    """The weight is at most 1 + clip_high."""


class SapoLossConfig(LossSection):
    """Soft gate in place of the clip (SAPO)."""

    name: Literal["sapo"] = "sapo"
    """Policy loss. All responses have the same weight, whatever `algorithm.aggregation` is."""
    temperature_positive: PositiveFloat = 1.0
    """Steepness of the gate for positive advantages."""
    temperature_negative: PositiveFloat = 1.05
    """Steepness of the gate for negative advantages."""


class DppoLossConfig(LossSection):
    """Masks tokens on which old and new policy diverge too much, by total variation (`dppo_tv`) or KL divergence
    (`dppo_kl`)."""

    name: Literal["dppo_tv", "dppo_kl"]
    """Policy loss."""
    clip_low: PositiveFloat = 0.2
    """Maximum divergence of tokens whose probability decreases."""
    clip_high: PositiveFloat = 0.28
    """Maximum divergence of tokens whose probability increases."""
    max_ratio: Annotated[float, Field(gt=1.0)] = 3.0
    """Bound on the probability ratio."""


class DroLossConfig(LossSection):
    """Policy gradient with a quadratic pull toward the old policy (DRO)."""

    name: Literal["dro"] = "dro"
    """Policy loss."""
    beta: PositiveFloat = 0.1
    """Weight of the pull."""


class ClipCovLossConfig(LossSection):
    """PPO that masks a few random tokens with a high covariance between log-prob and advantage (Clip-Cov)."""

    name: Literal["clip_cov"] = "clip_cov"
    """Policy loss."""
    clip_low: UnitInterval = 0.2
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The probability ratio is clipped above 1 + clip_high."""
    share: Share = 2e-4
    """Share of the tokens that is masked."""
    min_covariance: float = 1.0
    """Masked tokens have a covariance above this bound."""
    max_covariance: float = 5.0
    """Masked tokens have a covariance below this bound."""


class KlCovLossConfig(LossSection):
    """Policy gradient with a penalty on the tokens with the highest covariance of log-prob and advantage (KL-Cov)."""

    name: Literal["kl_cov"] = "kl_cov"
    """Policy loss."""
    share: Share = 2e-4
    """Share of the tokens that is penalized."""
    coefficient: NonNegative = 1.0
    """Weight of the penalty, |log-ratio|."""


class ReinforceLossConfig(LossSection):
    """Policy gradient without ratio or clip; both names mean the same."""

    name: Literal["reinforce", "gpg"]
    """Policy loss."""


class KimiLossConfig(LossSection):
    """Policy gradient with a quadratic pull of the log-ratio toward 0, as in Kimi k1.5."""

    name: Literal["kimi"] = "kimi"
    """Policy loss."""
    tau: PositiveFloat = 0.1
    """Weight of the pull."""


class ToprLossConfig(LossSection):
    """Imitation of good responses, and unlearning of bad ones weighted by their ratio, at most 1 (TOPR)."""

    name: Literal["topr"] = "topr"
    """Policy loss."""
    positive_weight: NonNegative = 1.0
    """Weight of tokens with a positive advantage."""
    negative_weight: NonNegative = 1.0
    """Weight of tokens with a negative advantage."""


class DistillationLossConfig(LossSection):
    """On-policy distillation from a teacher, `reference.path`: a token's advantage is its log-prob under the teacher
    minus its log-prob under the policy."""

    needs_teacher: ClassVar[bool] = True

    name: Literal["distillation"] = "distillation"
    """Policy loss."""
    clip_low: UnitInterval = 0.2
    """The probability ratio is clipped below 1 - clip_low."""
    clip_high: PositiveFloat = 0.2
    """The probability ratio is clipped above 1 + clip_high."""


class EmbodiedLossConfig(LossSection):
    """Losses of policies for continuous control."""

    requires: ClassVar = Requires(Capability.EMBODIED)

    name: Literal["sac", "nft"]
    """Policy loss."""


class OutsideLossConfig(LossSection):
    """Custom function `(logprobs, targets, options) -> PolicyLoss`, one loss per token, all [M]."""

    name: Literal["outside"] = "outside"
    """Policy loss."""
    function: str
    """`file.py:function`, `module:function`, or a name that another package registers."""
    options: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Third argument of the function; validated by the function's `config_class`, if it has one."""


LOSSES: Registry[Any] = Registry("policy loss", entry_points="quintet.losses")
"""Losses `(logprobs [M], targets, config) -> PolicyLoss`; see `quintet.algorithms.losses`."""
_HOME = "quintet.algorithms.losses"
for _name, _target, _config, _help in (
    ("ppo", "clipping:ppo", PpoLossConfig, "clipped ratio with separate bounds and dual clip"),
    (
        "decoupled_ppo",
        "clipping:decoupled_ppo",
        DecoupledPpoLossConfig,
        "PPO relative to the learner's policy, weighted by its ratio to the engine's",
    ),
    ("gspo", "clipping:gspo", GspoLossConfig, "one clipped ratio per sequence"),
    ("gmpo", "clipping:gmpo", GmpoLossConfig, "geometric mean of a sequence's clipped ratios"),
    ("cispo", "scores:cispo", CispoLossConfig, "log-probs weighted by the clipped ratio"),
    ("sapo", "scores:sapo", SapoLossConfig, "soft gate in place of the clip"),
    ("dppo_tv", "scores:dppo_tv", DppoLossConfig, "masks tokens whose probability changed much"),
    ("dppo_kl", "scores:dppo_kl", DppoLossConfig, "masks tokens whose KL divergence is large"),
    ("dro", "scores:dro", DroLossConfig, "policy gradient with a quadratic pull toward the old policy"),
    ("clip_cov", "covariance:clip_cov", ClipCovLossConfig, "PPO that masks a few tokens of high covariance"),
    ("kl_cov", "covariance:kl_cov", KlCovLossConfig, "policy gradient with a penalty on tokens of highest covariance"),
    ("reinforce", "scores:reinforce", ReinforceLossConfig, "plain policy gradient"),
    ("gpg", "scores:reinforce", ReinforceLossConfig, "plain policy gradient, verl's name"),
    ("kimi", "scores:kimi", KimiLossConfig, "policy gradient with a quadratic pull, as in Kimi k1.5"),
    ("topr", "scores:topr", ToprLossConfig, "imitates good responses, unlearns bad ones within bounds"),
    ("distillation", "clipping:distillation", DistillationLossConfig, "policy gradient toward a teacher's log-probs"),
):
    LOSSES.add(_name, f"{_HOME}.{_target}", help=_help, config=_config)

LOSS_UNION = RegistryUnion(LOSSES, LossSection, others=(EmbodiedLossConfig, OutsideLossConfig))
LossConfig = Annotated[LossSection, LOSS_UNION]
