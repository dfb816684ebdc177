"""If these fail, demonstrations that Quintet has written are read back with other content, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from robot_datasets import episode, lerobot

from quintet.data.robot_demonstrations.dataset import iter_episodes
from quintet.data.robot_demonstrations.statistics import dataset_statistics
from quintet.data.robot_demonstrations.writer import LeRobotWriter
from quintet.errors import MachineError

EPISODES = [episode(length, number, cameras=2) for number, length in enumerate((4, 1, 6))]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    dataset = lerobot(tmp_path / "set", EPISODES)
    assert dataset.cameras == ("observation.images.camera0", "observation.images.camera1")
    for written, read in zip(EPISODES, iter_episodes([dataset]), strict=True):
        np.testing.assert_array_equal(read.observations.images, written.observations.images)
        np.testing.assert_array_equal(read.observations.state, written.observations.state)
        np.testing.assert_array_equal(read.actions, written.actions)
        assert read.observations.instructions == written.observations.instructions


def test_files_have_what_lerobot_requires(tmp_path: Path) -> None:
    """LeRobot 0.3.3 reads these data sets, and its converter of 0.4.4 makes data sets of version 3.0 of them."""
    lerobot(tmp_path, EPISODES)
    info = json.loads((tmp_path / "meta/info.json").read_text())
    counts = {name: info[f"total_{name}"] for name in ("episodes", "frames", "tasks", "chunks", "videos")}
    assert counts == {"episodes": 3, "frames": 11, "tasks": 2, "chunks": 1, "videos": 0}
    assert info["fps"] == 10
    table = pq.read_table(tmp_path / "data/chunk-000/episode_000002.parquet")
    assert set(table.column_names) == set(info["features"])
    assert table["index"].to_pylist() == list(range(5, 11))
    np.testing.assert_allclose(table["timestamp"].to_pylist(), np.arange(6) / 10)
    hf = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
    assert hf["observation.images.camera1"] == {"_type": "Image"}
    assert hf["action"] == {"feature": {"dtype": "float32", "_type": "Value"}, "length": 2, "_type": "Sequence"}
    lines = (tmp_path / "meta/episodes_stats.jsonl").read_text().splitlines()
    stats = json.loads(lines[2])["stats"]
    assert np.shape(stats["observation.images.camera0"]["mean"]) == (3, 1, 1)
    assert stats["action"]["max"] == pytest.approx(EPISODES[2].actions.max(axis=0))
    assert stats["index"]["count"] == [6]


def test_a_directory_with_files_is_not_overwritten(tmp_path: Path) -> None:
    lerobot(tmp_path, EPISODES)
    with pytest.raises(MachineError, match="is not empty"):
        LeRobotWriter(tmp_path, frames_per_second=10, robot="arm")
    assert lerobot(tmp_path, EPISODES[:1], overwrite=True).lengths == (4,)


def test_episodes_of_one_data_set_have_the_same_cameras(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the same features"):
        lerobot(tmp_path, [EPISODES[0], episode(3, cameras=1)])


def test_statistics_are_those_that_openvla_normalizes_with(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    episodes = [episode(50, number, dim=3) for number in range(2)]
    for each in episodes:
        each.actions[:] = rng.normal(size=(50, 3))
        each.actions[:, 2] = np.sign(each.actions[:, 2])
    statistics = dataset_statistics([lerobot(tmp_path, episodes)])
    actions = np.concatenate([each.actions for each in episodes]).astype(np.float64)
    assert statistics["action"]["q01"] == pytest.approx(np.quantile(actions, 0.01, axis=0))
    assert statistics["action"]["q99"] == pytest.approx(np.quantile(actions, 0.99, axis=0))
    assert statistics["action"]["std"] == pytest.approx(actions.std(axis=0))
    assert statistics["action"]["mask"] == [True, True, False]
    assert statistics["proprio"]["max"] == [49.0, 1.0]
    assert (statistics["num_transitions"], statistics["num_trajectories"]) == (100, 2)
