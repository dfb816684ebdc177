"""If these fail, updates of a step have other episodes, or another order, than configured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest
import torch

from quintet.config.compose import load_experiment
from quintet.pipelines.policy_optimization import _mini_batches
from quintet.records import Batch

OVERRIDES = ("training={groups_per_step: 4, samples_per_group: 2, mini_batches: 2, epochs: 1}", "actor.shuffle=false")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (("training.mini_batches=4",), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (("training.mini_batch_sequences=3",), [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (("training.epochs=2",), [[0, 1, 2, 3], [4, 5, 6, 7]] * 2),
    ],
)
def test_updates_have_the_configured_episodes(
    make_batch: Callable[..., Batch], overrides: tuple[str, ...], expected: list[list[int]]
) -> None:
    assert _episodes(make_batch, *overrides) == expected


def test_the_order_of_episodes_has_its_own_seed(make_batch: Callable[..., Batch]) -> None:
    orders = [_episodes(make_batch, "actor.shuffle=true", *seed) for seed in ((), ("actor.shuffle_seed=7",))]
    assert all(sorted(chain(*order)) == list(range(8)) for order in orders)
    assert orders[0] != orders[1]
    assert orders[1] == _episodes(make_batch, "actor.shuffle=true", "actor.shuffle_seed=7", "seed=3")


def test_the_order_of_episodes_follows_from_the_seed_of_the_run(make_batch: Callable[..., Batch]) -> None:
    overrides = ("actor.shuffle=true", "training.mini_batches=4")
    orders = [_episodes(make_batch, *overrides, f"seed={seed}") for seed in (4, 4, 0)]
    assert orders[0] == orders[1] != orders[2]


def _episodes(make_batch: Callable[..., Batch], *overrides: str) -> list[list[int]]:
    batch = make_batch([[1]] * 8, [[0.0]] * 8, group=[0, 0, 1, 1, 2, 2, 3, 3])
    config = load_experiment(None, [*OVERRIDES, *overrides]).experiment
    parts = [part for part, _ in _mini_batches(config, batch, step=1, first=0)]
    return [torch.unique(part.trajectory).tolist() for part in parts]
