"""How far the engine that wrote is from the learner that learns, token by token.

Both say how likely the same tokens are under the same weights. What differs is rounding, as long as nothing is wrong:
a weight that didn't reach the engine, a prompt that was computed under older ones, a temperature that only one of them
knows, tokens that were spelled anew on their way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

import torch
from torch import Tensor

__all__ = ["TOLERATED", "Drift", "drift", "token_gaps", "tolerated"]

TOLERATED: Final[Mapping[str, tuple[float, float]]] = {
    "float32": (1e-4, 0.0),
    "float16": (0.05, 0.01),
    "bfloat16": (0.2, 0.01),
}
"""By type of numbers: how far apart the log-probabilities of a token may be, nats, and of which share of the tokens
they may be further."""

LOG_BOUND = 20.0
"""Log-ratios are held within ± this before they are exponentiated, as in `correction`."""


def tolerated(dtype: torch.dtype) -> float:
    """How far apart log-probs may be in that type, nats."""
    return TOLERATED[str(dtype).removeprefix("torch.")][0]


def token_gaps(learner: Tensor, engine: Tensor, limit: float) -> dict[str, Tensor]:
    """What is averaged over tokens to tell the gap, each [M]; `learner` and `engine` are log-probs, nats [M].

    With x = log(learner / engine) of tokens that the engine drew: `probs_diff` is |Δ probability|; `kl` -x and `k3_kl`
    exp(x) - 1 - x, estimates of KL(engine ‖ learner) (Schulman 2020, k1 and k3; verl's `rollout_corr/kl` and
    `rollout_corr/k3_kl`); `beyond` 1 where |x| is over `limit`, or isn't a number.
    """
    x = learner - engine
    held = x.clamp(-LOG_BOUND, LOG_BOUND)
    return {
        "probs_diff": (learner.exp() - engine.exp()).abs(),
        "kl": -x,
        "k3_kl": held.exp() - 1.0 - held,
        # not `> limit`: what isn't a number is beyond any
        "beyond": (~(x.abs() <= limit)).to(x.dtype),
    }


@dataclass(frozen=True, slots=True)
class Drift:
    """The gap over some tokens."""

    tokens: int
    probs_diff_max: float
    probs_diff_mean: float
    probs_diff_std: float
    """Unbiased; verl's `training/rollout_probs_diff_std`."""
    logprobs_diff_max: float
    """Nats; infinite where a log-probability isn't a number."""
    logprobs_diff_mean: float
    kl: float
    """Nats, k1."""
    k3_kl: float
    """Nats; unlike k1, no token's share is negative."""
    pearson: float | None
    """Correlation of the two probabilities (verl's `training/rollout_actor_probs_pearson_corr`); None where one of
    them is always the same."""
    beyond: float
    """Share of tokens whose log-probabilities are further apart than `limit`."""
    limit: float

    def as_json(self) -> dict[str, float | None]:
        """By name; what isn't finite is null."""
        return {name: value if _finite(value) else None for name, value in asdict(self).items()}


def drift(learner: Tensor, engine: Tensor, limit: float) -> Drift:
    """The gap between both, nats [M]; see `token_gaps`.

    Raises:
        ValueError: there are no tokens.
    """
    if not len(learner):
        raise ValueError("there are no tokens to compare")
    learner, engine = learner.double(), engine.double()
    gaps = token_gaps(learner, engine, limit)
    apart, probs = (learner - engine).abs(), gaps["probs_diff"]
    return Drift(
        tokens=len(learner),
        probs_diff_max=float(probs.max()),
        probs_diff_mean=float(probs.mean()),
        probs_diff_std=float(probs.std()) if len(probs) > 1 else 0.0,
        logprobs_diff_max=float(torch.where(apart.isnan(), math.inf, apart).max()),
        logprobs_diff_mean=float(apart.mean()),
        kl=float(gaps["kl"].mean()),
        k3_kl=float(gaps["k3_kl"].mean()),
        pearson=_pearson(learner.exp(), engine.exp()),
        beyond=float(gaps["beyond"].mean()),
        limit=limit,
    )


def _pearson(one: Tensor, other: Tensor) -> float | None:
    if len(one) < 2 or not float(one.std()) * float(other.std()) > 0:
        return None
    return float(torch.corrcoef(torch.stack((one, other)))[0, 1])


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
