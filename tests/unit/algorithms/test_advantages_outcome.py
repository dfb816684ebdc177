"""If these fail, a reply's reward is held against the wrong baseline. All numbers are worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quintet.algorithms.advantages.custom import estimate
from quintet.algorithms.advantages.outcome import (
    arpo,
    brpo,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    raw,
    reinforce_plus_plus_baseline,
    rloo,
)
from quintet.algorithms.advantages.returns import reinforce, remax
from quintet.algorithms.advantages.token_baselines import optimal_token_baseline
from quintet.config.native.advantages import (
    ADVANTAGE_UNION,
    ADVANTAGES,
    AdvantageSection,
    ArpoConfig,
    BrpoConfig,
    GdpoConfig,
    GrpoConfig,
    OptimalTokenBaselineConfig,
    PassKConfig,
    RawConfig,
    ReinforceConfig,
    ReinforcePlusPlusBaselineConfig,
    TirOptimalTokenBaselineConfig,
)
from quintet.errors import ConfigError
from quintet.records import Batch

MakeBatch = Callable[..., Batch]
Estimator = Callable[[Batch, Any], tuple[torch.Tensor, torch.Tensor]]

SCORES = [1.0, 4.0, 7.0, 5.0]
GROUPS = [0, 0, 0, 1]
"""Three episodes from one start, one from another."""


def one_token_each(make_batch: MakeBatch, scores: list[float] = SCORES, group: list[int] = GROUPS) -> Batch:
    return make_batch([[1]] * len(scores), [[score] for score in scores], group=group)


COMPARING = [
    advantage.name for advantage in ADVANTAGES if ADVANTAGE_UNION.config_class(advantage.name).needs_several_samples
]
"""Estimators that compare the episodes of a group."""


def close(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=1e-7, rtol=0)


def baseline(name: str) -> AdvantageSection:
    return ADVANTAGE_UNION.config_class(name)()


@pytest.mark.parametrize(
    ("estimate", "config", "expected"),
    [
        (grpo, GrpoConfig(), [-3 / (3 + 1e-6), 0, 3 / (3 + 1e-6), 5 / (1 + 1e-6)]),
        (grpo, GrpoConfig(normalize_by_std=False), [-3, 0, 3, 5]),
        (brpo, BrpoConfig(normalize_by_std=False), [-3.25, -0.25, 2.75, 0.75]),
        (brpo, BrpoConfig(), [x / (6.25**0.5 + 1e-6) for x in (-3.25, -0.25, 2.75, 0.75)]),
        (arpo, ArpoConfig(normalize_by_std=False), SCORES),
        (grpo_passk, PassKConfig(name="grpo_passk", normalize_by_std=False), [0, 0, 3, 0]),
        (grpo_passk, PassKConfig(name="grpo_passk"), [0, 0, 3 / (3 + 1e-6), 0]),
        (rloo, baseline("rloo"), [1 - 5.5, 4 - 4, 7 - 2.5, 5]),
        (gpg, baseline("gpg"), [-3, 0, 3, 5]),
        (raw, baseline("raw"), SCORES),
    ],
)
def test_group_baselines_match_hand_computed_values(
    make_batch: MakeBatch, estimate: Estimator, config: object, expected: list[float]
) -> None:
    advantages, returns = estimate(one_token_each(make_batch), config)
    close(advantages, expected)
    close(returns, expected)


@pytest.mark.parametrize("name", COMPARING)
def test_a_nan_reward_stays_visible_in_its_group(make_batch: MakeBatch, name: str) -> None:
    """Turned into a finite advantage, it would train the policy on nothing, unnoticed."""
    batch = one_token_each(make_batch, [1.0, float("nan"), 7.0, 5.0])
    components = {"part": batch.rewards.float()}
    batch = dataclasses.replace(batch, sum_squared_probs=torch.ones_like(batch.rewards), reward_components=components)
    advantages, _ = estimate(batch, baseline(name))
    assert not bool(advantages.isfinite().all())


def test_gpg_scales_by_the_share_of_rewarded_episodes(make_batch: MakeBatch) -> None:
    batch = one_token_each(make_batch, [0.0, 0.0, 0.0, 2.0], [0, 0, 0, 0])
    close(gpg(batch, baseline("gpg"))[0], [4 * -0.5] * 3 + [4 * 1.5])


def test_tied_best_responses_have_no_pass_at_k_advantage(make_batch: MakeBatch) -> None:
    batch = one_token_each(make_batch, [2.0, 2.0, 1.0], [0, 0, 0])
    close(grpo_passk(batch, PassKConfig(name="grpo_passk"))[0], [0, 0, 0])


def test_opo_weighs_the_baseline_by_length(make_batch: MakeBatch) -> None:
    """(1 × 4 + 3 × 0) / 4 = 1; what the env said has no length."""
    batch = make_batch([[0, 1], [1, 0, 1, 1], [1, 1]], [[0, 4.0], [0, 0, 0, 0], [0, 5.0]], group=[0, 0, 1])
    close(opo(batch, baseline("opo"))[0], [0, 3, -1, 0, -1, -1, 5, 5])


def test_remax_subtracts_the_reward_of_the_greedy_episode(make_batch: MakeBatch) -> None:
    batch = make_batch([[0, 1, 1], [1, 0, 1]], [[0, 0, 1.0], [0.5, 0, 2.0]])
    batch = dataclasses.replace(batch, baseline=torch.tensor([0.25, 1.0]))
    advantages, returns = remax(batch, baseline("remax"))
    close(advantages, [0, 0.75, 0.75, 1.5, 0, 1.0])
    close(returns, [0, 1, 1, 2.5, 0, 2])
    with pytest.raises(ValueError, match="greedy"):
        remax(dataclasses.replace(batch, baseline=None), baseline("remax"))


def test_returns_are_discounted_over_response_tokens_only(make_batch: MakeBatch) -> None:
    batch = make_batch([[1, 0, 0, 1, 1]], [[1.0, 0, 0, 0, 8.0]])
    advantages, returns = reinforce(batch, ReinforceConfig(name="reinforce", gamma=0.5))
    close(advantages, [1 + 0.25 * 8, 0, 0, 4, 8])
    close(returns, [3, 0, 0, 4, 8])


def test_reinforce_plus_plus_baseline_is_whitened_over_tokens(make_batch: MakeBatch) -> None:
    """Leads 1 on one token and -1 on three: mean -0.5, variance (1.5² + 3 × 0.5²) / 3 = 1."""
    batch = make_batch([[0, 1], [1, 1, 1]], [[0, 3.0], [0, 0, 1.0]])
    config = ReinforcePlusPlusBaselineConfig(name="reinforce_plus_plus_baseline")
    close(reinforce_plus_plus_baseline(batch, config)[0], [0, 1.5, -0.5, -0.5, -0.5])


def test_gdpo_normalizes_each_reward_component(make_batch: MakeBatch) -> None:
    """Both parts lie two apart, in other units: alike, they cancel each other; weighted, the first wins."""
    batch = dataclasses.replace(
        one_token_each(make_batch, [0.0, 0.0], [0, 0]),
        reward_components={"right": torch.tensor([100.0, 0.0]), "form": torch.tensor([0.0, 2.0])},
    )
    close(gdpo(batch, GdpoConfig(name="gdpo", weights={}, whiten=False, normalize_by_std=False))[0], [49, -49])
    even, _ = gdpo(batch, GdpoConfig(name="gdpo", weights={}, whiten=False))
    assert float(even.abs().max()) < 1e-6
    config = GdpoConfig(name="gdpo", weights={"right": 1.0, "form": 0.5}, whiten=False)
    torch.testing.assert_close(
        gdpo(batch, config)[0], torch.tensor([0.5**0.5 / 2, -(0.5**0.5) / 2], dtype=torch.float64), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(
    ("parts", "weights", "message"),
    [
        (None, {}, "no parts"),
        ({"right": torch.ones(4)}, {"rihgt": 1.0}, "no part 'rihgt'; it has right"),
    ],
)
def test_gdpo_without_reward_components_is_an_error_with_a_hint(
    make_batch: MakeBatch, parts: Any, weights: dict[str, float], message: str
) -> None:
    batch = dataclasses.replace(one_token_each(make_batch), reward_components=parts)
    with pytest.raises(ConfigError, match=message) as caught:
        gdpo(batch, GdpoConfig(name="gdpo", weights=weights))
    assert caught.value.key == "algorithm.advantage.weights"
    assert caught.value.hint == ("did you mean 'right'?" if parts else caught.value.hint)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 7.7])
def test_equal_rewards_give_exactly_zero_advantages(make_batch: MakeBatch, value: float) -> None:
    """The rounding of a mean over 1e-6 would be a gradient."""
    batch = make_batch([[1]] * 7, [[value]] * 7, group=[0] * 7, dtype=torch.float32)
    assert not grpo(batch, GrpoConfig())[0].any()


def token_baseline_batch(make_batch: MakeBatch) -> Batch:
    """π = 1/2 and Σπ² = 1/2 make w = 1/2 at every own token."""
    batch = make_batch([[1, 0, 1, 1], [1, 1]], [[0, 0, 1.0, 3.0], [0, 2.0]])
    half = torch.full((6,), 0.5, dtype=torch.float64)
    return dataclasses.replace(batch, logprobs=half.log(), sum_squared_probs=half)


def test_otb_positions_can_exclude_observation_tokens(make_batch: MakeBatch) -> None:
    """Returns 4, 4, 3 and 2, 2; W = 1/2, 1, 3/2: baselines (4 + 2) / 2 = 3, 3, and at the third place, where there
    is no other, 3 or with a zero tail none."""
    batch = token_baseline_batch(make_batch)
    tir = TirOptimalTokenBaselineConfig(zero_tail=False)
    advantages, returns = optimal_token_baseline(batch, tir)
    close(advantages, [1, 0, 1, 0, -1, -1])
    close(returns, [4, 0, 4, 3, 2, 2])
    tail, _ = optimal_token_baseline(batch, TirOptimalTokenBaselineConfig())
    close(tail, [1, 0, 1, 3, -1, -1])


def test_otb_positions_include_observation_tokens(make_batch: MakeBatch) -> None:
    """At the second place only the second episode has a token, at the third only the first."""
    config = OptimalTokenBaselineConfig(zero_tail=False)
    close(optimal_token_baseline(token_baseline_batch(make_batch), config)[0], [1, 0, 0, 0, -1, 0])


def test_energy_weighs_the_baseline(make_batch: MakeBatch) -> None:
    """w = 1 - 2π + Σπ² is 0.5 and 1.5; twice the importance counts fourfold."""
    batch = dataclasses.replace(
        make_batch([[1], [1]], [[0.0], [4.0]]),
        logprobs=torch.tensor([0.5, 0.25], dtype=torch.float64).log(),
        sum_squared_probs=torch.tensor([0.5, 1.0], dtype=torch.float64),
    )
    config = OptimalTokenBaselineConfig()
    close(optimal_token_baseline(batch, config)[0], [-3, 1])
    weighted = dataclasses.replace(batch, correction=torch.tensor([2.0, 1.0]))
    close(optimal_token_baseline(weighted, config)[0], [-12 / 7, 16 / 7])
    with pytest.raises(ValueError, match="squared"):
        optimal_token_baseline(dataclasses.replace(batch, sum_squared_probs=None), config)


def test_weights_by_length_make_short_episodes_count_as_much_as_long_ones(make_batch: MakeBatch) -> None:
    """Lengths 1 and 3, mean 2: the rewards 1 and 6 become 1 × 2 / 1 and 6 × 2 / 3."""
    batch = make_batch([[1], [1, 1, 1]], [[1.0], [0.0, 0.0, 6.0]])
    advantages, _ = raw(batch, RawConfig(length_weight=True))
    torch.testing.assert_close(advantages.double(), torch.tensor([2.0, 4.0, 4.0, 4.0], dtype=torch.float64))
    plain, weighted = (grpo(batch, GrpoConfig(length_weight=weight))[0] for weight in (False, True))
    torch.testing.assert_close(weighted, plain * torch.tensor([2.0, 2 / 3, 2 / 3, 2 / 3], dtype=plain.dtype))


def test_groups_weigh_as_much_as_their_rewards_differ(make_batch: MakeBatch) -> None:
    """By hand: unbiased deviations √2 and 2 √2, so that the first group counts half (RAGEN's soft reweighting)."""
    batch = make_batch([[1]] * 4, [[1.0], [3.0], [0.0], [4.0]], group=[0, 0, 1, 1])
    config = GrpoConfig(normalize_by_std=False, deviation_weight=True)
    torch.testing.assert_close(
        grpo(batch, config)[0].double(), torch.tensor([-0.5, 0.5, -2, 2]).double(), atol=2e-6, rtol=0
    )


def test_whitening_a_single_token_changes_nothing(make_batch: MakeBatch) -> None:
    """It has no standard deviation; verl raises an error."""
    batch = make_batch([[0, 1]], [[0.0, 3.0]])
    advantages, _ = estimate(batch, ReinforceConfig(name="reinforce", whiten=True))
    close(advantages, [0, 3])


def test_opo_with_a_rejected_group_is_finite(make_batch: MakeBatch) -> None:
    """The lengths of the group are 0, where verl divides by 0; the other group is compared as ever."""
    batch = make_batch([[0], [0], [1], [1]], [[1.0], [2.0], [3.0], [5.0]], ends=[[1]] * 4, group=[0, 0, 1, 1])
    close(estimate(batch, baseline("opo"))[0], [0, 0, -1, 1])
