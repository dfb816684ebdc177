"""If these fail, our numbers aren't RLinf's and ROLL's, or no longer differ where those are wrong.

`golden_rlinf.json` and `golden_roll.json` were made by their own functions, in float32.

Not compared, because the numbers were stored without what they were computed from: ROLL's aggregations (`agg_*`), its
agentic returns (`agentic_reinforce_*`) and partitions by length (`seqlen_parts`), RLinf's value loss (`critic`) and its
embodied losses (`emb_loss_*`). These and its embodied advantages (`embodied_*`) are compared in `test_rlinf_chunks.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.algorithms.advantages.gae import gae
from quintet.algorithms.advantages.outcome import grpo, raw, reinforce_plus_plus_baseline
from quintet.algorithms.advantages.returns import reinforce
from quintet.algorithms.aggregation import token_weights
from quintet.algorithms.kl import kl_estimate
from quintet.algorithms.losses.clipping import ppo_clip
from quintet.algorithms.shaping import shape_rewards
from quintet.algorithms.tokens import whiten
from quintet.config.native.advantages import (
    GaeConfig,
    GrpoConfig,
    RawConfig,
    ReinforceConfig,
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
)
from quintet.config.native.algorithm import ShapingConfig
from quintet.records import Batch

MakeBatch = Callable[..., Batch]

GOLDEN = Path(__file__).parent / "golden"
RLINF: dict[str, Any] = json.loads((GOLDEN / "golden_rlinf.json").read_text())
ROLL: dict[str, Any] = json.loads((GOLDEN / "golden_roll.json").read_text())
GROUPS = [0, 0, 1, 1]
ROLL_REWARDS = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
ROLL_GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]


def rows(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same(actual: torch.Tensor, told: torch.Tensor) -> None:
    """float32's rounding of numbers up to 10."""
    torch.testing.assert_close(actual, told.double(), atol=2e-6, rtol=2e-6)


def rlinf_batch(make_batch: MakeBatch, values: list[list[float]] | None = None) -> Batch:
    """Their four replies, each with its reward at the last of its own tokens."""
    actual = RLINF["reasoning_grpo"]
    rewards = [[0.0] * 4 for _ in actual["mask"]]
    for row, mask in enumerate(actual["mask"]):
        rewards[row][sum(mask) - 1] = actual["rewards"][row]
    return make_batch(actual["mask"], rewards, group=GROUPS, values=values)


@pytest.mark.parametrize(
    ("name", "estimate"),
    [
        ("reasoning_grpo", lambda batch: grpo(batch, GrpoConfig())),
        ("reasoning_raw", lambda batch: raw(batch, RawConfig())),
    ],
)
def test_rlinf_outcome_advantages(make_batch: MakeBatch, name: str, estimate: Callable[[Batch], Any]) -> None:
    advantages, _ = estimate(rlinf_batch(make_batch))
    same(advantages.view(4, 4), rows(RLINF[name]["adv"]))


def test_rlinf_reinforce_plus_plus_whitens_by_the_biased_deviation(make_batch: MakeBatch) -> None:
    """√(M / (M - 1)) apart, M the own tokens: ours is the unbiased one of verl and of the other estimators. Theirs
    has the reward at the last column instead of the last own token, which shows with a penalty alone."""
    batch = rlinf_batch(make_batch)
    advantages, _ = reinforce(batch, ReinforcePlusPlusConfig(name="reinforce_plus_plus"))
    count = int(batch.loss_mask.sum())
    actual = rows(RLINF["reasoning_reinpp"]["adv"]).flatten() * batch.loss_mask
    same(advantages * (count / (count - 1)) ** 0.5, actual)


def test_rlinfs_reinforce_plus_plus_baseline_crashes_and_ours_does_not(make_batch: MakeBatch) -> None:
    """Worked out by hand: rewards less the mean are 5, -5, 0, 0 on 3, 2, 4 and 1 tokens."""
    assert "IndexError" in RLINF["reasoning_reinpp_baseline"]["error"]
    config = ReinforcePlusPlusBaselineConfig(name="reinforce_plus_plus_baseline")
    advantages, _ = reinforce_plus_plus_baseline(rlinf_batch(make_batch), config)
    mean = (3 * 5 - 2 * 5) / 10
    deviation = ((3 * (5 - mean) ** 2 + 2 * (-5 - mean) ** 2 + 5 * mean**2) / 9) ** 0.5
    expected = [(5 - mean) / deviation] * 3 + [0] + [(-5 - mean) / deviation] * 2 + [0] * 2
    same(advantages[:8], torch.tensor(expected, dtype=torch.float64))


def test_rlinf_gae_agrees_where_nothing_is_masked(make_batch: MakeBatch) -> None:
    """Their recursion knows no mask and takes the reward for one at the last column: on the reply that fills its row
    we agree; on the first, of three tokens, ours begins at the third."""
    values = [[0.1, 0.2, 0.3, 0.4]] * 4
    config = GaeConfig(gamma=1.0, lam=0.95, whiten=False)
    advantages, returns = gae(rlinf_batch(make_batch, values), config)
    actual = RLINF["reasoning_gae"]
    same(advantages.view(4, 4)[2], rows(actual["adv"])[2])
    same(returns.view(4, 4)[2], rows(actual["returns"])[2])
    third = 5.0 - 0.3
    second = (0.3 - 0.2) + 0.95 * third
    first = (0.2 - 0.1) + 0.95 * second
    same(advantages.view(4, 4)[0], torch.tensor([first, second, third, 0.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("ours", "theirs"), [("k1", "kl"), ("k1", "k1"), ("abs", "abs"), ("k2", "mse"), ("k3", "low_var_kl"), ("k3", "k3")]
)
def test_divergences(ours: str, theirs: str) -> None:
    """Of the same two pairs of log-probs, half a nat apart either way, in both frameworks."""
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    reference = logprobs - torch.tensor([0.5, -0.5], dtype=torch.float64)
    actual = kl_estimate(logprobs, reference, ours)
    same(actual, torch.tensor(RLINF["kl"][theirs]))
    if theirs in ROLL["kl"]:
        same(actual, torch.tensor(ROLL["kl"][theirs]))


@pytest.mark.parametrize("dual", [None, 3.0])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_rlinf_actor_loss(mode: str, dual: float | None) -> None:
    inputs = {name: rows(values) for name, values in RLINF["loss_inputs"].items()}
    mask = inputs["mask"].bool()
    flat = [inputs[name].flatten() for name in ("logprobs", "old", "adv")]
    parts = ppo_clip(*flat, 0.2, 0.2, dual)
    weights = token_weights(mode, mask.flatten(), torch.tensor([0, 0, 0, 1, 1, 1]), dtype=torch.float64)
    actual = RLINF[f"loss_actor_{mode}_c{dual}"]
    same((parts.loss * weights).sum(), torch.tensor(actual["loss"]))
    own = mask.flatten()
    same(parts.clipped[own].double().mean(), torch.tensor(actual["metrics"]["actor/clip_fraction"]))


@pytest.mark.parametrize("name", ["1", ".9"])
def test_roll_reinforce(make_batch: MakeBatch, name: str) -> None:
    batch = make_batch([[1, 1, 1, 1], [1, 1, 0, 0]], [[0, 0, 0, 1.0], [0, -1.0, 0, 0]])
    advantages, _ = reinforce(batch, ReinforceConfig(name="reinforce", gamma=float(name)))
    same(advantages.view(2, 4), rows(ROLL[f"reinforce_g{name}"]))


def test_roll_gae_agrees_where_nothing_is_masked(make_batch: MakeBatch) -> None:
    """Their recursion takes the value behind a reply's end for that of a next token; ours is 0 there."""
    batch = make_batch([[1, 1, 1, 1], [1, 1, 0, 0]], [[0, 0, 0, 1.0], [0, -1.0, 0, 0]], values=[[0.5] * 4, [0.5] * 4])
    advantages, returns = gae(batch, GaeConfig(gamma=1.0, lam=0.95, whiten=False))
    same(advantages.view(2, 4)[0], rows(ROLL["gae"]["adv"])[0])
    same(returns.view(2, 4)[0], rows(ROLL["gae"]["ret"])[0])
    same(advantages.view(2, 4)[1], torch.tensor([0.95 * -1.5, -1.5, 0, 0], dtype=torch.float64))


def test_roll_whitening_of_the_replys_own_tokens() -> None:
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool().flatten()
    actual = whiten(rows(ROLL["gae"]["adv"]).flatten(), mask)
    same(actual[mask], rows(ROLL["whiten"]).flatten()[mask])


@pytest.mark.parametrize("divide", ["none", "batch", "group"])
@pytest.mark.parametrize("center", ["none", "batch", "group"])
def test_roll_reward_normalisation(make_batch: MakeBatch, center: Any, divide: Any) -> None:
    """Dividing by the group's deviation without taking its mean off, theirs has the wrong shape, and is divided by
    1e-6 where all rewards of a group are the same; ours is left alone there."""
    batch = make_batch([[1]] * 8, [[reward] for reward in ROLL_REWARDS], group=ROLL_GROUPS)
    actual = shape_rewards(batch, ShapingConfig(center=center, divide=divide), 1).rewards
    theirs = {"none": "None"}
    result = torch.tensor(ROLL[f"reward_norm_mean={theirs.get(center, center)}_std={theirs.get(divide, divide)}"])
    if divide != "group" or center == "group":
        same(actual, result)
        return
    assert result.shape == (2, 8)
    same(actual[:4], result[0, :4])
    assert result[1, 4] > 1e5
    same(actual[4:], torch.full((4,), 1.0 if center == "none" else 0.375))
