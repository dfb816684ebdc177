"""If these fail, a cloned policy sees some demonstrated actions never, twice, or with another observation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from robot_datasets import KEY, episode, lerobot

from quintet.data.robot_demonstrations import windows
from quintet.data.robot_demonstrations.dataset import RobotDataset
from quintet.data.robot_demonstrations.expert import RecordedDataset
from quintet.data.robot_demonstrations.windows import ChunkWindows, shift_images
from quintet.errors import ConfigError

LENGTHS = (4, 1, 6, 3)


@pytest.fixture
def dataset(tmp_path: Path) -> RobotDataset:
    return lerobot(tmp_path, [episode(length, number) for number, length in enumerate(LENGTHS)])


def starts(chunks: ChunkWindows, number: int, size: int) -> list[tuple[float, float]]:
    """Episode and time step of each window of a batch."""
    return [(state[1], state[0]) for state in chunks.batch(number, size).observations.state.tolist()]


def test_each_pass_has_every_time_step_once(dataset: RobotDataset) -> None:
    chunks = ChunkWindows([dataset], 3, 0, KEY)
    seen = Counter(start for number in range(4) for start in starts(chunks, number, 7))
    assert len(chunks) == 14
    assert set(seen.values()) == {2}
    assert len(seen) == 14
    assert starts(chunks, 0, 7) != starts(chunks, 2, 7)


def test_actions_follow_the_observation_and_end_with_the_episode(dataset: RobotDataset) -> None:
    batch = ChunkWindows([dataset], 3, 0, KEY).batch(0, 14)
    for state, actions, mask in zip(batch.observations.state, batch.actions, batch.mask, strict=True):
        number, step, last = int(state[1]), int(state[0]), LENGTHS[int(state[1])] - 1
        steps = [step, step + 1, step + 2]
        np.testing.assert_array_equal(mask, [each <= last for each in steps])
        np.testing.assert_allclose(actions[:, 0], [min(each, last) + 100 * number for each in steps])
    assert batch.observations.instructions[0] in ("task 0", "task 1")


def test_a_batch_does_not_depend_on_those_before(dataset: RobotDataset) -> None:
    one_by_one = ChunkWindows([dataset], 2, 5, KEY)
    expected = [starts(one_by_one, number, 5) for number in range(9)]
    assert starts(ChunkWindows([dataset], 2, 5, KEY), 8, 5) == expected[8]
    assert starts(ChunkWindows([dataset], 2, 6, KEY), 8, 5) != expected[8]


def test_episodes_that_do_not_fit_into_memory_are_read_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 12 episodes is read once per pass, though only some are in memory."""
    monkeypatch.setattr(windows, "MAX_BLOCK_BYTES", 8 * 8 * 3 * 10)
    dataset = lerobot(tmp_path, [episode(5, number) for number in range(12)])
    reads: list[int] = []

    class Counting:
        name, lengths, action_dim, cameras = dataset.name, dataset.lengths, dataset.action_dim, dataset.cameras

        def episode(self, index: int, *, with_images: bool = True) -> object:
            reads.append(index)
            return dataset.episode(index, with_images=with_images)

    chunks = ChunkWindows([Counting()], 2, 0, KEY)  # type: ignore[list-item]
    seen = [start for number in range(10) for start in starts(chunks, number, 6)]
    assert len(set(seen)) == 60
    assert len(reads) <= 13
    assert len(chunks._cache) <= 4


def test_data_sets_of_robots_with_different_actions_are_refused() -> None:
    sets = [RecordedDataset(f"dim {dim}", [episode(3, dim=dim)]) for dim in (2, 3)]
    with pytest.raises(ConfigError, match="actions of different dimensions: dim 2 2, dim 3 3"):
        ChunkWindows(sets, 2, 0, KEY)


def test_the_center_of_a_moved_image_is_a_random_crop() -> None:
    """Columns tell their position; the center crop of 90 % of the area has no column from outside the image."""
    ramp = np.broadcast_to(np.arange(40, dtype=np.uint8)[None, None, None, :, None], (64, 1, 40, 40, 3))
    moved = shift_images(np.ascontiguousarray(ramp), 0.9, np.random.default_rng(0))
    crops = moved[:, 0, 1:39, 1:39, 0]
    assert (np.diff(crops.astype(int), axis=2) == 1).all()
    assert set(crops[:, 0, 0].tolist()) == {0, 1, 2}
