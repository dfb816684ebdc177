"""If these fail, loss, entropy, divergence and the gap's weights are put together wrongly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from quintet.algorithms.aggregation import Aggregation
from quintet.algorithms.objective import PolicyObjective, batch_targets
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.records import Batch

MakeBatch = Callable[..., Batch]


@pytest.fixture
def batch(make_batch: MakeBatch) -> Batch:
    """Two episodes of one and three own tokens, the env's words between them."""
    made = make_batch([[0, 1], [1, 0, 1, 1]], [[0.0] * 2, [0.0] * 4])
    advantages = torch.tensor([0, 2, 1, 0, 1, -1], dtype=torch.float64)
    return replace(made, logprobs=torch.full((6,), math.log(0.2), dtype=torch.float64), advantages=advantages)


NOW = torch.tensor([0.2, 0.2, 0.2, 0.4], dtype=torch.float64).log()
ENTROPY = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)


def loss_and_metrics(batch: Batch, mode: str = "token-mean", **config: object) -> tuple[float, dict[str, float]]:
    objective = PolicyObjective(AlgorithmConfig.model_validate(config))
    targets = objective.targets(batch, Aggregation(mode, scale=10.0), logprobs=lambda _: torch.zeros(6))
    loss, metrics = objective(NOW, ENTROPY, targets)
    return float(loss), {name: float(value) for name, value in metrics.items()}


def test_loss_and_metrics_by_hand(batch: Batch) -> None:
    loss, metrics = loss_and_metrics(batch, entropy_coefficient=0.1)
    assert metrics["actor/pg_loss"] == pytest.approx((-2 - 1 - 1 + 2) / 4)
    assert metrics["actor/entropy"] == pytest.approx(2.5)
    assert loss == pytest.approx(-0.5 - 0.25)
    assert metrics["actor/ratio"] == pytest.approx((1 + 1 + 1 + 2) / 4)
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(2.0) / 4)


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_shares_stay_means_over_tokens_whatever_the_aggregation(batch: Batch, mode: str) -> None:
    loss, metrics = loss_and_metrics(batch, mode, loss={"name": "ppo", "clip_dual": 1.5})
    assert metrics["actor/ratio"] == pytest.approx(1.25)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(1 / 4)
    sums = {"seq-mean-token-sum": 1 / 2, "seq-mean-token-mean": 1 / 6, "seq-mean-token-sum-norm": 1 / 20}[mode]
    first = {"seq-mean-token-mean": 1 / 2}.get(mode, sums)
    assert loss == pytest.approx(-2 * first + (-1 - 1 + 1.5) * sums)


def test_correction_weights_multiply_only_the_loss(batch: Batch) -> None:
    weighed = replace(batch, correction=torch.tensor([9, 0.5, 2, 9, 1, 0], dtype=torch.float64))
    _, metrics = loss_and_metrics(weighed)
    assert metrics["actor/pg_loss"] == pytest.approx((-1 - 2 - 1) / 4)
    assert metrics["actor/entropy"] == pytest.approx(2.5)


def test_the_divergence_that_kl_cov_reports_is_signed_as_with_all_losses(batch: Batch) -> None:
    """verl reports the mean of absolute log-ratios, for this loss alone."""
    metrics = [loss_and_metrics(batch, loss={"name": name})[1] for name in ("kl_cov", "ppo")]
    assert metrics[0]["actor/ppo_kl"] == pytest.approx(metrics[1]["actor/ppo_kl"])


def test_gmpo_counts_every_reply_alike_and_leaves_entropy_to_the_aggregation(batch: Batch) -> None:
    _, metrics = loss_and_metrics(batch, loss={"name": "gmpo", "clip_high": 9.0, "clip_low": 9.0})
    geometric = 2.0 ** (1 / 3)
    assert metrics["actor/pg_loss"] == pytest.approx((-2 - geometric / 3) / 2)
    assert metrics["actor/entropy"] == pytest.approx(2.5)


def test_tokens_that_decoupled_ppo_excludes_do_not_count_in_the_mean(batch: Batch) -> None:
    engine = batch.logprobs.clone()
    engine[5] -= 1.0  # a weight of e
    loss = {"name": "decoupled_ppo", "max_weight": 2.0}
    _, metrics = loss_and_metrics(replace(batch, rollout_logprobs=engine), loss=loss)
    assert metrics["actor/pg_loss"] == pytest.approx((-2 - 1 - 1) / 3)
    assert metrics["actor/entropy"] == pytest.approx(2.5)


def test_the_divergence_is_a_term_of_the_loss(batch: Batch) -> None:
    reference = torch.full((6,), math.log(0.1), dtype=torch.float64)
    kl = {"estimator": "k1", "coefficient": 0.5}
    loss, metrics = loss_and_metrics(replace(batch, ref_logprobs=reference), kl=kl)
    expected = (3 * math.log(2.0) + math.log(4.0)) / 4
    assert metrics["actor/kl_loss"] == pytest.approx(expected)
    assert loss == pytest.approx(-0.5 + 0.5 * expected)
    _, swapped = loss_and_metrics(replace(batch, ref_logprobs=reference), kl={**kl, "swapped": True})
    assert swapped["actor/kl_loss"] == pytest.approx(-expected)
    _, rewarded = loss_and_metrics(replace(batch, ref_logprobs=reference), kl={**kl, "apply_to": "reward"})
    assert "actor/kl_loss" not in rewarded
    assert loss_and_metrics(replace(batch, ref_logprobs=reference), kl=kl, reward_kl={"coefficient": 9.0}) == (
        loss,
        metrics,
    )


def test_stopping_needs_a_bound() -> None:
    assert not PolicyObjective(AlgorithmConfig()).skips_update({"actor/ratio": 1e9})
    skips = PolicyObjective(AlgorithmConfig(stop_ratio=2.0)).skips_update
    assert [skips({"actor/ratio": ratio}) for ratio in (1.9, 2.0, 2.1)] == [False, False, True]


def test_targets_are_those_of_response_tokens_in_order(batch: Batch) -> None:
    targets = batch_targets(batch, Aggregation())
    assert targets.advantages.tolist() == [2, 1, 1, -1]
    assert targets.sequence is not None
    assert targets.sequence.tolist() == [0, 1, 1, 1]
    some = targets.at(torch.tensor([3, 0]))
    assert some.advantages.tolist() == [-1, 2]
    assert some.ref_logprobs is None
