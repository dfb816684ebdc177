"""Configuration of each policy loss, and what the loss needs of a run."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat

from quintet.config.capabilities import Capability, Requires
from quintet.config.native.registry_union import NamedSection, RegistryUnion, register
from quintet.config.native.section import NonNegative, RunsCode, Share
from quintet.registry import Registry

DualClipBound = Annotated[float, Field(gt=1.0)] | None

LOSSES: Registry[Any] = Registry("policy loss", entry_points="quintet.losses")
"""Losses `(logprobs [M], targets, config) -> PolicyLoss`; see `quintet.algorithms.losses`."""
_register = partial(register, LOSSES, "quintet.algorithms.losses")


class LossSection(NamedSection):
    """Base class of the configuration of a policy loss."""

    needs_teacher: ClassVar[bool] = False
    """Reads the log-probs of a teacher model, `reference.path`, and learns also where all rewards are equal."""
    weighs_rollout_gap: ClassVar[bool] = False
    """Weighs tokens by the gap between learner and engine: log-probs are recomputed by the learner, and
    `algorithm.correction.level` must be null."""

    supports_chunks: ClassVar[bool] = False
    """Is defined for chunks of robot actions: depends on one probability ratio alone."""

    name: str = ""
    """Policy loss."""


class ClippedRatioSection(LossSection):
    """Base class of losses that clip the probability ratio."""

    clip_low: PositiveFloat = 0.2
    """The probability ratio is clipped below 1 - clip_low; from 1 on, it has no lower bound."""
    clip_high: PositiveFloat = 0.2
    """The probability ratio is clipped above 1 + clip_high."""


@_register("clipping:ppo", "clipped ratio with separate bounds and dual clip")
class PpoLossConfig(ClippedRatioSection, name="ppo"):
    """Clipped policy gradient, as in PPO, GRPO and DAPO."""

    supports_chunks: ClassVar[bool] = True

    clip_high: PositiveFloat = 0.28
    """The probability ratio is clipped above 1 + clip_high."""
    clip_dual: DualClipBound = 3.0
    """Bound on ratio × advantage for negative advantages; null for none."""


@_register("clipping:decoupled_ppo", "PPO relative to the learner's policy, weighted by its ratio to the engine's")
class DecoupledPpoLossConfig(ClippedRatioSection, name="decoupled_ppo"):
    """PPO relative to the learner's log-probs before the update, weighted by their ratio to the engine's log-probs
    (decoupled PPO)."""

    weighs_rollout_gap: ClassVar[bool] = True
    supports_chunks: ClassVar[bool] = True

    clip_dual: DualClipBound = None
    """Bound on ratio × advantage for negative advantages; null for none."""
    max_weight: PositiveFloat | None = None
    """Tokens with a larger weight are masked out; null masks none."""


@_register("clipping:gspo", "one clipped ratio per sequence")
class GspoLossConfig(LossSection, name="gspo"):
    """GSPO: a clipped ratio per response, the geometric mean of the ratios of its tokens."""

    clip_low: PositiveFloat = 3e-4
    """The response's ratio is clipped below 1 - clip_low; from 1 on, it has no lower bound."""
    clip_high: PositiveFloat = 4e-4
    """The response's ratio is clipped above 1 + clip_high."""


@_register("clipping:gmpo", "geometric mean of a sequence's clipped ratios")
class GmpoLossConfig(LossSection):
    """Geometric mean of a response's token ratios, each clipped in log space (GMPO)."""

    name: Literal["gmpo"] = "gmpo"
    """Policy loss. All responses have the same weight, whatever `algorithm.aggregation` is."""
    clip_low: PositiveFloat = 0.4
    """Lower bound -clip_low on a token's log-ratio if its advantage is negative."""
    clip_high: PositiveFloat = 0.4
    """Upper bound on a token's log-ratio if its advantage is positive."""


@_register("score_function:cispo", "log-probs weighted by the clipped ratio")
class CispoLossConfig(LossSection, name="cispo"):
    """Policy gradient weighted by the clipped ratio, through which no gradient flows (CISPO)."""

    supports_chunks: ClassVar[bool] = True

    clip_low: PositiveFloat = 0.2
    """The weight is at least 1 - clip_low; from 1 on, it has no lower bound."""
    clip_high: PositiveFloat = 0.28
    """The weight is at most 1 + clip_high."""


@_register("score_function:sapo", "soft gate in place of the clip")
class SapoLossConfig(LossSection):
    """Soft gate in place of the clip (SAPO)."""

    name: Literal["sapo"] = "sapo"
    """Policy loss. All responses have the same weight, whatever `algorithm.aggregation` is."""
    temperature_positive: PositiveFloat = 1.0
    """Steepness of the gate for positive advantages."""
    temperature_negative: PositiveFloat = 1.05
    """Steepness of the gate for negative advantages."""


@_register("score_function:dppo_kl", "masks tokens whose KL divergence is large", name="dppo_kl")
@_register("score_function:dppo_tv", "masks tokens whose probability changed much", name="dppo_tv")
class DppoLossConfig(LossSection):
    """Masks tokens on which old and new policy diverge too much, by total variation (`dppo_tv`) or KL divergence
    (`dppo_kl`)."""

    supports_chunks: ClassVar[bool] = True

    name: Literal["dppo_tv", "dppo_kl"]
    """Policy loss."""
    clip_low: PositiveFloat = 0.2
    """Maximum divergence of tokens whose probability decreases."""
    clip_high: PositiveFloat = 0.28
    """Maximum divergence of tokens whose probability increases."""
    max_ratio: Annotated[float, Field(gt=1.0)] = 3.0
    """Bound on the probability ratio."""


@_register("score_function:dro", "policy gradient with a quadratic pull toward the old policy")
class DroLossConfig(LossSection, name="dro"):
    """Policy gradient with a quadratic pull toward the old policy (DRO)."""

    supports_chunks: ClassVar[bool] = True

    beta: PositiveFloat = 0.1
    """Weight of the pull."""


@_register("covariance:clip_cov", "PPO that masks a few tokens of high covariance")
class ClipCovLossConfig(ClippedRatioSection, name="clip_cov"):
    """PPO that masks a few random tokens with a high covariance between log-prob and advantage (Clip-Cov)."""

    ranges = (("min_covariance", "max_covariance"),)

    share: Share = 2e-4
    """Share of the tokens that is masked."""
    min_covariance: float = 1.0
    """Masked tokens have a covariance above this bound."""
    max_covariance: float = 5.0
    """Masked tokens have a covariance below this bound."""


@_register("covariance:kl_cov", "policy gradient with a penalty on tokens of highest covariance")
class KlCovLossConfig(LossSection, name="kl_cov"):
    """Policy gradient with a penalty on the tokens with the highest covariance of log-prob and advantage (KL-Cov)."""

    share: Share = 2e-4
    """Share of the tokens that is penalized."""
    coefficient: NonNegative = 1.0
    """Weight of the penalty, |log-ratio|."""


@_register("score_function:reinforce", "plain policy gradient, verl's name", name="gpg")
@_register("score_function:reinforce", "plain policy gradient", name="reinforce")
class ReinforceLossConfig(LossSection):
    """Policy gradient without ratio or clip; both names mean the same."""

    supports_chunks: ClassVar[bool] = True

    name: Literal["reinforce", "gpg"]
    """Policy loss."""


@_register("score_function:kimi", "policy gradient with a quadratic pull, as in Kimi k1.5")
class KimiLossConfig(LossSection, name="kimi"):
    """Policy gradient with a quadratic pull of the log-ratio toward 0, as in Kimi k1.5."""

    supports_chunks: ClassVar[bool] = True

    tau: PositiveFloat = 0.1
    """Weight of the pull."""


@_register("score_function:topr", "imitates good responses, unlearns bad ones within bounds")
class ToprLossConfig(LossSection, name="topr"):
    """Imitation of good responses, and unlearning of bad ones weighted by their ratio, at most 1 (TOPR)."""

    supports_chunks: ClassVar[bool] = True

    positive_weight: NonNegative = 1.0
    """Weight of tokens with a positive advantage."""
    negative_weight: NonNegative = 1.0
    """Weight of tokens with a negative advantage."""


@_register("distillation:distillation", "trains toward a teacher's log-probs on the policy's responses")
class DistillationLossConfig(ClippedRatioSection, name="distillation"):
    """On-policy distillation from a teacher, `reference.path`: a divergence from it on the policy's own responses."""

    needs_teacher: ClassVar[bool] = True

    estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    """Estimator of the divergence from the teacher at a sampled token, as in `algorithm.kl.estimator`."""
    gradient: Literal["policy", "direct"] = "policy"
    """`policy`: minus the divergence is the advantage of a clipped policy gradient. `direct`: the divergence itself is
    the loss."""
    policy_logprobs: Literal["old", "current"] = "old"
    """Log-probs of the policy in that advantage: those before the updates of the step, or those of the update."""
    max_divergence: PositiveFloat | None = None
    """Clamp the divergence of a token to ± this value; null does not clamp."""
    clip_dual: DualClipBound = None
    """Bound on ratio × advantage for negative advantages; null for none."""
    weight: NonNegative = 1.0
    """Weight of distillation."""
    task: PpoLossConfig | None = None
    """Policy loss on the rewards, which is added; null trains toward the teacher alone."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.gradient == "direct" and self.estimator == "k1":
            problem = "the gradient of `k1` does not depend on the teacher: with gradient=direct it trains nothing"
            yield problem, "estimator=k3", "gradient=policy"


class EmbodiedLossConfig(LossSection):
    """Losses of policies for continuous control."""

    requires: ClassVar = Requires(Capability.ROBOT_ALGORITHMS)

    name: Literal["sac", "dsrl", "nft", "dagger", "iql", "rlt", "td3"]
    """Policy loss."""


class CustomLossConfig(LossSection, name="custom"):
    """Custom function `(logprobs, targets, options) -> PolicyLoss`, one loss per token, all [M]."""

    function: Annotated[str, RunsCode()]
    """`file.py:function`, `module:function`, or a name that another package registers."""
    options: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Third argument of the function; validated by the function's `config_class`, if it has one."""


LOSS_UNION = RegistryUnion(LOSSES, LossSection, others=(EmbodiedLossConfig, CustomLossConfig))
LossConfig = Annotated[LossSection, LOSS_UNION]
