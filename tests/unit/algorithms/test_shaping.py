"""If these fail, rewards aren't what the configuration made of them. All numbers are worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quintet.algorithms.advantages.groups import trajectory_rewards
from quintet.algorithms.shaping import shape_rewards
from quintet.config.native.algorithm import ShapingConfig
from quintet.records import Batch
from quintet.training.packing import select_trajectories

MakeBatch = Callable[..., Batch]


def close(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)


def singles(make_batch: MakeBatch, totals: list[float], group: list[int]) -> Batch:
    return make_batch([[1]] * len(totals), [[total] for total in totals], group=group)


def test_shaping_without_options_leaves_rewards_unchanged(make_batch: MakeBatch) -> None:
    batch = singles(make_batch, [1.0, 2.0], [0, 0])
    assert torch.equal(shape_rewards(batch, ShapingConfig(), 10).rewards, batch.rewards)


def test_long_episodes_pay_at_their_last_token(make_batch: MakeBatch) -> None:
    """Own tokens 3, over two sequences, 2 and 5 against a budget of 2: a half and one and a half budgets over."""
    batch = make_batch(
        [[0, 1, 1], [0, 1], [0, 1, 1], [1, 1, 1, 1, 1, 0]],
        [[0, 0, 1.0], [0, 2.0], [0, 0, 1.0], [0, 0, 0, 0, 4.0, 0]],
        trajectory=[0, 0, 1, 2],
    )
    expected = [0, 0, 1, 0, 2 - 0.1 * 0.5, 0, 0, 1, 0, 0, 0, 0, 4 - 0.1 * 1.5, 0]
    config_ = ShapingConfig(length_penalty=0.1, length_budget=2)
    close(shape_rewards(batch, config_, 1000).rewards, expected)
    half_of_the_longest = shape_rewards(batch, ShapingConfig(length_penalty=0.1), 4)
    close(half_of_the_longest.rewards, expected)


@pytest.mark.parametrize(
    ("center", "divide", "expected"),
    [
        ("group", "none", [-3, 0, 3, 5]),
        ("batch", "none", [-3.25, -0.25, 2.75, 0.75]),
        ("none", "group", [1 / (3 + 1e-6), 4 / (3 + 1e-6), 7 / (3 + 1e-6), 5]),
        ("group", "group", [-3 / (3 + 1e-6), 0, 3 / (3 + 1e-6), 5]),
        ("none", "batch", [x / (2.5 + 1e-6) for x in (1, 4, 7, 5)]),
        ("group", "batch", [x / (2.5 + 1e-6) for x in (-3, 0, 3, 5)]),
        ("batch", "group", [-3.25 / (3 + 1e-6), -0.25 / (3 + 1e-6), 2.75 / (3 + 1e-6), 0.75]),
    ],
)
def test_normalised_within_the_group_or_the_batch(
    make_batch: MakeBatch, center: Any, divide: Any, expected: list[float]
) -> None:
    """1, 4 and 7 from one start, 5 from another: deviations 3 and, of all, 2.5. Who is alone is left as it is."""
    batch = singles(make_batch, [1.0, 4.0, 7.0, 5.0], [0, 0, 0, 1])
    close(shape_rewards(batch, ShapingConfig(center=center, divide=divide), 10).rewards, expected)


def test_normalizing_equal_rewards_does_not_divide_by_zero(make_batch: MakeBatch) -> None:
    batch = make_batch([[1]] * 3, [[0.1]] * 3, dtype=torch.float32)
    actual = shape_rewards(batch, ShapingConfig(divide="group"), 10).rewards
    torch.testing.assert_close(actual, batch.rewards)


def test_normalization_keeps_the_share_of_each_turn(make_batch: MakeBatch) -> None:
    """Totals 3 and 1: deviation √2."""
    batch = make_batch([[1, 0, 1], [1]], [[1.0, 0, 2.0], [1.0]])
    root = 2**0.5 + 1e-6
    close(shape_rewards(batch, ShapingConfig(divide="group"), 10).rewards, [1 / root, 0, 2 / root, 1 / root])


def test_clipping_applies_to_the_total_reward_of_an_episode(make_batch: MakeBatch) -> None:
    batch = make_batch([[1, 1], [1, 1], [1, 1]], [[1.0, 7.0], [-3.0, -1.0], [5.0, -4.0]])
    actual = shape_rewards(batch, ShapingConfig(clip=2.0), 10).rewards
    close(actual, [0.25, 1.75, -1.5, -0.5, 5.0, -4.0])


def test_negative_rewards_may_have_a_bound_of_their_own(make_batch: MakeBatch) -> None:
    batch = make_batch([[1, 1], [1], [1]], [[-3.0, -1.0], [5.0], [-0.5]])
    actual = shape_rewards(batch, ShapingConfig(clip=3.0, clip_negative=1.0), 10).rewards
    close(actual, [-0.75, -0.25, 3.0, -0.5])


def test_length_then_mean_then_deviation_then_bound(make_batch: MakeBatch) -> None:
    """2 - 1 × (3 - 1) / 1 = 0 against 4: mean 2, deviation √8, ∓ 0.7071 held within a half."""
    batch = make_batch([[1, 1, 1], [1]], [[0, 0, 2.0], [4.0]])
    config = ShapingConfig(length_penalty=1.0, length_budget=1, center="group", divide="group", clip=0.5)
    actual = shape_rewards(batch, config, 10)
    close(trajectory_rewards(actual), [-0.5, 0.5])
    unbound = shape_rewards(batch, config.model_copy(update={"clip": None}), 10)
    close(trajectory_rewards(unbound), [-2 / (8**0.5 + 1e-6), 2 / (8**0.5 + 1e-6)])


def test_dropped_episodes_do_not_affect_shaping(make_batch: MakeBatch) -> None:
    batch = singles(make_batch, [1.0, 4.0, 100.0], [0, 0, 0])
    rest = select_trajectories(batch, torch.tensor([True, True, False]))
    close(shape_rewards(rest, ShapingConfig(center="batch"), 10).rewards, [-1.5, 1.5])


def test_small_rewards_that_differ_are_divided(make_batch: Callable[..., Batch]) -> None:
    """By their deviation √2 · 1e-7 plus 1e-6."""
    batch = make_batch([[1], [1]], [[1e-7], [3e-7]], group=[0, 0])
    totals = trajectory_rewards(shape_rewards(batch, ShapingConfig(divide="group"), 10))
    assert totals.tolist() == pytest.approx([1e-7 / (2**0.5 * 1e-7 + 1e-6), 3e-7 / (2**0.5 * 1e-7 + 1e-6)])
