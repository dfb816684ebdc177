"""If these fail, a turn is credited with what another did. All numbers are worked out by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quintet.algorithms.advantages.gae import bi_level_gae, critic_mask, gae, turn_ends, turn_wise_gae
from quintet.algorithms.advantages.turns import agentic_reinforce, gigpo, grpo_dynamic, step_reinforce
from quintet.config.native.advantages import (
    AgenticReinforceConfig,
    BiLevelGaeConfig,
    GaeConfig,
    GigpoConfig,
    GrpoDynamicConfig,
    StepReinforceConfig,
    TurnWiseGaeConfig,
)
from quintet.records import Batch

MakeBatch = Callable[..., Batch]

MASK = [[1, 1, 1, 1, 1, 0, 0, 1, 1, 1]]
ENDS = [[0, 0, 0, 0, 1, 0, 0, 0, 0, 1]]
VALUES = [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]]
REWARDS = [[0, 0, 0, 0, 1.0, 0, 0, 0, 0, 1.0]]
"""The vectors of `ragen-vagen.md`, which VAGEN's code gave."""


def two_turns(make_batch: MakeBatch, rewards: list[list[float]] = REWARDS) -> Batch:
    return make_batch(MASK, rewards, ends=ENDS, values=VALUES)


def close(actual: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=2e-6, rtol=0)


def test_every_token_of_a_turn_has_the_turns_advantage(make_batch: MakeBatch) -> None:
    config = TurnWiseGaeConfig(name="turn_wise_gae", gamma=0.95, lam=0.95, whiten=False)
    advantages, returns = turn_wise_gae(two_turns(make_batch), config)
    close(advantages, [1.45] * 5 + [0] * 5)
    close(returns, [0, 0, 0, 0, 1.95, 0, 0, 0, 0, 1.0])


def test_turn_wise_advantages_are_whitened_over_turns(make_batch: MakeBatch) -> None:
    """Of 1.45 and 0: mean 0.725, variance 0.725² × 2; five tokens against three don't count more."""
    config = TurnWiseGaeConfig(name="turn_wise_gae", gamma=0.95, lam=0.95)
    advantages, returns = turn_wise_gae(two_turns(make_batch), config)
    half = 0.5**0.5
    close(advantages, [half] * 5 + [0, 0] + [-half] * 3)
    close(returns, [0, 0, 0, 0, 1.95, 0, 0, 0, 0, 1.0])


@pytest.mark.parametrize(
    ("value", "first", "second", "whitened", "returns"),
    [
        # deltas 10 - 5 = 5 and 1 + 0.9 × 5 - 3 = 2.5, so A2 = 5 and A1 = 2.5 + 0.72 × 5 = 6.1; over four tokens the
        # mean is 5.825 and the deviation 0.55
        ("first", 6.1, 5.0, [0.5, 0.5, 0.5, -1.5], [0, 9.1, 0, 0, 0, 10.0]),
        # the value of turn 1 is now 7: A1 = 1 + 4.5 - 7 + 0.72 × 5 = 2.1; the mean is 2.825, the deviation 1.45
        ("last", 2.1, 5.0, [-0.5, -0.5, -0.5, 1.5], [0, 0, 0, 9.1, 0, 10.0]),
    ],
)
def test_turns_with_a_context_each_are_credited_as_in_vagens_no_concat_gae(
    make_batch: MakeBatch, value: Any, first: float, second: float, whitened: list[float], returns: list[float]
) -> None:
    """By hand from `vagen/custom_advantage/no_concat_gae.py`, which sums a turn's rewards, takes the value of the first
    or of the last token, and whitens over tokens; a turn is a sequence of its own, here of three tokens and of one."""
    batch = make_batch(
        [[0, 1, 1, 1], [0, 1]],
        [[0, 0, 0, 1.0], [0, 10.0]],
        ends=[[0, 0, 0, 1], [0, 1]],
        values=[[9.0, 3.0, 8.0, 7.0], [9.0, 5.0]],
        trajectory=[0, 0],
    )
    config = TurnWiseGaeConfig(gamma=0.9, lam=0.8, turn_value=value, whiten=False, whiten_over="tokens")
    advantages, actual = turn_wise_gae(batch, config)
    close(advantages, [0, first, first, first, 0, second])
    close(actual, returns)
    advantages, _ = turn_wise_gae(batch, config.model_copy(update={"whiten": True}))
    close(advantages, [0, *whitened[:3], 0, whitened[3]])
    assert critic_mask(batch, config).tolist() == [bool(number) for number in returns]


def test_the_value_of_a_turn_can_be_that_of_its_first_token(make_batch: MakeBatch) -> None:
    """A2 = 1 - 0.8, A1 = (1 + 0.95 * 0.8 - 0.1) + 0.95² * 0.2; the last token of turn 1 gets A1 + 0.1 - 0.5."""
    batch, discounts = two_turns(make_batch), {"lam": 0.95, "turn_value": "first", "whiten": False}
    by_turn = TurnWiseGaeConfig.model_validate({"name": "turn_wise_gae", "gamma": 0.95, **discounts})
    advantages, returns = turn_wise_gae(batch, by_turn)
    close(advantages, [1.8405] * 5 + [0, 0] + [0.2] * 3)
    close(returns, [1.9405, 0, 0, 0, 0, 0, 0, 1.0, 0, 0])
    assert critic_mask(batch, by_turn).nonzero().flatten().tolist() == [0, 7]
    config = BiLevelGaeConfig.model_validate({"gamma": 1.0, "turn_gamma": 0.95, "turn_lam": 0.95, **discounts})
    advantages, returns = bi_level_gae(batch, config)
    close(advantages, [1.54428375, 1.5202986875, 1.49505125, 1.468475, 1.4405, 0, 0, 0.195, 0.1, 0.0])
    close(returns - advantages, [0.1, 0.2, 0.3, 0.4, 0.5, 0, 0, 0.8, 0.9, 1.0])


@pytest.mark.parametrize(("ends", "first"), [("turns", 0.85), ("rewards", 0.9)])
def test_turn_gae_by_rewards_merges_turns_without_reward(make_batch: MakeBatch, ends: Any, first: float) -> None:
    batch = two_turns(make_batch, [[0, 0, 0, 0, 0.0, 0, 0, 0, 0, 1.0]])
    config = BiLevelGaeConfig(gamma=1.0, lam=1.0, turn_gamma=0.95, turn_lam=1.0, turn_ends=ends, whiten=False)
    advantages, _ = bi_level_gae(batch, config)
    close(advantages, [first - 0.1 * place for place in range(5)] + [0, 0, 0.2, 0.1, 0])


def test_both_turn_definitions_agree_if_every_turn_is_rewarded(make_batch: MakeBatch) -> None:
    batch = two_turns(make_batch)
    results = [bi_level_gae(batch, BiLevelGaeConfig(turn_ends=ends)) for ends in ("turns", "rewards")]
    torch.testing.assert_close(results[0], results[1])


def test_by_rewards_a_token_penalty_makes_each_token_a_turn(make_batch: MakeBatch) -> None:
    """Then `turn_gamma` is a discount a token; with `turn_ends: turns` it isn't."""
    batch = make_batch([[1, 1, 1]], [[-0.1, -0.1, 1.0]], ends=[[0, 0, 1]], values=[[0.0, 0.0, 0.0]])
    options = {"gamma": 1.0, "lam": 1.0, "turn_gamma": 0.5, "turn_lam": 1.0, "whiten": False}
    close(bi_level_gae(batch, BiLevelGaeConfig(turn_ends="rewards", **options))[0], [0.1, 0.4, 1.0])
    close(bi_level_gae(batch, BiLevelGaeConfig(turn_ends="turns", **options))[0], [0.8, 0.9, 1.0])


def test_the_last_response_token_always_ends_a_turn(make_batch: MakeBatch) -> None:
    """An episode that was cut in mid-reply. RAGEN's code reads beyond the end where the last token isn't rewarded."""
    batch = make_batch([[1, 1, 0, 1, 0]], [[0, 1.0, 0, 0, 0]], ends=[[0, 1, 0, 0, 0]], values=[[0.5] * 5])
    assert turn_ends(batch).tolist() == [False, True, False, True, False]
    config = BiLevelGaeConfig(gamma=1.0, lam=1.0, turn_gamma=1.0, turn_lam=1.0, turn_ends="rewards", whiten=False)
    close(bi_level_gae(batch, config)[0], [0.5, 0.5, 0, -0.5, 0])


def test_turn_gae_of_a_single_turn_is_plain_gae(make_batch: MakeBatch) -> None:
    batch = make_batch([[1, 1, 1]], [[0.2, 0, 1.0]], ends=[[0, 0, 1]], values=[[0.3, 0.1, 0.4]])
    flat = gae(batch, GaeConfig(gamma=0.9, lam=0.8, whiten=False))
    torch.testing.assert_close(bi_level_gae(batch, BiLevelGaeConfig(gamma=0.9, lam=0.8, whiten=False)), flat)


def episodes(make_batch: MakeBatch) -> Batch:
    """Two episodes of two turns from one start, and one of one turn from another. `saw`: all begin alike in a group;
    then the first two meet the same, too."""
    batch = make_batch(
        [[0, 1, 1, 0, 1], [0, 1, 0, 1], [0, 1]], [[0, 0, 1.0, 0, 2.0], [0, 0.0, 0, 4.0], [0, 3.0]], group=[0, 0, 1]
    )
    return dataclasses.replace(
        batch,
        turn=torch.tensor([0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0]),
        observation_group=torch.tensor([0, 0, 0, 1, 1, 0, 0, 1, 1, 2, 2]),
    )


def test_gigpo_compares_turns_with_the_same_observation(make_batch: MakeBatch) -> None:
    """Returns of turns with γ 1/2: 2, 2 and 2, 4. Episodes 3 and 4 about 3.5; the lone episode keeps its 3."""
    config = GigpoConfig(name="gigpo", turn_gamma=0.5, normalize_by_std=False)
    close(gigpo(episodes(make_batch), config)[0], [0, -0.5, -0.5, 0, -0.5 - 1, 0, 0.5, 0, 0.5 + 1, 0, 3.0])
    weighted = GigpoConfig(name="gigpo", turn_gamma=0.5, normalize_by_std=False, episode_weight=0.0, turn_weight=2.0)
    close(gigpo(episodes(make_batch), weighted)[0], [0, 0, 0, 0, -2, 0, 0, 0, 2, 0, 0])
    normalised = GigpoConfig(name="gigpo", turn_gamma=0.5, episode_weight=0.0)
    close(gigpo(episodes(make_batch), normalised)[0], [0, 0, 0, 0, -(0.5**0.5), 0, 0, 0, 0.5**0.5, 0, 0])
    with pytest.raises(ValueError, match="observation_group"):
        gigpo(dataclasses.replace(episodes(make_batch), observation_group=None), config)


def test_gigpo_compares_returns_of_all_turns_of_a_group(make_batch: MakeBatch) -> None:
    """Returns with γ 1/2 are 2, 2, 2 and 4, about 2.5; the only turn of a group gets 0."""
    config = GigpoConfig(name="gigpo", compare="turns", turn_gamma=0.5, normalize_by_std=False, turn_weight=0.0)
    close(gigpo(episodes(make_batch), config)[0], [0, -0.5, -0.5, 0, -0.5, 0, -0.5, 0, 1.5, 0, 0])
    both = config.model_copy(update={"turn_weight": 2.0})
    close(gigpo(episodes(make_batch), both)[0], [0, -0.5, -0.5, 0, -2.5, 0, -0.5, 0, 3.5, 0, 0])


def test_gigpo_gives_no_step_advantage_to_unique_observations(make_batch: MakeBatch) -> None:
    batch = dataclasses.replace(episodes(make_batch), observation_group=torch.tensor([0, 0, 0, 1, 1, 0, 0, 3, 3, 2, 2]))
    config = GigpoConfig(name="gigpo", turn_gamma=1.0, normalize_by_std=False, episode_weight=0.0)
    close(gigpo(batch, config)[0], [0, -0.5, -0.5, 0, 0, 0, 0.5, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("trajectory", [0, -0.5, -0.5, 0, -0.5, 0, 0.5, 0, 0.5, 0, 3.0]),
        ("turn", [0, -0.75, -0.75, 0, 0.25, 0, -1.75, 0, 2.25, 0, 3.0]),
    ],
)
def test_grpo_of_episodes_or_of_turns(make_batch: MakeBatch, level: Any, expected: list[float]) -> None:
    """Episodes 3 and 4 about 3.5; turns 1, 2, 0 and 4 about 1.75."""
    config = GrpoDynamicConfig(name="grpo_dynamic", level=level, normalize_by_std=False)
    close(grpo_dynamic(episodes(make_batch), config)[0], expected)


def test_turns_are_divided_by_the_deviation_of_turns(make_batch: MakeBatch) -> None:
    advantages, _ = grpo_dynamic(episodes(make_batch), GrpoDynamicConfig(name="grpo_dynamic", level="turn"))
    deviation = ((0.75**2 + 0.25**2 + 1.75**2 + 2.25**2) / 3) ** 0.5
    close(advantages[[1, 4, 6, 8]], [x / (deviation + 1e-6) for x in (-0.75, 0.25, -1.75, 2.25)])


def test_step_reinforce_compares_returns_of_turns(make_batch: MakeBatch) -> None:
    """Returns at half a discount: 2, 2 | 2, 4 in the first group, 3 in the second. The first group has mean 2.5 and
    deviation √((3 × 0.25 + 2.25) / 3) = 1, the batch 2.6 and √((3 × 0.36 + 1.96 + 0.16) / 4) = √0.8."""
    batch = episodes(make_batch)

    def advantages(**options: Any) -> torch.Tensor:
        return step_reinforce(batch, StepReinforceConfig(turn_gamma=0.5, **options))[0]

    close(advantages(center="none", divide="none"), [0, 2, 2, 0, 2, 0, 2, 0, 4, 0, 3])
    close(advantages(), [0, -0.5, -0.5, 0, -0.5, 0, -0.5, 0, 1.5, 0, 0])
    close(advantages(divide="none"), [0, -0.5, -0.5, 0, -0.5, 0, -0.5, 0, 1.5, 0, 0])
    low, high, alone = (number / 0.8**0.5 for number in (-0.6, 1.4, 0.4))
    close(advantages(center="batch", divide="batch"), [0, low, low, 0, low, 0, low, 0, high, 0, alone])


def test_equal_returns_of_turns_are_no_signal_of_step_reinforce(make_batch: MakeBatch) -> None:
    batch = dataclasses.replace(episodes(make_batch), rewards=torch.zeros(11, dtype=torch.float64))
    close(step_reinforce(batch, StepReinforceConfig(center="batch", divide="batch"))[0], [0.0] * 11)


def test_agentic_reinforce_discounts_the_episode_by_turns(make_batch: MakeBatch) -> None:
    """Rewards of 3, 4 and 3 in all; the first of two turns gets half."""
    config = AgenticReinforceConfig(gamma=0.5)
    close(agentic_reinforce(episodes(make_batch), config)[0], [0, 1.5, 1.5, 0, 3, 0, 2, 0, 4, 0, 3])
