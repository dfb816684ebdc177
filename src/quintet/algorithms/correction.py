"""Rollout correction: importance weights and rejection for the log-prob gap between engine and learner.

Their log-probs of the same tokens differ by precision, kernels, or because the engine's weights are older. Importance
weights correct for the gap; tokens with too large a gap can be masked. Weights, bounds and metric names are those of
verl 0.9.1 (`rollout_corr_helper.py`). Truncation: Yao et
al. 2025, "Your efficient RL framework secretly brings you off-policy training"; masking: IcePop, Ling team 2025.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.config.native.algorithm import CorrectionConfig, RejectionConfig
from quintet.records import Batch

LOG_BOUND = 20.0
"""Clamp on log-ratios before they are exponentiated."""


@dataclass(frozen=True, slots=True)
class _ResponseLogProbs:
    """Log-probs of response tokens with the trajectory of each; trajectories without any are left out."""

    learner: Tensor
    """[M], nats."""
    engine: Tensor
    """[M], nats."""
    member: Tensor
    """int64 [M]."""
    count: Tensor
    """int64 [S], number of response tokens of each trajectory."""

    @classmethod
    def from_batch(cls, batch: Batch) -> _ResponseLogProbs:
        if batch.rollout_logprobs is None:
            raise ValueError("rollout correction needs a batch with `rollout_logprobs`")
        mask = batch.loss_mask
        _, member, count = torch.unique(batch.token_trajectory[mask], return_inverse=True, return_counts=True)
        return cls(batch.logprobs[mask], batch.rollout_logprobs[mask], member, count)

    @property
    def log_ratio(self) -> Tensor:
        """log(learner / engine), [M]."""
        return self.learner - self.engine

    def sum(self, values: Tensor) -> Tensor:
        """Sum per trajectory, [M] to [S]."""
        return values.new_zeros(len(self.count)).index_add(0, self.member, values)

    def mean(self, values: Tensor) -> Tensor:
        """Mean per trajectory, [M] to [S]."""
        return self.sum(values) / self.count

    def max(self, values: Tensor) -> Tensor:
        """Maximum per trajectory, [M] to [S]."""
        return values.new_zeros(len(self.count)).scatter_reduce(0, self.member, values, "amax", include_self=False)


def rollout_correction(batch: Batch, config: CorrectionConfig) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return `(weights [N], keep bool [N], metrics)`.

    `weights` multiply the loss of each token, 0 outside the loss mask; `keep` are the tokens to train on, true outside
    the mask; metrics are `rollout_corr/*`. With ρ = exp(learner - engine), per token or, at `level: sequence`, the
    product over a trajectory's response tokens: weights are min(ρ, upper); or ρ between `lower` and `upper` and 0
    elsewhere; 1 without a level. They have no gradient.

    Raises:
        ValueError: the batch lacks the log-probs of the engine.
    """
    logprobs, mask = _ResponseLogProbs.from_batch(batch), batch.loss_mask
    weights = torch.zeros_like(batch.logprobs)
    keep = torch.ones_like(mask)
    if not len(logprobs.count):
        return weights, keep, {}
    metrics: dict[str, float] = {}
    if config.level is None:
        weights[mask] = 1.0
    else:
        weights[mask], metrics = _weights(logprobs, config)
    if config.reject:
        keep[mask], rejected = _keep(logprobs, config.reject)
        metrics |= rejected
    metrics |= _gap(logprobs)
    return weights, keep, {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _weights(logprobs: _ResponseLogProbs, config: CorrectionConfig) -> tuple[Tensor, dict[str, float]]:
    """Return weights [M] and their metrics before normalization to mean 1."""
    total = logprobs.sum(logprobs.log_ratio)
    by_token = config.level == "token"
    raw = (logprobs.log_ratio if by_token else total[logprobs.member]).clamp(-LOG_BOUND, LOG_BOUND).exp()
    inside = raw <= config.upper
    if config.lower is None:
        weights = raw.clamp(max=config.upper)
    else:
        inside &= raw >= config.lower
        weights = raw * inside
    metrics = _weight_metrics(logprobs, raw, weights, config)
    if config.lower is not None:
        metrics["rollout_is_oob_ratio"] = _mean(~inside)
    if config.normalize:
        mean = float(weights.mean() if by_token else logprobs.mean(weights).mean())
        metrics["rollout_is_batch_norm_factor"] = mean if mean > 1e-8 else 1.0
        weights = weights / metrics["rollout_is_batch_norm_factor"]
    return weights, metrics


def _weight_metrics(
    logprobs: _ResponseLogProbs, raw: Tensor, weights: Tensor, config: CorrectionConfig
) -> dict[str, float]:
    low = config.lower or 1.0 / config.upper
    per_sequence = logprobs.mean(weights)
    plain = logprobs.mean(raw)
    if config.level == "token":
        largest = weights.max()
        smallest = weights.min()
        high = raw > config.upper
        low_share = raw < low
    else:
        total = logprobs.sum(logprobs.log_ratio)
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
        "rollout_is_seq_mean": float(per_sequence.mean()),
        "rollout_is_seq_std": _deviation(per_sequence),
        "rollout_is_seq_max": float(per_sequence.max()),
        "rollout_is_seq_min": float(per_sequence.min()),
        "rollout_is_seq_max_deviation": float((per_sequence - 1.0).abs().max()),
        "rollout_is_seq_fraction_high": _mean(plain > config.upper),
        "rollout_is_seq_fraction_low": _mean(plain < low),
    }


def _keep(logprobs: _ResponseLogProbs, rejections: tuple[RejectionConfig, ...]) -> tuple[Tensor, dict[str, float]]:
    """Return the tokens that pass all rejection rules, bool [M]."""
    keep = torch.ones_like(logprobs.member, dtype=torch.bool)
    metrics: dict[str, float] = {}
    for rejection in rejections:
        passed, rule_metrics = _passes(logprobs, rejection)
        keep &= passed
        metrics |= rule_metrics
    metrics["rollout_rs_masked_fraction"] = _mean(~keep)
    metrics["rollout_rs_seq_masked_fraction"] = _mean(logprobs.sum((~keep).double()) > 0)
    return keep, metrics


def _passes(logprobs: _ResponseLogProbs, config: RejectionConfig) -> tuple[Tensor, dict[str, float]]:
    """Return the tokens that pass a rejection rule, bool [M].

    With x = log(learner / engine): k1 is -x, which must be between the logarithms of the bounds; k2 is x²/2, k3 is
    exp(x) - 1 - x, each at most `upper`.
    """
    x = logprobs.log_ratio.clamp(-LOG_BOUND, LOG_BOUND)
    values = {"k1": -x, "k2": 0.5 * x.square(), "k3": x.exp() - 1.0 - x}[config.estimator]
    if config.estimator == "k1":
        lower, upper = math.log(config.lower or 1.0 / config.upper), math.log(config.upper)
    else:
        lower, upper = -math.inf, config.upper
    over = {"sequence_sum": logprobs.sum, "sequence_mean": logprobs.mean, "sequence_max": logprobs.max}
    by_sequence = over[config.over](values) if config.over in over else None
    statistic = values if by_sequence is None else by_sequence[logprobs.member]
    passed = (statistic >= lower) & (statistic <= upper)
    name = f"rollout_rs_{config.over.replace('sequence', 'seq')}_{config.estimator}"
    metrics = _rejection_metrics(logprobs, statistic, by_sequence, lower, upper)
    metrics["masked_fraction"] = _mean(~passed)
    metrics["seq_masked_fraction"] = _mean(logprobs.sum((~passed).double()) > 0)
    return passed, {f"{name}_{key}": value for key, value in metrics.items()}


def _rejection_metrics(
    logprobs: _ResponseLogProbs, statistic: Tensor, by_sequence: Tensor | None, lower: float, upper: float
) -> dict[str, float]:
    per_sequence = logprobs.mean(statistic) if by_sequence is None else by_sequence
    compared = statistic if by_sequence is None else by_sequence
    bounded = statistic.clamp(min=0.0 if math.isinf(lower) else lower, max=upper)
    return {
        "mean": float(statistic.mean()),
        "max": float(compared.max()),
        "min": float(compared.min()),
        "std": float(bounded.std(correction=0)),
        "fraction_high": _mean(compared > upper),
        "fraction_low": _mean(compared < lower),
        "seq_mean": float(per_sequence.mean()),
        "seq_std": _deviation(per_sequence),
        "seq_max": float(per_sequence.max()),
        "seq_min": float(per_sequence.min()),
        "seq_max_deviation": float(per_sequence.abs().max()),
        "seq_fraction_high": _mean(per_sequence > upper),
        "seq_fraction_low": _mean(per_sequence < lower),
    }


def _gap(logprobs: _ResponseLogProbs) -> dict[str, float]:
    """Return metrics of the gap between engine and learner: KL divergences, perplexities, χ²."""
    x = logprobs.log_ratio
    learner, engine = logprobs.mean(logprobs.learner), logprobs.mean(logprobs.engine)
    difference = engine - learner
    total = logprobs.sum(x).clamp(-LOG_BOUND, LOG_BOUND)
    return {
        "kl": float(-x.mean()),
        "k3_kl": float((x.exp() - x - 1.0).mean()),
        "training_ppl": float((-learner).exp().mean()),
        "training_log_ppl": float(-learner.mean()),
        "rollout_ppl": float((-engine).exp().mean()),
        "rollout_log_ppl": float(-engine.mean()),
        "log_ppl_diff": float(difference.mean()),
        "log_ppl_abs_diff": float(difference.abs().mean()),
        "log_ppl_diff_max": float(difference.max()),
        "log_ppl_diff_min": float(difference.min()),
        "ppl_ratio": float(difference.exp().mean()),
        "chi2_token": float((2.0 * x.clamp(-LOG_BOUND, LOG_BOUND)).exp().mean() - 1.0),
        "chi2_seq": float((2.0 * total).exp().mean() - 1.0),
    }


def _mean(flags: Tensor) -> float:
    """Return the share of true values."""
    return float(flags.double().mean())


def _deviation(values: Tensor) -> float:
    """Return the unbiased standard deviation; 0 of a single value."""
    return float(values.std()) if len(values) > 1 else 0.0
