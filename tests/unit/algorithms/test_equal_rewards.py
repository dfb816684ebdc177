"""If these fail, episodes with the same reward get different advantages, or a true difference of rewards is ignored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.algorithms.advantages.custom import estimate
from quintet.algorithms.advantages.groups import trajectory_rewards
from quintet.algorithms.advantages.reward_sums import RewardSums
from quintet.algorithms.filters import has_signal
from quintet.algorithms.shaping import shape_rewards
from quintet.config.native.advantages import ADVANTAGE_UNION
from quintet.config.native.algorithm import ShapingConfig
from quintet.records import Batch
from quintet.reward_sum import sum_rewards
from quintet.rollout.collate import reward_at_end

Episodes = Sequence[Sequence[float]]
"""Turn rewards of each episode."""

COMPARING: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo without deviation": {"normalize_by_std": False},
    "grpo with length weight": {"length_weight": True},
    "grpo with deviation weight": {"deviation_weight": True},
    "grpo whitened": {"whiten": True},
    "grpo_passk": {},
    "grpo_passk without deviation": {"normalize_by_std": False},
    "brpo": {},
    "brpo without deviation": {"normalize_by_std": False},
    "rloo": {},
    "rloo whitened": {"whiten": True},
    "opo": {},
    "opo whitened": {"whiten": True},
    "gpg": {},
    "reinforce_plus_plus_baseline": {},
    "gdpo": {},
    "grpo_dynamic": {"level": "trajectory"},
    "gigpo": {"turn_gamma": 1.0},
}
"""Options of estimators that compare the rewards of episodes, by test."""


def packed(episodes: Episodes, dtype: torch.dtype, group: Sequence[int] | None = None) -> Batch:
    """A batch of episodes whose turn k has a prompt token and 1 + k % 3 response tokens; first turns saw the same."""
    columns: list[tuple[int, bool, int, bool, float, int]] = []
    lengths = []
    for index, rewards in enumerate(episodes):
        start = len(columns)
        for turn, reward in enumerate(rewards):
            state = 0 if turn == 0 else 1 + 1000 * index + turn
            columns.append((index, False, turn, False, 0.0, state))
            columns += [(index, True, turn, False, 0.0, state)] * (turn % 3)
            columns.append((index, True, turn, True, reward, state))
        lengths.append(len(columns) - start)
    _, mask, turns, ends, rewards, states = zip(*columns, strict=True)
    size, groups = len(columns), torch.tensor(group if group is not None else [0] * len(episodes))
    return Batch(
        tokens=torch.zeros(size, dtype=torch.long),
        positions=torch.arange(size),
        lengths=torch.tensor(lengths),
        loss_mask=torch.tensor(mask),
        turn=torch.tensor(turns),
        turn_end=torch.tensor(ends),
        trajectory=torch.arange(len(episodes)),
        group=groups,
        logprobs=torch.zeros(size),
        rewards=torch.tensor(rewards, dtype=torch.float64).to(dtype),
        observation_group=torch.tensor(states),
        reward_components={"part": torch.full((len(episodes),), 0.1)},
    )


def estimated(name: str, batch: Batch) -> torch.Tensor:
    config = ADVANTAGE_UNION.config_class(name.split()[0])(**COMPARING[name])
    return estimate(batch, config)[0]


@st.composite
def equal_totals(draw: st.DrawFn) -> list[list[float]]:
    """Episodes with the same total, divided into turns at random, as floats nearest to decimal numbers."""
    scale = Decimal(10) ** draw(st.integers(-12, 12))
    total = draw(st.integers(-10_000, 10_000))
    parts = st.lists(st.integers(-10_000, 10_000), max_size=7)
    episodes = draw(st.lists(parts, min_size=2, max_size=16))
    copies = 1 + draw(st.sampled_from([0, 0, 3]))
    whole = [[*turns, total - sum(turns)] for turns in episodes] * copies
    return [[float(turn * scale) for turn in draw(st.permutations(turns))] for turns in whole]


@settings(max_examples=40)
@given(episodes=equal_totals(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_equal_rewards_give_exactly_0(episodes: list[list[float]], dtype: torch.dtype) -> None:
    batch = packed(episodes, dtype)
    at_end = reward_at_end(batch)
    assert torch.equal(reward_at_end(batch, across_groups=True).rewards, at_end.rewards)
    assert not bool(has_signal(trajectory_rewards(batch), batch.group).any())
    assert not bool(has_signal(trajectory_rewards(at_end), batch.group).any())
    for name in COMPARING:
        assert not bool(estimated(name, batch).any()), name
        assert not bool(estimated(name, at_end).any()), name


@given(
    totals=st.lists(st.integers(-1000, 1000), min_size=2, max_size=8, unique=True),
    scale=st.integers(-12, 12),
    offset=st.sampled_from([0, 1, 1000]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    parts=st.lists(st.integers(-1000, 1000), max_size=5),
)
def test_different_rewards_stay_different(
    totals: list[int], scale: int, offset: int, dtype: torch.dtype, parts: list[int]
) -> None:
    episodes = [[*parts, total + offset - sum(parts)] for total in totals]
    batch = packed([[float(turn * Decimal(10) ** scale) for turn in turns] for turns in episodes], dtype)
    rewards = trajectory_rewards(batch)
    assert len(rewards.unique()) == len(totals)
    assert rewards.argsort().tolist() == torch.tensor(totals).argsort().tolist()
    assert bool(has_signal(rewards, batch.group).all())


@given(
    rewards=st.lists(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=6), min_size=2, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_totals_change_by_less_than_their_rounding_error(rewards: list[list[float]], dtype: torch.dtype) -> None:
    """Not merged beyond the bound, and of the same order otherwise."""
    batch = packed(rewards, dtype)
    sums = RewardSums.from_rewards(batch.rewards, batch.token_trajectory, len(rewards))
    moved = (sums.equalized(batch.group).total - sums.total).abs()
    assert bool((moved <= sums.error + sums.error.max()).all())
    exact = [math.fsum(batch.rewards[batch.token_trajectory == index].tolist()) for index in range(len(rewards))]
    error = (sums.total - torch.tensor(exact, dtype=torch.float64)).abs()
    assert bool((error <= sums.error).all())


def test_neighbouring_float32_rewards_are_different() -> None:
    """Rewards of a single turn have not been added up: each bit of theirs counts."""
    values = torch.tensor([1e6, 0.1, 1e-9, 1e-40])
    above = torch.nextafter(values, torch.full_like(values, torch.inf))
    for low, high in zip(values.tolist(), above.tolist(), strict=True):
        batch = packed([[low], [high], [low]], torch.float32)
        assert has_signal(trajectory_rewards(batch), batch.group).all()


def test_a_small_reward_beside_a_large_one_counts() -> None:
    """0.1 and 0.2 differ beside 1e6, whose error in float32 is at most 0.03."""
    batch = packed([[1e6, 0.1], [1e6, 0.2]], torch.float32)
    advantages = estimated("rloo", batch)[batch.loss_mask]
    assert advantages[0] < 0 < advantages[-1]


def test_a_series_of_steps_below_the_rounding_error_is_a_difference() -> None:
    """Neighbours are equal up to rounding, the first and the last are not."""
    batch = packed([[1e6, 1e6, 0.05 * step] for step in range(20)], torch.float32)
    assert has_signal(trajectory_rewards(batch), batch.group).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["grpo", "rloo", "opo", "brpo", "gpg", "reinforce_plus_plus_baseline"])
def test_rewards_that_are_not_finite_stay_visible(name: str, value: float) -> None:
    for episodes in ([[value, 1.0], [0.1, 0.2]], [[value], [value]]):
        batch = packed(episodes, torch.float32)
        assert not bool(estimated(name, batch).isfinite().all())
        assert has_signal(trajectory_rewards(batch), batch.group).all()


def test_float32_rewards_in_a_float64_batch_are_compared_as_float32() -> None:
    batch = packed([[0.1, 0.2], [0.3]], torch.float32)
    assert not bool(estimated("grpo", replace(batch, rewards=batch.rewards.double())).any())


def test_float64_rewards_are_compared_as_float64() -> None:
    """1e-10 is less than the rounding error of float32."""
    batch = packed([[0.1, 0.2], [0.3 + 1e-10], [0.15, 0.15]], torch.float64)
    assert has_signal(trajectory_rewards(batch), batch.group).all()


def test_the_error_of_many_additions_is_no_difference() -> None:
    """A thousand times 0.1 is 99.9999999999986 in float64."""
    batch = packed([[0.1] * 1000, [100.0]], torch.float64)
    assert not bool(estimated("grpo", batch).any())


def test_a_group_in_windows_has_the_advantages_of_whole_episodes(make_batch: Callable[..., Batch]) -> None:
    masks, rewards = [[1, 1], [1], [1], [1, 1]], [[0.0, -0.1], [-0.1], [1.0], [1.0, -0.2]]
    ends = [[0, 1], [1], [1], [1, 1]]
    batch = make_batch(masks, rewards, ends=ends, trajectory=[0, 0, 0, 1], dtype=torch.float32)
    assert not bool(estimated("grpo", batch).any())


def test_the_sum_of_rewards_does_not_depend_on_their_order() -> None:
    assert sum_rewards([0.1, 0.2, 0.3]) == sum_rewards([0.3, 0.2, 0.1]) == 0.6
    assert sum_rewards([0.1, 0.2]) == 0.3
    assert sum_rewards([0.1 + 0.2, -0.3]) == 0.0
    assert sum_rewards([1.0, *[-0.1] * 10]) == 0.0
    assert sum_rewards([5e-324]) == 5e-324
    assert sum_rewards([1e-9, 1.0, -1.0]) == 1e-9
    assert math.isnan(sum_rewards([math.inf, -math.inf]))
    assert sum_rewards([]) == 0.0


SHUFFLED = [[-0.1, -0.1, 1.0, -0.1], [1.0, -0.1, -0.1, -0.1], [-0.1, 1.0, -0.1, -0.1], [0.3, 0.4], [0.7]]
"""Episodes with a total of 0.7."""


@pytest.mark.parametrize("shaping", [{"center": "group"}, {"center": "batch", "divide": "batch"}])
@pytest.mark.parametrize("name", ["raw", "agentic_reinforce"])
def test_centered_equal_rewards_are_exactly_0(name: str, shaping: dict[str, Any]) -> None:
    batch = shape_rewards(packed(SHUFFLED, torch.float32), ShapingConfig(**shaping), 100)
    advantages, _ = estimate(batch, ADVANTAGE_UNION.config_class(name)())
    assert not bool(advantages.any())


def test_a_group_of_equal_rewards_beside_others_is_exactly_0_after_shaping() -> None:
    """Divided by the deviation of the batch, 4, noise in the totals of the first group would stay."""
    batch = packed([*SHUFFLED, [1.0, 3.0], [-5.0]], torch.float32, [0] * len(SHUFFLED) + [1, 1])
    batch = shape_rewards(batch, ShapingConfig(center="group", divide="batch", clip=0.5), 100)
    totals = trajectory_rewards(batch)
    assert not bool(totals[: len(SHUFFLED)].any())
    assert totals[-1] < 0 < totals[-2]


def test_an_episode_as_good_as_the_greedy_one_is_exactly_0_in_remax() -> None:
    """On its first turn, whose return is the total."""
    batch = packed(SHUFFLED, torch.float32)
    for reward, expected in ((sum_rewards([1.0, -0.1, -0.1, -0.1]), 0), (0.7001, -1)):
        compared = replace(batch, baseline=torch.full((len(SHUFFLED),), reward))
        advantages, _ = estimate(compared, ADVANTAGE_UNION.config_class("remax")())
        assert set(advantages[batch.loss_mask & (batch.turn == 0)].sign().tolist()) == {expected}


def test_turns_with_equal_rewards_or_returns_are_exactly_0() -> None:
    """Rewards of several tokens of a turn, and returns of turns in the same state, in another order or partition."""
    tokens = [[0.1, 0.2], [0.2, 0.1], [0.3, 0.0], [0.15, 0.15]]
    batch = packed([[0.0]] * 4, torch.float32)
    size = len(batch.tokens)
    turn = replace(
        batch,
        tokens=torch.zeros(2 * size, dtype=torch.long),
        positions=torch.arange(2).repeat(size),
        lengths=torch.full((4,), 4),
        loss_mask=torch.tensor([False, True, True, True]).repeat(4),
        turn=torch.zeros(2 * size, dtype=torch.long),
        turn_end=torch.tensor([False, False, False, True]).repeat(4),
        logprobs=torch.zeros(2 * size),
        observation_group=torch.zeros(2 * size, dtype=torch.long),
        rewards=torch.tensor([[0.0, 0.0, *rewards] for rewards in tokens]).flatten(),
    )
    for name, options in (
        ("grpo_dynamic", {"level": "turn"}),
        ("gigpo", {}),
        ("gigpo", {"compare": "turns"}),
        ("step_reinforce", {"center": "group", "divide": "group"}),
        ("step_reinforce", {"center": "batch", "divide": "batch"}),
    ):
        advantages, _ = estimate(turn, ADVANTAGE_UNION.config_class(name)(**options))
        assert not bool(advantages.any()), (name, options)


@pytest.mark.parametrize("gamma", [1.0, 0.95])
def test_returns_of_turns_in_the_same_state_are_compared_up_to_rounding(gamma: float) -> None:
    """γ G is the same for the two episodes, whose second turns saw the same and have rewards in another order."""
    episodes = [[0.5, 0.1, 0.2, 0.3], [0.5, 0.3, 0.2, 0.1]] if gamma == 1.0 else [[0.5, 0.1], [0.5, 0.1]]
    batch = packed(episodes, torch.float32)
    batch = replace(batch, observation_group=torch.where(batch.turn == 1, 1, batch.observation_group))
    advantages, _ = estimate(batch, ADVANTAGE_UNION.config_class("gigpo")(turn_gamma=gamma))
    assert not bool(advantages[batch.turn <= 1].any())


def test_whitened_equal_values_are_exactly_0() -> None:
    """The rounding error of their mean would be divided by 1e-4."""
    batch = packed([[0.1]] * 7, torch.float32)
    for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"):
        config = ADVANTAGE_UNION.config_class(name)(whiten=True)
        advantages, _ = estimate(replace(batch, values=torch.zeros_like(batch.rewards)), config)
        assert not bool(advantages.any()), name


def test_tied_best_responses_have_no_lead_whatever_their_rounding() -> None:
    episodes = [[0.0], [-0.1, -0.1, 1.0, -0.1], [1.0, -0.1, -0.1, -0.1]]
    assert not bool(estimated("grpo_passk", packed(episodes, torch.float32)).any())


def test_gpg_does_not_count_a_total_that_rounding_moved_away_from_0() -> None:
    """Two of three episodes are rewarded, one of them with 0.1 + 0.2 - 0.3."""
    batch = packed([[0.1, 0.2, -0.3], [1.0]], torch.float32)
    advantages = estimated("gpg", batch)[batch.loss_mask]
    assert advantages[0] == -1.0
    assert advantages[-1] == 1.0


def test_rewards_that_are_equal_across_groups_are_compared_up_to_rounding() -> None:
    """`brpo` compares all episodes of a batch; the totals of the first group differ in their last bits from those of
    the second one."""
    batch = packed([[0.3, 0.6], [0.6, 0.3], [0.9], [0.9]], torch.float32, [0, 0, 1, 1])
    assert len(trajectory_rewards(batch).unique()) == 2
    for episodes in (batch, reward_at_end(batch, across_groups=True)):
        assert not bool(estimated("brpo", episodes).any())
        shaped = shape_rewards(episodes, ShapingConfig(center="batch"), 100)
        assert not bool(estimate(shaped, ADVANTAGE_UNION.config_class("raw")())[0].any())


def test_the_totals_of_a_group_do_not_depend_on_other_groups() -> None:
    """A group that is trained before others are complete has the same advantages, bit by bit."""
    batch = packed([[0.3, 0.6], [0.2, 0.3], [0.9], [0.5]], torch.float32, [0, 0, 1, 1])
    alone = packed([[0.3, 0.6], [0.2, 0.3]], torch.float32)
    assert torch.equal(trajectory_rewards(batch)[:2], trajectory_rewards(alone))


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("logprob", [-1.0, 0.0])
def test_equal_returns_at_a_position_have_no_advantage(name: str, whiten: bool, logprob: float) -> None:
    def advantages(batch: Batch) -> torch.Tensor:
        return estimate(batch, ADVANTAGE_UNION.config_class(name)(whiten=whiten))[0]

    batch = packed([[0.7]] * 3 + [[1e-3]] * 2, torch.float32, group=[0, 0, 0, 1, 1])
    logprobs = torch.full_like(batch.logprobs, logprob)
    batch = replace(batch, logprobs=logprobs, sum_squared_probs=logprobs.exp())
    assert not bool(advantages(batch).any())
    batch.rewards[-1] = 2e-3
    assert bool(advantages(batch).any())


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_returns_at_a_position_are_compared_up_to_rounding(name: str) -> None:
    """The first turns of all episodes have the return 0.7, those of another group 0.8."""
    batch = packed([*SHUFFLED, [0.9, -0.1], [0.3, 0.5]], torch.float32, [0] * len(SHUFFLED) + [1, 1])
    batch = replace(batch, sum_squared_probs=torch.full_like(batch.rewards, 0.4), logprobs=batch.logprobs - 1.0)
    advantages, _ = estimate(batch, ADVANTAGE_UNION.config_class(name)())
    assert not bool(advantages[batch.turn == 0].any())
    assert bool(advantages[batch.turn == 1].any())


@pytest.mark.parametrize(
    "name", ["raw", "arpo", "grpo", "grpo_dynamic", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "gigpo"]
)
def test_whitening_compares_the_rewards_of_different_groups_up_to_rounding(name: str) -> None:
    """The only episode of a group keeps its reward, and all have the same."""
    batch = packed(SHUFFLED, torch.float32, list(range(len(SHUFFLED))))
    options = {"turn_weight": 0.0} if name == "gigpo" else {}
    advantages, _ = estimate(batch, ADVANTAGE_UNION.config_class(name)(whiten=True, **options))
    assert not bool(advantages.any())


def test_equal_rewards_of_different_groups_stay_equal_if_a_group_has_several_sums() -> None:
    """0.4 - 0.3 is less than 0.1 in float32; a reward of 0.1 of its group is still equal to that of another group."""
    batch = packed([[0.4, -0.3], [0.1], [0.1]], torch.float32, [0, 0, 1])
    assert len(trajectory_rewards(batch, across_groups=True).unique()) == 1
    assert not bool(estimated("brpo", batch).any())


@pytest.mark.parametrize(
    ("shaping", "episodes"),
    [
        ({"center": "group"}, [[-0.7, 3.1], [2.4]]),
        ({"divide": "batch"}, [[0.2, 0.2, 2.1, 0.3], [3.7, -0.9]]),
    ],
)
def test_shaped_equal_rewards_of_a_group_stay_equal(shaping: dict[str, Any], episodes: list[list[float]]) -> None:
    """Centering and dividing round each reward again."""
    batch = packed([*episodes, [1.0, 3.0], [-5.0]], torch.float32, [0, 0, 1, 1])
    batch = shape_rewards(batch, ShapingConfig(**shaping), 100)
    totals = trajectory_rewards(batch)
    assert totals[0] == totals[1]
    assert (totals[0] == 0.0) == ("center" in shaping)


def test_clipped_equal_rewards_are_exactly_0() -> None:
    """Scaling rounds each reward again."""
    batch = packed([[-0.8, 0.5, 2.4], [2.1]], torch.float32)
    assert not bool(estimated("grpo", shape_rewards(batch, ShapingConfig(clip=0.5), 100)).any())


@pytest.mark.parametrize(
    ("gamma", "later", "now", "dtype"), [(0.99, 0.3, 0.297, torch.float32), (0.9, 1.1, 0.99, torch.float64)]
)
def test_a_discounted_reward_equals_the_same_reward_now(
    gamma: float, later: float, now: float, dtype: torch.dtype
) -> None:
    batch = packed([[0.0, later], [now, 0.0]], dtype)
    advantages, _ = estimate(batch, ADVANTAGE_UNION.config_class("gigpo")(turn_gamma=gamma, episode_weight=0.0))
    assert not bool(advantages[batch.turn == 0].any())
    undiscounted = packed([[0.1], [0.1 + 1e-8]], torch.float32)
    advantages, _ = estimate(undiscounted, ADVANTAGE_UNION.config_class("gigpo")(turn_gamma=gamma))
    assert bool(advantages.any())


@pytest.mark.parametrize("name", ["grpo", "gigpo", "reinforce_plus_plus_baseline"])
def test_the_unit_of_rewards_changes_no_normalized_advantage(name: str) -> None:
    """The squares of 1e30 are infinite in float32."""
    totals = [0.0, 1.0, 1.0, 0.5]
    expected = estimated(name, packed([[total * 1e9] for total in totals], torch.float32))
    torch.testing.assert_close(estimated(name, packed([[total * 1e30] for total in totals], torch.float32)), expected)
    assert bool(expected.any())


def test_the_largest_floats_are_no_rounding_error() -> None:
    largest = torch.finfo(torch.float32).max
    assert trajectory_rewards(packed([[largest], [1.0]], torch.float32)).tolist() == [largest, 1.0]
    assert trajectory_rewards(packed([[1.5e308, 1.5e308], [1.0]], torch.float64)).tolist() == [math.inf, 1.0]
    sums = packed([[1.5e308, -1.5e308, 1.0], [1.5e308, -1.5e308, 2.0]], torch.float64)
    assert has_signal(trajectory_rewards(sums), sums.group).all()


def test_a_return_that_rounding_moved_away_from_0_is_0() -> None:
    batch = packed([[0.1, 0.2, -0.3]], torch.float32)
    advantages, _ = estimate(batch, ADVANTAGE_UNION.config_class("step_reinforce")(turn_gamma=1.0, center="none"))
    assert not bool(advantages[batch.turn == 0].any())
