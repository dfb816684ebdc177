"""If these fail, the gap between engine and learner is told wrongly, and a broken engine passes."""

from __future__ import annotations

import math

import pytest
import torch

from quintet.algorithms.drift import measure_drift, token_gaps

ENGINE = torch.tensor([0.5, 0.25, 0.2, 0.8], dtype=torch.float64)
LEARNER = torch.tensor([0.5, 0.5, 0.1, 0.8], dtype=torch.float64)
LOG_2 = math.log(2.0)


def test_the_gap_by_hand() -> None:
    actual = measure_drift(LEARNER.log(), ENGINE.log(), limit=0.5)
    assert actual.tokens == 4
    assert actual.probs_diff_max == pytest.approx(0.25)
    assert actual.probs_diff_mean == pytest.approx(0.35 / 4)
    # deviations from 0.0875: -0.0875 twice, 0.1625, 0.0125
    assert actual.probs_diff_std == pytest.approx(math.sqrt((2 * 0.0875**2 + 0.1625**2 + 0.0125**2) / 3))
    assert actual.logprobs_diff_max == pytest.approx(LOG_2)
    assert actual.logprobs_diff_mean == pytest.approx(LOG_2 / 2)
    # log(learner / engine) is 0, log 2, -log 2, 0
    assert actual.kl == pytest.approx(0.0, abs=1e-12)
    assert actual.k3_kl == pytest.approx((2 - 1 - LOG_2 + 0.5 - 1 + LOG_2) / 4)
    assert actual.share_above_limit == 0.5
    assert actual.pearson == pytest.approx(float(torch.corrcoef(torch.stack((LEARNER, ENGINE)))[0, 1]))
    assert measure_drift(LEARNER.log(), ENGINE.log(), limit=0.7).share_above_limit == 0.0


def test_token_gaps_do_not_depend_on_the_split_into_micro_batches() -> None:
    """What is summed over micro-batches gives the mean over all."""
    whole = token_gaps(LEARNER.log(), ENGINE.log(), 0.5)
    for name, each in whole.items():
        parts = [token_gaps(LEARNER[i : i + 1].log(), ENGINE[i : i + 1].log(), 0.5)[name] for i in range(4)]
        assert torch.equal(torch.cat(parts), each)
    assert whole["above_limit"].tolist() == [0, 1, 1, 0]


def test_nan_log_probs_are_above_every_limit() -> None:
    actual = measure_drift(torch.tensor([0.0, math.nan, -math.inf]), torch.tensor([0.0, -1.0, -1.0]), limit=100.0)
    assert actual.share_above_limit == pytest.approx(2 / 3)
    assert actual.logprobs_diff_max == math.inf
    result = actual.as_json()
    assert result["logprobs_diff_max"] is None
    assert result["tokens"] == 3


def test_tokens_that_are_all_as_likely_have_no_correlation() -> None:
    assert measure_drift(torch.zeros(3), torch.zeros(3), 1e-4).pearson is None
    with pytest.raises(ValueError, match="no tokens"):
        measure_drift(torch.zeros(0), torch.zeros(0), 1e-4)
