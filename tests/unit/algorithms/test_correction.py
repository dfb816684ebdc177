"""If these fail, the gap between engine and learner is made up for wrongly, or the wrong words are left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from quintet.algorithms.correction import rollout_correction
from quintet.config.native.algorithm import CorrectionConfig, RejectionConfig
from quintet.records import Batch

MakeBatch = Callable[..., Batch]
RATIOS = [[1.0, 2.0, 1.5], [0.5, 4.0, 1.0]]
"""learner / engine; the first token of the first episode and the last of the second are the env's."""
MASKS = [[0, 1, 1], [1, 1, 0]]


@pytest.fixture
def batch(make_batch: MakeBatch) -> Batch:
    made = make_batch(MASKS, [[0.0] * 3] * 2)
    engine = torch.tensor([0.1] * 6, dtype=torch.float64).log()
    ratio = torch.tensor(RATIOS, dtype=torch.float64).flatten()
    return replace(made, logprobs=engine + ratio.log(), rollout_logprobs=engine)


def weights(batch: Batch, **config: Any) -> list[float]:
    return rollout_correction(batch, CorrectionConfig(**config))[0].tolist()


def test_token_weights_are_cut(batch: Batch) -> None:
    assert weights(batch, upper=1.8) == pytest.approx([0, 1.8, 1.5, 0.5, 1.8, 0])


def test_sequence_weights_are_the_product_over_a_episode(batch: Batch) -> None:
    assert weights(batch, level="sequence", upper=2.5) == pytest.approx([0, 2.5, 2.5, 2.0, 2.0, 0])


def test_with_a_lower_bound_weights_outside_become_0(batch: Batch) -> None:
    assert weights(batch, upper=1.8, lower=0.4) == pytest.approx([0, 0, 1.5, 0.5, 0, 0])


def test_weights_may_be_brought_to_mean_1(batch: Batch) -> None:
    assert weights(batch, upper=2.0, normalize=True) == pytest.approx([0, 2 / 1.5, 1, 0.5 / 1.5, 2 / 1.5, 0])
    assert weights(batch, level="sequence", upper=2.5, normalize=True) == pytest.approx(
        [0, 2.5 / 2.25, 2.5 / 2.25, 2 / 2.25, 2 / 2.25, 0]
    )


def test_without_a_level_all_correction_weights_are_1(batch: Batch) -> None:
    assert weights(batch, level=None) == [0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("rejection", "kept"),
    [
        ({"upper": 1.9}, [0, 1, 0, 0]),  # k1: engine / learner between 1 / 1.9 and 1.9
        ({"upper": 2.1}, [1, 1, 1, 0]),
        ({"upper": 2.1, "lower": 0.6}, [0, 1, 1, 0]),
        ({"estimator": "k2", "upper": 0.3}, [1, 1, 1, 0]),  # x² / 2 of ln 4 is 0.96
        ({"estimator": "k3", "upper": 0.25}, [0, 1, 1, 0]),  # 2 - 1 - ln 2 = 0.31
        ({"over": "sequence_sum", "upper": 2.5}, [0, 0, 1, 1]),  # products 3 and 2
        ({"over": "sequence_mean", "upper": 1.5}, [0, 0, 1, 1]),  # roots 1.73 and 1.41
        ({"over": "sequence_max", "estimator": "k2", "upper": 0.5}, [1, 1, 0, 0]),
    ],
)
def test_rejections_by_hand(batch: Batch, rejection: dict[str, Any], kept: list[int]) -> None:
    config = CorrectionConfig(level=None, reject=(RejectionConfig(**rejection),))
    _, keep, metrics = rollout_correction(batch, config)
    assert keep.tolist() == [True, *map(bool, kept), True]
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - sum(kept) / 4)


def test_all_rejections_count(batch: Batch) -> None:
    rules = (RejectionConfig(upper=2.1), RejectionConfig(upper=2.5, over="sequence_sum"))
    _, keep, metrics = rollout_correction(batch, CorrectionConfig(reject=rules))
    assert keep.tolist() == [True, False, False, True, False, True]
    assert metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"] == pytest.approx(1 / 4)
    assert metrics["rollout_corr/rollout_rs_seq_sum_k1_seq_masked_fraction"] == pytest.approx(1 / 2)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1.0


def test_the_gap_is_measured(batch: Batch) -> None:
    _, _, metrics = rollout_correction(batch, CorrectionConfig(upper=2.0))
    logs = [math.log(r) for r in (2.0, 1.5, 0.5, 4.0)]
    assert metrics["rollout_corr/kl"] == pytest.approx(-sum(logs) / 4)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx((4 + 2.25 + 0.25 + 16) / 4 - 1)
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx((9 + 4) / 2 - 1)
    assert metrics["rollout_corr/rollout_ppl"] == pytest.approx(10.0)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((2 + 1.5 + 0.5 + 2) / 4)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 4)


def test_correction_without_engine_log_probs_is_an_error(batch: Batch) -> None:
    with pytest.raises(ValueError, match="rollout_logprobs"):
        rollout_correction(replace(batch, rollout_logprobs=None), CorrectionConfig())


def test_a_batch_without_response_tokens_has_no_gap(batch: Batch) -> None:
    silent = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    actual, keep, metrics = rollout_correction(silent, CorrectionConfig(reject=(RejectionConfig(upper=1.1),)))
    assert (actual.tolist(), bool(keep.all()), metrics) == ([0.0] * 6, True, {})


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_that_are_all_0_are_no_error(batch: Batch, level: str, normalize: bool) -> None:
    """All ratios are outside of the bounds; verl raises an error."""
    options = {"level": level, "lower": 100.0, "upper": 200.0, "normalize": normalize}
    actual, keep, metrics = rollout_correction(batch, CorrectionConfig.model_validate(options))
    assert actual.tolist() == [0.0] * 6
    assert bool(keep.all())
    assert all(math.isfinite(value) for value in metrics.values())
