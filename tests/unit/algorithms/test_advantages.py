"""If these fail, the policy learns from wrong credit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.algorithms.advantages.gae import bi_level_gae, gae
from quintet.algorithms.advantages.groups import Groups
from quintet.algorithms.advantages.outcome import grpo
from quintet.config.native.advantages import ADVANTAGES, BiLevelGaeConfig, GaeConfig, GrpoConfig
from quintet.errors import ConfigError
from quintet.records import Batch

MakeBatch = Callable[..., Batch]

MASK = [[1, 1, 1, 1, 1, 0, 0, 1, 1, 1]]
ENDS = [[0, 0, 0, 0, 1, 0, 0, 0, 0, 1]]
VALUES = [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]]
REWARDS = [[0, 0, 0, 0, 1.0, 0, 0, 0, 0, 1.0]]


def two_turns(make_batch: MakeBatch, rewards: list[list[float]] = REWARDS) -> Batch:
    return make_batch(MASK, rewards, ends=ENDS, values=VALUES)


def close(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=2e-6, rtol=0)


def test_gae_skips_observation_tokens(make_batch: MakeBatch) -> None:
    advantages, returns = gae(two_turns(make_batch), GaeConfig(gamma=1.0, lam=0.95, whiten=False))
    close(advantages, [1.580733, 1.558666, 1.535438, 1.510987, 1.48525, 0, 0, 0.195, 0.1, 0])
    close(returns, [1.680733, 1.758666, 1.835438, 1.910987, 1.98525, 0, 0, 0.995, 1, 1])


def test_bi_level_gae_discounts_turns_then_tokens(make_batch: MakeBatch) -> None:
    config = BiLevelGaeConfig(gamma=1.0, lam=0.95, turn_gamma=0.95, turn_lam=0.95, whiten=False)
    advantages, returns = bi_level_gae(two_turns(make_batch), config)
    close(advantages, [1.552022, 1.528444, 1.503625, 1.4775, 1.45, 0, 0, 0.195, 0.1, 0])
    close(returns, [1.652022, 1.728444, 1.803625, 1.8775, 1.95, 0, 0, 0.995, 1, 1])


def test_a_turn_rewarded_with_zero_is_still_a_turn(make_batch: MakeBatch) -> None:
    batch = two_turns(make_batch, [[0, 0, 0, 0, 0.0, 0, 0, 0, 0, 1.0]])
    config = BiLevelGaeConfig(gamma=1.0, lam=1.0, turn_gamma=0.95, turn_lam=1.0, whiten=False)
    advantages, _ = bi_level_gae(batch, config)
    close(advantages, [0.85, 0.75, 0.65, 0.55, 0.45, 0, 0, 0.2, 0.1, 0])


def test_without_discounts_bi_level_gae_is_gae(make_batch: MakeBatch) -> None:
    batch = two_turns(make_batch)
    flat = gae(batch, GaeConfig(gamma=1.0, lam=1.0, whiten=False))
    two_level = bi_level_gae(batch, BiLevelGaeConfig(gamma=1.0, lam=1.0, turn_gamma=1.0, turn_lam=1.0, whiten=False))
    torch.testing.assert_close(flat, two_level)


def test_advantages_span_all_sequences_of_a_trajectory(make_batch: MakeBatch) -> None:
    """A sliding window cuts an episode into sequences; credit must still flow over the cuts."""
    whole = gae(two_turns(make_batch), GaeConfig(gamma=0.9, lam=0.8, whiten=False))[0]
    cut = make_batch(
        [MASK[0][:6], MASK[0][6:]],
        [REWARDS[0][:6], REWARDS[0][6:]],
        ends=[ENDS[0][:6], ENDS[0][6:]],
        values=[VALUES[0][:6], VALUES[0][6:]],
        trajectory=[0, 0],
    )
    torch.testing.assert_close(gae(cut, GaeConfig(gamma=0.9, lam=0.8, whiten=False))[0], whole)


def test_grpo_compares_within_the_group(make_batch: MakeBatch) -> None:
    batch = make_batch([[0, 1]] * 4, [[0, 1.0], [0, 0.0], [0, 5.0], [0, 7.0]], group=[0, 0, 1, 1])
    advantages, _ = grpo(batch, GrpoConfig(normalize_by_std=False))
    close(advantages, [0, 0.5, 0, -0.5, 0, -1, 0, 1])
    normalised, _ = grpo(batch, GrpoConfig())
    close(
        normalised,
        [0, 0.5 / (0.5**0.5 + 1e-6), 0, -0.5 / (0.5**0.5 + 1e-6), 0, -1 / (2**0.5 + 1e-6), 0, 1 / (2**0.5 + 1e-6)],
    )


def test_the_advantage_of_a_group_of_one_is_its_score() -> None:
    groups = Groups.from_ids(torch.tensor([5, 6, 6]))
    scores = torch.tensor([3.0, 1.0, 2.0])
    assert groups.normalized(scores, by_deviation=False).tolist() == [3.0, -0.5, 0.5]
    assert groups.normalized(scores, by_deviation=True)[0] == pytest.approx(3.0, rel=1e-5)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 3), st.floats(0.5, 1.0), st.floats(0.5, 1.0))
def test_observation_tokens_never_change_credit(extra: int, gamma: float, lam: float) -> None:
    """Whatever the env says between two turns, the policy's tokens keep their advantages."""
    make: MakeBatch = make_batch_plain
    config = BiLevelGaeConfig(gamma=gamma, lam=lam, turn_gamma=gamma, turn_lam=lam, whiten=False)
    short = bi_level_gae(make([[1, 1, 1, 1]], [[0, 1, 0, 2.0]], [[0, 1, 0, 1]], [[0.3, 0.1, 0.2, 0.4]]), config)[0]
    gap = [0] * extra
    long = bi_level_gae(
        make([[1, 1, *gap, 1, 1]], [[0, 1, *gap, 0, 2.0]], [[0, 1, *gap, 0, 1]], [[0.3, 0.1, *gap, 0.2, 0.4]]), config
    )[0]
    torch.testing.assert_close(long[long.abs() > 0], short[short.abs() > 0])


def make_batch_plain(
    masks: list[list[int]], rewards: list[list[float]], ends: list[list[int]], values: list[list[float]]
) -> Batch:
    size = sum(map(len, masks))
    flat = lambda rows: torch.tensor([x for row in rows for x in row], dtype=torch.float64)  # noqa: E731
    zeros = torch.zeros(size, dtype=torch.long)
    return Batch(
        tokens=zeros,
        positions=torch.arange(size),
        lengths=torch.tensor([len(m) for m in masks]),
        loss_mask=flat(masks).bool(),
        turn=zeros,
        turn_end=flat(ends).bool(),
        trajectory=torch.arange(len(masks)),
        group=torch.zeros(len(masks), dtype=torch.long),
        logprobs=torch.zeros(size),
        rewards=flat(rewards),
        values=flat(values),
    )


def test_whitened_advantages_have_mean_0_and_deviation_1(make_batch: MakeBatch) -> None:
    batch = two_turns(make_batch)
    advantages, returns = gae(batch, GaeConfig())
    own = advantages[batch.loss_mask]
    assert abs(float(own.mean())) < 1e-9
    assert float(own.std()) == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(returns, gae(batch, GaeConfig(whiten=False))[1])


def test_gae_without_a_critic_is_refused(make_batch: MakeBatch) -> None:
    with pytest.raises(ValueError, match="critic"):
        gae(dataclasses.replace(two_turns(make_batch), values=None), GaeConfig())


def test_a_mistyped_algorithm_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="bi_level_gae"):
        ADVANTAGES.get("bilevel_gae")
