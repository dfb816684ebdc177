"""If these fail, pipelined training gives other advantages than training on the whole step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from quintet.algorithms.advantages.custom import estimate
from quintet.config.native.advantages import ADVANTAGE_UNION, AdvantageSection
from quintet.records import Batch
from quintet.training.packing import select_trajectories

CONFIGS = [ADVANTAGE_UNION.config_class(name) for name in ADVANTAGE_UNION.names() if name != "custom"]
INDEPENDENT = [
    config
    for config in CONFIGS
    if issubclass(config, AdvantageSection) and config.compares_within_group and not config.uses_values
]


def batch(make: Callable[..., Batch]) -> Batch:
    """Four groups of three episodes of different rewards and lengths."""
    lengths = [2 + index * 5 % 4 for index in range(12)]
    masks = [[0, *[1] * length] for length in lengths]
    rewards = [[0.0] * length + [float(index * 7 % 5)] for index, length in enumerate(lengths)]
    whole = make(masks, rewards, group=[index // 3 for index in range(12)])
    parts = {"a": torch.arange(12.0, dtype=torch.float64) % 5, "b": torch.arange(12.0, dtype=torch.float64) * 3 % 7}
    return replace(whole, reward_components=parts)


@pytest.mark.parametrize("config", INDEPENDENT, ids=lambda config: config.__name__)
def test_the_advantages_of_a_group_do_not_depend_on_other_groups(
    config: type[AdvantageSection], make_batch: Callable[..., Batch]
) -> None:
    whole, settings = batch(make_batch), config(whiten=False)
    halves = [select_trajectories(whole, whole.group // 2 == half) for half in range(2)]
    advantages = torch.cat([estimate(half, settings)[0] for half in halves])
    torch.testing.assert_close(advantages, estimate(whole, settings)[0])
    assert bool(advantages.any())


def test_common_estimators_are_among_them() -> None:
    assert {"GrpoConfig", "RlooConfig", "OpoConfig", "GdpoConfig"} <= {config.__name__ for config in INDEPENDENT}
