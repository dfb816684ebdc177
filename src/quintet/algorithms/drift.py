"""Drift check: the gap between the log-probs of engine and learner per token.

Both compute the log-probs of the same tokens under the same weights, so they should only differ by rounding. Larger
gaps indicate a bug: a weight that did not reach the engine, a KV cache from older weights, a temperature that only
one of them uses, or retokenized text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

import torch
from torch import Tensor

MAX_GAP: Final[Mapping[str, tuple[float, float]]] = {
    "float32": (1e-4, 0.0),
    "float16": (0.05, 0.01),
    "bfloat16": (0.2, 0.01),
}
"""By data type: maximum gap of a token's log-probs, nats, and maximum share of tokens beyond it."""

LOG_BOUND = 20.0
"""Clamp on log-ratios before they are exponentiated, as in `correction`."""


def max_gap(dtype: torch.dtype) -> float:
    """Return the maximum gap of log-probs with this data type, nats."""
    return MAX_GAP[str(dtype).removeprefix("torch.")][0]


def token_gaps(learner: Tensor, engine: Tensor, limit: float) -> dict[str, Tensor]:
    """Return the gap measures per token, each [M]; `learner` and `engine` are log-probs, nats [M].

    With x = log(learner / engine) of tokens that the engine sampled: `probs_diff` is |Δ probability|; `kl` -x and
    `k3_kl` exp(x) - 1 - x, estimates of KL(engine ‖ learner) (Schulman 2020, k1 and k3; verl's `rollout_corr/kl` and
    `rollout_corr/k3_kl`); `above_limit` is 1 where |x| exceeds `limit` or is NaN.
    """
    x = learner - engine
    clamped = x.clamp(-LOG_BOUND, LOG_BOUND)
    return {
        "probs_diff": (learner.exp() - engine.exp()).abs(),
        "kl": -x,
        "k3_kl": clamped.exp() - 1.0 - clamped,
        # not `> limit`: NaN exceeds any limit
        "above_limit": (~(x.abs() <= limit)).to(x.dtype),
    }


@dataclass(frozen=True, slots=True)
class Drift:
    """Gap statistics over tokens."""

    tokens: int
    probs_diff_max: float
    probs_diff_mean: float
    probs_diff_std: float
    """Unbiased; verl's `training/rollout_probs_diff_std`."""
    logprobs_diff_max: float
    """Nats; infinite if a log-prob is NaN."""
    logprobs_diff_mean: float
    kl: float
    """Nats, k1."""
    k3_kl: float
    """Nats; unlike with k1, no token's term is negative."""
    pearson: float | None
    """Correlation of the two probabilities (verl's `training/rollout_actor_probs_pearson_corr`); None if one of
    them is constant."""
    share_above_limit: float
    """Share of tokens whose log-probs differ by more than `limit`."""
    limit: float

    def as_json(self) -> dict[str, float | None]:
        """Return the statistics by name; values that are not finite become None."""
        return {name: value if _finite(value) else None for name, value in asdict(self).items()}


def measure_drift(learner: Tensor, engine: Tensor, limit: float) -> Drift:
    """Return the gap statistics of log-probs, nats [M]; see `token_gaps`.

    Raises:
        ValueError: there are no tokens.
    """
    if not len(learner):
        raise ValueError("there are no tokens to compare")
    learner, engine = learner.double(), engine.double()
    gaps = token_gaps(learner, engine, limit)
    difference, probs = (learner - engine).abs(), gaps["probs_diff"]
    return Drift(
        tokens=len(learner),
        probs_diff_max=float(probs.max()),
        probs_diff_mean=float(probs.mean()),
        probs_diff_std=float(probs.std()) if len(probs) > 1 else 0.0,
        logprobs_diff_max=float(torch.where(difference.isnan(), math.inf, difference).max()),
        logprobs_diff_mean=float(difference.mean()),
        kl=float(gaps["kl"].mean()),
        k3_kl=float(gaps["k3_kl"].mean()),
        pearson=_pearson(learner.exp(), engine.exp()),
        share_above_limit=float(gaps["above_limit"].mean()),
        limit=limit,
    )


def _pearson(learner_probs: Tensor, engine_probs: Tensor) -> float | None:
    if len(learner_probs) < 2 or not float(learner_probs.std()) * float(engine_probs.std()) > 0:
        return None
    return float(torch.corrcoef(torch.stack((learner_probs, engine_probs)))[0, 1])


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
