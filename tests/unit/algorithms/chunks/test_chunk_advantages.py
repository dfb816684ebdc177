"""If these fail, robots learn from the wrong episodes: numbers computed by hand, and what RLinf gets wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from quintet.algorithms.chunks.advantages import ESTIMATORS, add_chunk_advantages
from quintet.config.native.advantages import ADVANTAGES
from quintet.config.native.experiment import Experiment
from quintet.embodied_records import ChunkBatch
from support.chunk_masks import mask_after_end


def experiment(**algorithm: Any) -> Experiment:
    return Experiment.model_validate({"algorithm": {"reward_level": "chunk", **algorithm}})


def rollout(rewards: Any, dones: Any, group: list[int], *, auto_reset: bool = False, **changes: Any) -> ChunkBatch:
    """`rewards` and `dones`, [T, B, C]."""
    ended = torch.tensor(dones, dtype=torch.bool)
    shape = ended.shape
    return ChunkBatch(
        inputs={},
        actions=torch.zeros(*shape, 1),
        logprobs=torch.zeros(*shape, 1),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        dones=ended,
        loss_mask=torch.ones_like(ended) if auto_reset else mask_after_end(ended),
        group=torch.tensor(group).expand(shape[:2]),
        **changes,
    )


def values(*rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def advantages_of(batch: ChunkBatch, **algorithm: Any) -> torch.Tensor:
    result = add_chunk_advantages(batch, experiment(**algorithm))[0].advantages
    assert result is not None
    return result


def test_gae_over_actions_stops_at_the_end_of_the_episode_and_continues_over_chunks() -> None:
    batch = rollout(
        [[[1.0, 0.0]], [[2.0, 0.0]]],
        [[[False, False]], [[True, False]]],
        [0],
        values=values([[0.5, 1.0]], [[2.0, 7.0]]),
        last_values=values([9.0, 9.0]),
    )
    advantages = advantages_of(
        batch, advantage={"name": "gae", "gamma": 0.5, "lam": 0.5, "whiten": False}, reward_level="action"
    )
    third = 2.0 - 2.0
    second = 0.0 + 0.5 * 2.0 - 1.0 + 0.25 * third
    first = 1.0 + 0.5 * 1.0 - 0.5 + 0.25 * second
    assert advantages.flatten().tolist() == [first, second, third, 0.0]


@pytest.mark.parametrize(("bootstrap", "expected"), [("truncated", [1.0, 6.0]), ("done", [1.0 + 4.0, 6.0])])
def test_the_last_reward_of_an_ended_episode_gets_the_value_of_its_last_observation(
    bootstrap: str, expected: list[float]
) -> None:
    """Both robots end in the first chunk, the second one because of the step limit."""
    dones = [[[False, True], [False, True]], [[False, False], [False, False]]]
    batch = rollout(
        [[[0.0, 1.0], [1.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]],
        dones,
        [0, 1],
        auto_reset=True,
        truncated=torch.tensor([[[False, False], [False, True]], [[False, False], [False, False]]]),
        final_values=values([[8.0], [8.0]], [[0.0], [0.0]]),
        values=torch.zeros(2, 2, 1, dtype=torch.float64),
        last_values=torch.zeros(2, 1, dtype=torch.float64),
    )
    advantages = advantages_of(
        batch, advantage={"name": "gae", "gamma": 0.5, "lam": 1.0, "whiten": False}, bootstrap=bootstrap
    )
    assert advantages[0].flatten().tolist() == expected


def test_grpo_compares_the_returns_of_a_group() -> None:
    """Rewards after the end of an episode do not count, also within its last chunk (RLinf adds those)."""
    dones = [[[True, False], [False, False], [False, False], [False, False]]]
    batch = rollout([[[1.0, 50.0], [0.0, 3.0], [5.0, 0.0], [0.0, 5.0]]], dones, [0, 0, 1, 1])
    advantages = advantages_of(batch, advantage={"name": "grpo"}, drop_groups_without_signal=False)
    expected = 1.0 / (2.0**0.5 + 1e-6)
    torch.testing.assert_close(advantages.flatten(), values(-expected, expected, 0.0, 0.0))


def test_groups_with_equal_returns_are_left_out_of_the_update() -> None:
    batch = rollout([[[1.0], [0.0], [5.0], [5.0]]], [[[True]] * 4], [0, 0, 1, 1])
    result, metrics = add_chunk_advantages(batch, experiment())
    assert result.loss_mask.flatten().tolist() == [True, True, False, False]
    assert metrics["training/groups_with_signal"] == 0.5


def test_grpo_compares_each_episode_of_a_robot_with_automatic_resets() -> None:
    """The last episode of the first robot is cut off: it enters no mean and gets no advantage. RLinf compares the first
    episodes only, and applies the result to later ones."""
    dones = [[[True], [False]], [[True], [True]], [[False], [True]]]
    batch = rollout([[[1.0], [0.0]], [[3.0], [1.0]], [[9.0], [3.0]]], dones, [0, 0], auto_reset=True)
    advantages = advantages_of(batch, advantage={"name": "grpo", "normalize_by_std": False})
    # episodes: 1, 3 and the rest of the first robot; 0 + 1 and 3 of the second
    torch.testing.assert_close(advantages.squeeze(-1), values([-1.0, -1.0], [1.0, -1.0], [0.0, 1.0]))


def test_raw_and_reinforce_variants_follow_the_end_of_episodes() -> None:
    dones = [[[False], [True]], [[True], [False]]]
    batch = rollout([[[1.0], [4.0]], [[2.0], [0.0]]], dones, [0, 0])
    raw = advantages_of(batch, advantage={"name": "raw"})
    assert raw.flatten().tolist() == [3.0, 4.0, 3.0, 0.0]
    returns = advantages_of(batch, advantage={"name": "reinforce", "gamma": 0.5})
    assert returns.flatten().tolist() == [2.0, 4.0, 2.0, 0.0]
    whitened = advantages_of(batch, advantage={"name": "reinforce_plus_plus", "gamma": 0.5})
    selected = torch.tensor([2.0, 4.0, 2.0], dtype=torch.float64)
    expected = (selected - selected.mean()) / (selected.std() + 1e-5)
    torch.testing.assert_close(whitened.flatten(), torch.cat([expected, torch.zeros(1, dtype=torch.float64)]))
    baseline = advantages_of(batch, advantage={"name": "reinforce_plus_plus_baseline", "whiten": False})
    assert baseline.flatten().tolist() == [-0.5, 0.5, -0.5, 0.0]


def test_advantages_are_whitened_only_if_asked_for() -> None:
    """RLinf's `gae` always whitens in embodied runs."""
    batch = rollout(
        [[[1.0], [4.0]]], [[[True], [True]]], [0, 1], values=values([[0.0], [1.0]]), last_values=values([0.0], [0.0])
    )
    assert advantages_of(batch, advantage={"name": "gae", "whiten": False}).flatten().tolist() == [1.0, 3.0]
    whitened = advantages_of(batch, advantage={"name": "gae"})
    torch.testing.assert_close(whitened.flatten(), values(-1.0, 1.0) / (2.0**0.5 + 1e-5))


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ({"min_mean": 0.4}, [False, True, True]),
        ({"max_mean": 0.9}, [True, True, False]),
        ({"min_mean": 2.0}, [False] * 3),
    ],
)
def test_groups_with_a_mean_return_out_of_bounds_are_masked_out(bounds: dict[str, float], kept: list[bool]) -> None:
    rewards = [[[0.0], [0.5], [0.0], [1.0], [1.0], [1.0]]]
    batch = rollout(rewards, [[[True]] * 6], [0, 0, 1, 1, 2, 2])
    config = experiment(filter=bounds, advantage={"name": "raw"})
    result, metrics = add_chunk_advantages(batch, config)
    assert result.loss_mask.flatten().tolist() == [mask for mask in kept for _ in range(2)]
    assert metrics["training/groups_kept"] == pytest.approx(sum(kept) / 3)
    assert result.advantages is not None
    assert not result.advantages[~result.loss_mask].any()


def test_episodes_have_the_same_weight_also_if_others_are_left_out() -> None:
    """RLinf divides by the robots of the rollout, also by those of groups that its filter leaves out."""
    dones = [[[True], [False], [True]], [[False], [True], [True]]]
    batch = rollout([[[1.0], [0.0], [9.0]], [[0.0], [0.0], [0.0]]], dones, [0, 1, 2])
    config = experiment(filter={"max_mean": 5.0}, advantage={"name": "raw"}, aggregation="seq-mean-token-mean")
    result, _ = add_chunk_advantages(batch, config)
    assert result.loss_weights is not None
    torch.testing.assert_close(result.loss_weights.squeeze(-1), values([3.0, 1.5, 0.0], [0.0, 1.5, 0.0]))


def test_a_failed_robot_enters_no_statistics() -> None:
    batch = rollout([[[1.0], [0.0], [0.0]]], [[[True], [True], [False]]], [0, 0, 0])
    batch.loss_mask[:, 2] = False
    advantages = advantages_of(batch, advantage={"name": "grpo", "normalize_by_std": False})
    assert advantages.flatten().tolist() == [0.5, -0.5, 0.0]


def test_a_rollout_in_which_every_robot_failed_gives_no_advantages() -> None:
    batch = rollout([[[0.0], [0.0]]], [[[False], [False]]], [0, 0])
    batch.loss_mask[:] = False
    result, metrics = add_chunk_advantages(batch, experiment(aggregation="seq-mean-token-mean"))
    assert not result.loss_mask.any()
    assert result.loss_weights is not None
    assert not result.loss_weights.any()
    assert metrics["critic/rewards/mean"] == 0.0


def test_metrics_are_over_trained_steps_only() -> None:
    """RLinf's include the steps after the end of an episode."""
    dones = [[[True], [False]], [[False], [True]]]
    batch = rollout(
        [[[1.0], [0.0]], [[0.0], [3.0]]],
        dones,
        [0, 1],
        values=values([[1.0], [3.0]], [[70.0], [3.0]]),
        last_values=values([0.0], [0.0]),
    )
    _, metrics = add_chunk_advantages(
        batch, experiment(advantage={"name": "gae", "gamma": 1.0, "lam": 1.0, "whiten": False})
    )
    assert metrics["critic/advantages/mean"] == metrics["critic/advantages/max"] == 0.0
    assert metrics["critic/values/mean"] == metrics["critic/returns/mean"] == pytest.approx(7.0 / 3.0)
    assert metrics["critic/rewards/mean"] == 2.0
    assert metrics["critic/vf_explained_var"] == pytest.approx(1.0)


def test_configurations_declare_which_estimators_are_defined_for_chunks() -> None:
    declared = {entry.name for entry in ADVANTAGES if getattr(entry.config, "supports_chunks", False)}
    assert declared == set(ESTIMATORS)


def test_an_estimator_that_is_not_defined_for_chunks_is_refused_by_name() -> None:
    batch = rollout([[[1.0], [0.0]]], [[[True], [True]]], [0, 0])
    with pytest.raises(ValueError, match="gigpo is not defined for chunks of actions, but gae, grpo"):
        add_chunk_advantages(batch, experiment(advantage={"name": "gigpo"}))


def test_gae_without_values_is_an_error() -> None:
    batch = rollout([[[1.0]]], [[[True]]], [0])
    with pytest.raises(ValueError, match="value head"):
        add_chunk_advantages(batch, experiment(advantage={"name": "gae"}))


@pytest.mark.parametrize("level", ["chunk", "action"])
@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus_baseline"])
def test_robots_with_the_same_rewards_in_another_order_have_advantages_of_exactly_0(name: str, level: str) -> None:
    """Also if the rewards of a chunk are added up first, and an equal total has other rewards."""
    rewards = [[[-0.1, 1.0], [-0.1, -0.1], [0.3, 0.0], [0.0, 1.0]], [[-0.1, -0.1], [1.0, -0.1], [0.4, 0.0], [0.0, 0.0]]]
    dones = [[[False, False]] * 4, [[False, True]] * 4]
    batch = rollout(rewards, dones, [0, 0, 0, 1])
    for whiten in (False, True):
        advantage = {"name": name, "whiten": whiten}
        result, metrics = add_chunk_advantages(
            replace(batch, rewards=batch.rewards.float()), experiment(advantage=advantage, reward_level=level)
        )
        assert metrics["training/groups_with_signal"] == 0.5
        if not whiten:
            assert result.advantages is not None
            assert not bool(result.advantages[:, :3].any())


def test_whitened_equal_returns_are_exactly_0() -> None:
    batch = rollout([[[0.1]] * 7], [[[True]] * 7], list(range(7)))
    batch = replace(batch, rewards=batch.rewards.float())
    advantages = advantages_of(batch, advantage={"name": "raw", "whiten": True}, drop_groups_without_signal=False)
    assert not bool(advantages.any())


def test_whitening_compares_the_returns_of_different_groups_up_to_rounding() -> None:
    batch = rollout([[[0.4, -0.3]] * 3 + [[0.1, 0.0]] * 4], [[[False, True]] * 7], list(range(7)))
    batch = replace(batch, rewards=batch.rewards.float())
    advantages = advantages_of(batch, advantage={"name": "raw", "whiten": True}, drop_groups_without_signal=False)
    assert not bool(advantages.any())
