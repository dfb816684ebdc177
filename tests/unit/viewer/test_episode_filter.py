"""If these fail, filters of the viewer show episodes that do not meet them, or hide some that do."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.viewer.conftest import episode, turn

from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.trajectories import write_trajectories
from quintet.viewer.episode_filter import EpisodeFilter, count_facets
from quintet.viewer.trajectory_index import TrajectoryIndex


@pytest.fixture
def index(tmp_path: Path) -> TrajectoryIndex:
    played = [
        episode(0, turn("Straße nach rechts"), solved=True),
        episode(1, turn('say "up"\nthen wait', tokens=9), solved=False),
        episode(2, turn("left", tokens=4), turn("UP", tokens=4), solved=True),
    ]
    write_trajectories(RunDirectory(tmp_path).trajectories("train", 1), 1, "train", played)
    index = TrajectoryIndex(tmp_path)
    index.refresh(10.0)
    return index


@pytest.mark.parametrize(
    ("conditions", "seeds"),
    [
        ({}, [0, 1, 2]),
        ({"success": True}, [0, 2]),
        ({"success": False}, [1]),
        ({"outcome": "terminated"}, [1]),
        ({"env": "sokoban"}, []),
        ({"min_reward": 1.5}, [2]),
        ({"max_reward": 1.0}, [0, 1]),
        ({"min_tokens": 8, "max_tokens": 8}, [2]),
        ({"text": "up"}, [1, 2]),
        ({"text": 'say "UP"\nthen'}, [1]),
        ({"text": "Straße"}, [0]),
        ({"text": "up", "success": True}, [2]),
        ({"sort": "response_tokens", "descending": True}, [1, 2, 0]),
        ({"sort": "seed"}, [0, 1, 2]),
        ({"step": 2}, []),
        ({"seed": 2}, [2]),
    ],
)
def test_filters_and_orders(index: TrajectoryIndex, conditions: dict[str, object], seeds: list[int]) -> None:
    selected = EpisodeFilter(**conditions).apply(index.episodes(), index.file)  # type: ignore[arg-type]
    assert [each.seed for each in selected] == seeds


def test_menus_count_the_episodes_of_each_value(index: TrajectoryIndex) -> None:
    facets = count_facets(index.episodes())
    assert facets["outcome"] == [("success", 2), ("terminated", 1)]
    assert facets["success"] == [(True, 2), (False, 1)]
    assert facets["step"] == [(1, 3)]
    assert facets["failure"] == []
    assert count_facets([])["env"] == []
