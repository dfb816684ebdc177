"""What is done about the gap between the engine that wrote and the learner that learns.

Both give log-probs for the same words under the same weights, and yet they differ: by precision, kernels, or because
the engine's weights are older. Importance weights make up for it; words on which they differ too much may be left out.
Weights and bounds are those of verl 0.9.1 (`rollout_corr_helper.py`), metrics are under its names. Truncation: Yao et
al. 2025, "Your efficient RL framework secretly brings you off-policy training"; masking: IcePop, Ling team 2025.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.config.native.algorithm import CorrectionConfig, RejectionConfig
from quintet.records import Batch

__all__ = ["correction"]

LOG_BOUND = 20.0
"""Log-ratios are held within ± this before they are exponentiated."""


@dataclass(frozen=True, slots=True)
class _Words:
    """The policy's own tokens, and to which trajectory each belongs; trajectories without any are left out."""

    learner: Tensor
    """[M], nats."""
    engine: Tensor
    """[M], nats."""
    member: Tensor
    """int64 [M]."""
    count: Tensor
    """int64 [S], own tokens of each trajectory."""

    @classmethod
    def of(cls, batch: Batch) -> _Words:
        if batch.rollout_logprobs is None:
            raise ValueError("the gap to the engine needs a batch with `rollout_logprobs` beside the learner's own")
        mask = batch.loss_mask
        _, member, count = torch.unique(batch.token_trajectory[mask], return_inverse=True, return_counts=True)
        return cls(batch.logprobs[mask], batch.rollout_logprobs[mask], member, count)

    @property
    def log_ratio(self) -> Tensor:
        """log(learner / engine), [M]."""
        return self.learner - self.engine

    def sum(self, values: Tensor) -> Tensor:
        """[M] to [S]."""
        return values.new_zeros(len(self.count)).index_add(0, self.member, values)

    def mean(self, values: Tensor) -> Tensor:
        """[M] to [S]."""
        return self.sum(values) / self.count

    def largest(self, values: Tensor) -> Tensor:
        """[M] to [S]."""
        return values.new_zeros(len(self.count)).scatter_reduce(0, self.member, values, "amax", include_self=False)


def correction(batch: Batch, config: CorrectionConfig) -> tuple[Tensor, Tensor, dict[str, float]]:
    """`(weights [N], keep bool [N], metrics)`: by what each token's loss is multiplied, 0 outside the loss mask; which
    tokens are learnt from, true outside it; and `rollout_corr/*`.

    With ρ = exp(learner - engine), of a token or, at `level: sequence`, of all own tokens of a trajectory together:
    weights are min(ρ, upper); or ρ between `lower` and `upper` and 0 elsewhere; 1 without a level. They are constants.

    Raises:
        ValueError: the batch doesn't have both log-probs.
    """
    words, mask = _Words.of(batch), batch.loss_mask
    weights = torch.zeros_like(batch.logprobs)
    keep = torch.ones_like(mask)
    if not len(words.count):
        return weights, keep, {}
    metrics: dict[str, float] = {}
    if config.level is None:
        weights[mask] = 1.0
    else:
        weights[mask], metrics = _weights(words, config)
    if config.reject:
        keep[mask], rejected = _keep(words, config.reject)
        metrics |= rejected
    metrics |= _gap(words)
    return weights, keep, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _weights(words: _Words, config: CorrectionConfig) -> tuple[Tensor, dict[str, float]]:
    """Weights [M] and their metrics, which are taken before they are brought to mean 1."""
    total = words.sum(words.log_ratio)
    by_token = config.level == "token"
    raw = (words.log_ratio if by_token else total[words.member]).clamp(-LOG_BOUND, LOG_BOUND).exp()
    inside = raw <= config.upper
    if config.lower is None:
        weights = raw.clamp(max=config.upper)
    else:
        inside &= raw >= config.lower
        weights = raw * inside
    metrics = _weight_metrics(words, raw, weights, config)
    if config.lower is not None:
        metrics["rollout_is_oob_ratio"] = _mean(~inside)
    if config.normalize:
        mean = float(weights.mean() if by_token else words.mean(weights).mean())
        metrics["rollout_is_batch_norm_factor"] = mean if mean > 1e-8 else 1.0
        weights = weights / metrics["rollout_is_batch_norm_factor"]
    return weights, metrics


def _weight_metrics(words: _Words, raw: Tensor, weights: Tensor, config: CorrectionConfig) -> dict[str, float]:
    low = config.lower or 1.0 / config.upper
    each = words.mean(weights)
    plain = words.mean(raw)
    if config.level == "token":
        largest, smallest, high, low_share = weights.max(), weights.min(), raw > config.upper, raw < low
    else:
        total = words.sum(words.log_ratio)
        largest, smallest = total.max().clamp(max=LOG_BOUND).exp(), total.min().exp()
        high, low_share = total > math.log(config.upper), total < math.log(low)
    relative = weights / (weights.mean() + 1e-8)
    return {
        "rollout_is_mean": float(weights.mean()),
        "rollout_is_max": float(largest),
        "rollout_is_min": float(smallest),
        "rollout_is_std": float(weights.std(correction=0)),
        "rollout_is_eff_sample_size": 1.0 / max(float(relative.square().mean()), 1e-8),
        "rollout_is_ratio_fraction_high": _mean(high),
        "rollout_is_ratio_fraction_low": _mean(low_share),
        "rollout_is_seq_mean": float(each.mean()),
        "rollout_is_seq_std": _deviation(each),
        "rollout_is_seq_max": float(each.max()),
        "rollout_is_seq_min": float(each.min()),
        "rollout_is_seq_max_deviation": float((each - 1.0).abs().max()),
        "rollout_is_seq_fraction_high": _mean(plain > config.upper),
        "rollout_is_seq_fraction_low": _mean(plain < low),
    }


def _keep(words: _Words, rejections: tuple[RejectionConfig, ...]) -> tuple[Tensor, dict[str, float]]:
    """Which tokens pass all of them, bool [M]."""
    keep = torch.ones_like(words.member, dtype=torch.bool)
    metrics: dict[str, float] = {}
    for rejection in rejections:
        passed, told = _passed(words, rejection)
        keep &= passed
        metrics |= told
    metrics["rollout_rs_masked_fraction"] = _mean(~keep)
    metrics["rollout_rs_seq_masked_fraction"] = _mean(words.sum((~keep).double()) > 0)
    return keep, metrics


def _passed(words: _Words, config: RejectionConfig) -> tuple[Tensor, dict[str, float]]:
    """Which tokens one rejection lets pass, bool [M].

    With x = log(learner / engine): k1 is -x, held between the logarithms of the bounds; k2 is x²/2, k3 is
    exp(x) - 1 - x, each at most `upper`.
    """
    x = words.log_ratio.clamp(-LOG_BOUND, LOG_BOUND)
    each = {"k1": -x, "k2": 0.5 * x.square(), "k3": x.exp() - 1.0 - x}[config.estimator]
    if config.estimator == "k1":
        lower, upper = math.log(config.lower or 1.0 / config.upper), math.log(config.upper)
    else:
        lower, upper = -math.inf, config.upper
    over = {"sequence_sum": words.sum, "sequence_mean": words.mean, "sequence_max": words.largest}
    by_sequence = over[config.over](each) if config.over in over else None
    statistic = each if by_sequence is None else by_sequence[words.member]
    passed = (statistic >= lower) & (statistic <= upper)
    name = f"rollout_rs_{config.over.replace('sequence', 'seq')}_{config.estimator}"
    told = _rejection_metrics(words, statistic, by_sequence, lower, upper)
    told["masked_fraction"] = _mean(~passed)
    told["seq_masked_fraction"] = _mean(words.sum((~passed).double()) > 0)
    return passed, {f"{name}_{key}": value for key, value in told.items()}


def _rejection_metrics(
    words: _Words, statistic: Tensor, by_sequence: Tensor | None, lower: float, upper: float
) -> dict[str, float]:
    each = words.mean(statistic) if by_sequence is None else by_sequence
    judged = statistic if by_sequence is None else by_sequence
    held = statistic.clamp(min=0.0 if math.isinf(lower) else lower, max=upper)
    return {
        "mean": float(statistic.mean()),
        "max": float(judged.max()),
        "min": float(judged.min()),
        "std": float(held.std(correction=0)),
        "fraction_high": _mean(judged > upper),
        "fraction_low": _mean(judged < lower),
        "seq_mean": float(each.mean()),
        "seq_std": _deviation(each),
        "seq_max": float(each.max()),
        "seq_min": float(each.min()),
        "seq_max_deviation": float(each.abs().max()),
        "seq_fraction_high": _mean(each > upper),
        "seq_fraction_low": _mean(each < lower),
    }


def _gap(words: _Words) -> dict[str, float]:
    """How far engine and learner are apart: divergence of the one from the other, perplexities, χ²."""
    x = words.log_ratio
    learner, engine = words.mean(words.learner), words.mean(words.engine)
    apart = engine - learner
    total = words.sum(x).clamp(-LOG_BOUND, LOG_BOUND)
    return {
        "kl": float(-x.mean()),
        "k3_kl": float((x.exp() - x - 1.0).mean()),
        "training_ppl": float((-learner).exp().mean()),
        "training_log_ppl": float(-learner.mean()),
        "rollout_ppl": float((-engine).exp().mean()),
        "rollout_log_ppl": float(-engine.mean()),
        "log_ppl_diff": float(apart.mean()),
        "log_ppl_abs_diff": float(apart.abs().mean()),
        "log_ppl_diff_max": float(apart.max()),
        "log_ppl_diff_min": float(apart.min()),
        "ppl_ratio": float(apart.exp().mean()),
        "chi2_token": float((2.0 * x.clamp(-LOG_BOUND, LOG_BOUND)).exp().mean() - 1.0),
        "chi2_seq": float((2.0 * total).exp().mean() - 1.0),
    }


def _mean(which: Tensor) -> float:
    """Share of what is true."""
    return float(which.double().mean())


def _deviation(values: Tensor) -> float:
    """Unbiased; 0 of a single value."""
    return float(values.std()) if len(values) > 1 else 0.0
