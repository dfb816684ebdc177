"""If these fail, clipping or value loss push the weights the wrong way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.algorithms.losses.clipping import ppo_clip
from quintet.algorithms.losses.critic import value_clip
from quintet.algorithms.tokens import whiten


def one(ratio: float, advantage: float, dual: float | None = 3.0) -> float:
    new = torch.tensor([math.log(ratio)])
    return float(ppo_clip(new, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.28, dual).loss)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 1.0, -1.28),  # a good token that grew enough is held at 1 + high
        (0.5, 1.0, -0.5),  # a good token that shrank is not
        (0.5, -1.0, 0.8),  # a bad token that shrank enough is held at 1 - low
        (1.5, -1.0, 1.5),
        (9.0, -1.0, 3.0),  # dual clip
    ],
)
def test_ppo_clip_by_hand(ratio: float, advantage: float, loss: float) -> None:
    assert one(ratio, advantage) == pytest.approx(loss, rel=1e-5)


def test_without_dual_clip_a_bad_token_has_no_ceiling() -> None:
    assert one(9.0, -1.0, dual=None) == pytest.approx(9.0, rel=1e-5)


def test_ppo_marks_clipped_tokens() -> None:
    ratios = torch.tensor([1.5, 1.0, 9.0]).log()
    parts = ppo_clip(ratios, torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), 0.2, 0.28, 3.0)
    assert parts.clipped.tolist() == [True, False, False]
    assert parts.clipped_lower.tolist() == [False, False, True]
    torch.testing.assert_close(parts.kl, -ratios)


def test_extreme_log_ratios_stay_finite() -> None:
    parts = ppo_clip(torch.tensor([500.0, -500.0]), torch.zeros(2), torch.tensor([-1.0, 1.0]), 0.2, 0.2, None)
    assert bool(torch.isfinite(parts.loss).all())


def test_value_loss_takes_the_worse_of_free_and_clipped() -> None:
    parts = value_clip(torch.tensor([2.0, 0.1]), torch.zeros(2), torch.tensor([2.0, 0.0]), 0.5)
    torch.testing.assert_close(parts.loss, torch.tensor([0.5 * 1.5**2, 0.5 * 0.1**2]))
    assert parts.clipped.tolist() == [True, False]
    free = value_clip(torch.tensor([2.0]), torch.zeros(1), torch.tensor([2.0]), None)
    assert float(free.loss) == 0.0


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.booleans()), min_size=1, max_size=20))
def test_whitening_ignores_masked_tokens(cells: list[tuple[float, bool]]) -> None:
    values = torch.tensor([v for v, _ in cells], dtype=torch.float64)
    mask = torch.tensor([m for _, m in cells])
    noisy = torch.where(mask, values, torch.full_like(values, 7e5))
    torch.testing.assert_close(whiten(values, mask), whiten(noisy, mask))
