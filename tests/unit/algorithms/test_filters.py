"""If these fail, the wrong episodes are learnt from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.algorithms.filters import advantage_scale, has_signal, select_groups
from quintet.config.native.algorithm import FilterConfig

GROUP = torch.tensor([4, 4, 7, 7, 9, 9, 2])
REWARDS = torch.tensor([0.0, 0.0, 0.0, 1.0, 3.0, 5.0, 2.0], dtype=torch.float64)
"""Deviations 0, 0.71 and 1.41, and one episode alone."""


LENGTHS = torch.tensor([5, 7, 1, 1, 4, 4, 9])
"""Means of groups 6, 1, 4 and 9."""


def kept(**options: Any) -> list[int]:
    """Numbers of the groups that stay."""
    counted = options.pop("counted", None)
    keep = select_groups(REWARDS, GROUP, FilterConfig(**options), counted=counted, lengths=LENGTHS)
    names = set(GROUP[keep].tolist())
    assert keep.tolist() == [bool(counted is None or counted[i]) and int(g) in names for i, g in enumerate(GROUP)]
    return sorted(names)


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0.0, [0, 0, 1, 1, 1, 1, 1]), (0.8, [0, 0, 0, 0, 1, 1, 1]), (2.0, [0, 0, 0, 0, 0, 0, 1])],
)
def test_groups_whose_rewards_differ_have_a_signal(threshold: float, expected: list[int]) -> None:
    assert has_signal(REWARDS, GROUP, threshold).int().tolist() == expected


@pytest.mark.parametrize("value", [0.1, 1 / 3, 123.456])
def test_rounding_is_no_signal(value: float) -> None:
    assert not has_signal(torch.full((7,), value), torch.zeros(7)).any()


def test_who_is_not_counted_brings_no_signal() -> None:
    counted = torch.tensor([True] * 5 + [False] + [True])
    assert has_signal(REWARDS, GROUP, 0.0, counted).int().tolist() == [0, 0, 1, 1, 1, 0, 1]


def test_everything_stays_by_default() -> None:
    assert kept() == [2, 4, 7, 9]


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.01, [9]),
        (0.25, [9]),
        (0.26, [7, 9]),
        (0.5, [7, 9]),
        (0.51, [2, 7, 9]),
        (0.75, [2, 7, 9]),
        (0.9, [2, 4, 7, 9]),
    ],
)
def test_the_groups_of_largest_deviation_are_kept(share: float, expected: list[int]) -> None:
    """Four groups; a started group counts whole, and of the two without deviation the first by number stays."""
    assert kept(keep_share=share) == expected


def test_groups_are_kept_by_least_deviation_or_by_the_lead_of_their_best() -> None:
    """Group 0 has deviation 0.5 and lead 0.75, group 1 deviation 0.577 and lead 0.5, group 2 neither."""
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    group = torch.arange(12) // 4
    for by, kept_group in (("deviation", 1), ("lead", 0), ("least_deviation", 2)):
        keep = select_groups(rewards, group, FilterConfig(keep_share=0.3, keep_by=by))  # type: ignore[arg-type]
        assert set(group[keep].tolist()) == {kept_group}


@pytest.mark.parametrize(("ddof", "first"), [(0, 1), (1, 0)])
def test_groups_of_different_sizes_are_compared_by_the_configured_variance(ddof: int, first: int) -> None:
    """Squares 0.5 of two and 1.21 of four episodes: variances 0.25 and 0.3025, or 0.5 and 0.403 if unbiased."""
    rewards, group = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.1, 1.1]), torch.tensor([0, 0, 1, 1, 1, 1])
    keep = select_groups(rewards, group, FilterConfig(keep_share=0.5, keep_by="variance", ddof=ddof))  # type: ignore[arg-type]
    assert set(group[keep].tolist()) == {first}


def test_a_share_that_comes_out_even_is_not_rounded_up() -> None:
    """0.3 × 10 is a little more than 3 to a computer."""
    rewards = torch.arange(20, dtype=torch.float64) * (torch.arange(20) % 2)
    keep = select_groups(rewards, torch.arange(20) // 2, FilterConfig(keep_share=0.3))
    assert keep.tolist() == [False] * 14 + [True] * 6
    assert 0.1 * 3 * 10 > 3.0
    assert int(select_groups(rewards, torch.arange(20) // 2, FilterConfig(keep_share=0.1 * 3)).sum()) == 6


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"min_mean": 0.5}, [2, 7, 9]),
        ({"max_mean": 2.0}, [2, 4, 7]),
        ({"min_mean": 0.1, "max_mean": 0.9}, [7]),
        ({"min_mean": 10.0}, []),
        ({"min_mean": 0.1, "keep_share": 0.5}, [7, 9]),
        ({"max_mean": 2.0, "keep_share": 0.3}, [7]),
    ],
)
def test_bounds_on_the_mean_come_first(options: dict[str, Any], expected: list[int]) -> None:
    """Means 2, 0, 0.5 and 4, bounds included."""
    assert kept(**options) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # deviations √½ and √2 of a sum of 3 √½: the larger one alone is two thirds
        ({"top_p": 0.6}, [9]),
        ({"top_p": 2 / 3}, [9]),
        ({"top_p": 0.7}, [7, 9]),
        ({"top_p": 0.7, "top_p_tolerance": 0.1}, [9]),
        # variances 0.5 and 2, or 0.25 and 1 of a population: the larger one is 0.8 of their sum either way
        ({"top_p": 0.8, "keep_by": "variance"}, [9]),
        ({"top_p": 0.8, "keep_by": "variance", "ddof": 0}, [9]),
        ({"top_p": 0.81, "keep_by": "variance"}, [7, 9]),
        # means 0, 0.5, 2 and 4
        ({"top_p": 0.6, "keep_by": "mean"}, [9]),
        ({"top_p": 0.7, "keep_by": "mean"}, [2, 9]),
        # the first score from below is 0, and nothing adds up
        ({"top_p": 0.3, "keep_by": "least_deviation"}, []),
        ({"top_p": 0.3, "keep_by": "least_deviation", "drop_zero": True}, [7]),
        # e to the deviations: 1, 1, 2.028 and 4.113 of 8.141; of those with the same, the first
        ({"top_p": 0.5, "top_p_softmax": True}, [9]),
        ({"top_p": 0.75, "top_p_softmax": True}, [7, 9]),
        ({"top_p": 0.76, "top_p_softmax": True}, [2, 7, 9]),
        # e to their negatives: 1, 1, 0.493 and 0.243 of 2.736
        ({"top_p": 0.7, "top_p_softmax": True, "keep_by": "least_deviation"}, [2, 4]),
        ({"drop_zero": True}, [7, 9]),
    ],
)
def test_the_first_groups_are_kept_until_their_scores_add_up(options: dict[str, Any], expected: list[int]) -> None:
    assert kept(**options) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"min_p": 0.5}, [7, 9]),
        ({"min_p": 0.6}, [9]),
        ({"min_p": 0.25, "keep_by": "variance"}, [7, 9]),
        ({"min_p": 0.26, "keep_by": "variance"}, [9]),
        ({"min_p": 0.5, "keep_by": "least_deviation"}, [2, 4]),
        ({"min_p": 0.5, "keep_by": "least_deviation", "drop_zero": True}, [7, 9]),
        ({"min_p": 0.25, "keep_by": "least_mean", "min_mean": 0.1}, [2, 7]),
    ],
)
def test_groups_are_kept_by_a_share_of_the_best_score(options: dict[str, Any], expected: list[int]) -> None:
    assert kept(**options) == expected


@pytest.mark.parametrize(
    ("keep_by", "expected"),
    [
        ("mean", [9]),
        ("least_mean", [4]),
        ("total", [9]),
        ("least_total", [4]),
        ("length", [2]),
        ("least_length", [7]),
        ("least_variance", [2]),
    ],
)
def test_groups_are_ordered_by_the_score_that_is_asked_for(keep_by: Any, expected: list[int]) -> None:
    assert kept(keep_share=0.25, keep_by=keep_by) == expected


def test_groups_that_are_dropped_for_their_score_count_in_the_share_to_keep() -> None:
    """Half of four groups are two, though two of them have no deviation."""
    assert kept(keep_share=0.5, drop_zero=True, keep_by="least_deviation") == [7, 9]
    assert kept(keep_share=0.25, drop_zero=True, keep_by="least_deviation") == [7]


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"drop_zero": True}, {"top_p": 0.9, "top_p_tolerance": 0.01}])
def test_without_any_deviation_no_group_is_kept_or_all_are(options: dict[str, Any]) -> None:
    rewards, group = torch.full((4,), 0.1), torch.tensor([0, 0, 1, 1])
    assert not select_groups(rewards, group, FilterConfig(**options)).any()
    assert select_groups(rewards, group, FilterConfig(keep_all_if_empty=True, **options)).all()


def test_advantages_shrink_with_the_share_of_groups_that_is_kept() -> None:
    scales = [advantage_scale(0.25, FilterConfig(scale_advantages=how)) for how in ("none", "linear", "sqrt")]  # type: ignore[arg-type]
    assert scales == [1.0, 0.25, 0.5]


def test_excluded_episodes_do_not_enter_the_deviation_of_their_group() -> None:
    """Without its second episode group 9 has no deviation left."""
    counted = torch.tensor([True] * 5 + [False] + [True])
    assert kept(counted=counted) == [2, 4, 7, 9]
    assert kept(counted=counted, keep_share=0.25) == [7]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3)), min_size=1, max_size=20),
    st.floats(0.01, 1.0),
)
def test_whole_groups_are_filtered_and_one_always_remains(episodes: list[tuple[int, int]], share: float) -> None:
    group = torch.tensor([number for number, _ in episodes])
    rewards = torch.tensor([float(reward) for _, reward in episodes])
    keep = select_groups(rewards, group, FilterConfig(keep_share=share))
    names = torch.unique(group[keep])
    assert keep.any()
    assert torch.equal(keep, torch.isin(group, names))
    total = len(torch.unique(group))
    assert share * total - 1e-6 <= len(names) < share * total + 1


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e30])
@pytest.mark.parametrize(
    "options",
    [
        {"keep_share": 0.5},
        {"drop_zero": True},
        {"top_p": 2 / 3},
        {"top_p": 0.9, "keep_by": "mean"},
        {"min_p": 0.5},
        {"min_p": 0.5, "keep_by": "least_mean", "drop_zero": True},
        {"drop_zero": True, "keep_by": "variance"},
    ],
)
def test_the_unit_of_rewards_changes_no_selection(options: dict[str, Any], scale: float) -> None:
    config = FilterConfig(**options)
    expected = select_groups(REWARDS, GROUP, config)
    assert select_groups(REWARDS * scale, GROUP, config).tolist() == expected.tolist()
    assert has_signal(REWARDS * scale, GROUP).tolist() == has_signal(REWARDS, GROUP).tolist()


def test_of_groups_with_the_same_deviation_the_first_is_kept() -> None:
    """Their deviations differ in the last bit."""
    rewards, group = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0]), torch.arange(9) // 3
    for order in (torch.arange(9), torch.tensor([3, 4, 5, 0, 1, 2, 6, 7, 8])):
        for by in ("deviation", "variance", "least_deviation"):
            keep = select_groups(rewards[order], group, FilterConfig(keep_share=0.3, keep_by=by))  # type: ignore[arg-type]
            assert keep.tolist() == [True] * 3 + [False] * 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_at_a_bound_is_inside_whatever_its_rounding(dtype: torch.dtype) -> None:
    rewards = torch.tensor([0.1, 0.1, 0.4, 0.2, 0.2, 0.2, 0.2, 0.2, 0.3], dtype=dtype)
    config = FilterConfig(min_mean=0.2, max_mean=0.2)
    assert select_groups(rewards, torch.arange(9) // 3, config).tolist() == [True] * 6 + [False] * 3
    below = torch.tensor([0.7, 0.7, 0.7], dtype=dtype)
    assert select_groups(below, torch.zeros(3, dtype=torch.long), FilterConfig(min_mean=0.7)).all()


def test_totals_that_cancel_are_zero() -> None:
    rewards, group = torch.tensor([0.1, 0.2, -0.3, 0.1, 0.2, -0.2]), torch.arange(6) // 3
    config = FilterConfig(keep_by="total", drop_zero=True)
    assert select_groups(rewards, group, config).tolist() == [False] * 3 + [True] * 3


def test_a_group_with_a_reward_that_is_no_number_is_not_dropped() -> None:
    rewards = torch.tensor([float("nan"), 1.0, 1.0, 1.0])
    assert has_signal(rewards, torch.tensor([0, 0, 1, 1]), 0.5).tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("means", "options", "expected"),
    [
        ([0.3, 0.1, 0.09], {"min_p": 1 / 3}, [True, True, False]),
        ([0.1, 0.3, 0.31], {"min_p": 1 / 3, "keep_by": "least_mean"}, [True, True, False]),
        ([0.1] * 11, {"top_p": 9 / 11}, [True] * 9 + [False] * 2),
    ],
)
def test_scores_at_a_bound_are_inside_whatever_their_rounding(
    means: list[float], options: dict[str, Any], expected: list[bool]
) -> None:
    config = FilterConfig(**{"keep_by": "mean", **options})
    assert select_groups(torch.tensor(means), torch.arange(len(means)), config).tolist() == expected


def test_groups_whose_rewards_differ_by_a_constant_have_the_same_deviation() -> None:
    """In float32, 0.2 - 0.1 and 0.3 - 0.2 differ."""
    for rewards in ([0.1, 0.2, 0.2, 0.3], [0.2, 0.3, 0.1, 0.2]):
        keep = select_groups(torch.tensor(rewards), torch.tensor([0, 0, 1, 1]), FilterConfig(keep_share=0.5))
        assert keep.tolist() == [True, True, False, False]


def test_a_group_whose_score_is_no_number_is_no_tie() -> None:
    rewards = torch.tensor([0.0, 1.0, float("nan"), 1.0])
    keep = select_groups(rewards, torch.tensor([0, 0, 1, 1]), FilterConfig(keep_share=0.5))
    assert keep.tolist() == [False, False, True, True]
