"""If these fail, a run starts from another model, or from other demonstrations and updates, than configured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.config.native.training import WarmStartConfig
from quintet.pipelines.setup import _initial_policy, _solve_episodes, _wins_enough
from quintet.pipelines.warm_start import DemonstrationUpdates, solve_episodes
from quintet.pipelines.warm_start_updates import make_updates
from quintet.records import Batch
from quintet.rollout.episode import Episode


def experiment(*overrides: str) -> Experiment:
    return load_experiment(None, overrides).experiment


def run_of(config: Experiment) -> Any:
    return SimpleNamespace(
        config=config, warm_start_checkpoint=None, progress=SimpleNamespace(note=lambda text: None), directory=None
    )


def test_training_starts_from_the_configured_model(tmp_path: Path) -> None:
    config = experiment(f"policy.path={tmp_path}", "policy.preset=null")
    assert _initial_policy(run_of(config), []) == tmp_path


def test_the_expert_solves_the_configured_number_of_episodes() -> None:
    (solved,) = _solve_episodes(run_of(experiment("warm_start.episodes=3")))
    assert len(solved.episodes) == 3


def test_an_expert_takes_random_actions_with_the_configured_probability() -> None:
    """Episodes are longer than shortest paths if a third of the actions are random."""
    lengths = [
        sum(
            len(episode.turns) for episode in solve_episodes(experiment(f"warm_start.epsilon={epsilon}"), 5)[0].episodes
        )
        for epsilon in (0.0, 0.3)
    ]
    assert lengths[0] < lengths[1]


def test_there_are_as_many_updates_as_configured() -> None:
    numbers: list[int] = []

    def update(number: int, rate: float, weight_decay: float) -> dict[str, float]:
        numbers.append(number)
        return {"grad_norm": 0.0}

    make_updates(update, WarmStartConfig(updates=3), lambda number, metrics: False)
    assert numbers == [1, 2, 3]


def test_an_update_has_the_configured_number_of_turns(make_batch: Any) -> None:
    sizes: list[int] = []

    def update(batch: Batch, *_: object, **__: object) -> dict[str, float]:
        sizes.append(len(batch.lengths))
        return {}

    batch = make_batch([[1]] * 8, [[0.0]] * 8)
    updates = DemonstrationUpdates(SimpleNamespace(update=update), batch, WarmStartConfig(turns_per_update=3), seed=0)  # type: ignore[arg-type]
    for number in (1, 2):
        updates(number, 0.0, 0.0)
    assert sizes == [3, 3]


@pytest.mark.parametrize(("success", "ends"), [(0.25, True), (0.75, False)])
def test_the_warm_start_ends_if_the_policy_succeeds_often_enough_in_an_update_that_is_checked(
    success: float, *, ends: bool
) -> None:
    """Half of the episodes succeed; the check is every third update."""

    def collect_rollouts(episodes: Sequence[Episode], _: object) -> list[Any]:
        return [SimpleNamespace(success=number % 2 == 0) for number in range(len(episodes))]

    components: Any = SimpleNamespace(
        config=experiment(),
        weight_sync=SimpleNamespace(sync=lambda step: None),
        start_states=SimpleNamespace(warm_start_check_starts=range),
        envs=SimpleNamespace(collect_rollouts=collect_rollouts),
    )
    config = WarmStartConfig(until_success=success, check_every_updates=3)
    assert [_wins_enough(components, config, update) for update in (2, 3, 4, 6)] == [False, ends, False, ends]
