"""If these fail, data sets that LeRobot or TensorFlow Datasets have written are read with other content."""

from __future__ import annotations

import numpy as np
import pytest
from golden_episodes import LENGTHS, action, instruction, pixels, state
from robot_datasets import GOLDEN, KEY

from quintet.data.robot_demonstrations.dataset import FeatureNames, iter_episodes
from quintet.data.robot_demonstrations.open_dataset import open_robot_dataset

NAMES = ("rlds", "lerobot_v21", "lerobot_v21_video", "lerobot_v30_video")


@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_instructions_are_those_that_were_written(name: str) -> None:
    dataset = open_robot_dataset(GOLDEN / name, KEY)
    assert dataset.lengths == LENGTHS
    for number, episode in enumerate(iter_episodes([dataset], with_images=False)):
        length = LENGTHS[number]
        np.testing.assert_array_equal(episode.actions, [action(number, step) for step in range(length)])
        np.testing.assert_array_equal(episode.observations.state, [state(step) for step in range(length)])
        assert episode.observations.instructions == (instruction(number),) * length
        assert episode.observations.images.shape[:2] == (length, 0)


@pytest.mark.parametrize(
    ("name", "size", "tolerances"),
    [
        ("rlds", 16, (0, 8)),
        ("lerobot_v21", 16, (0, 0)),
        ("lerobot_v21_video", 64, (8, 8)),
        ("lerobot_v30_video", 64, (8, 8)),
    ],
)
def test_images_are_those_of_their_time_step(name: str, size: int, tolerances: tuple[int, int]) -> None:
    """The wrist images of the RLDS data set are JPEG files, and videos are lossy as well."""
    if name.endswith("video"):
        pytest.importorskip("av")
    steps = [(number, step) for number, length in enumerate(LENGTHS) for step in range(length)]
    episodes = iter_episodes([open_robot_dataset(GOLDEN / name, KEY)])
    images = np.concatenate([episode.observations.images for episode in episodes]).astype(int)
    for camera, tolerance in enumerate(tolerances):
        written = np.stack([pixels(number, step, camera, size) for number, step in steps])
        distances = np.abs(images[:, camera, None] - written[None]).mean(axis=(2, 3, 4))
        assert (distances.argmin(axis=1) == np.arange(len(steps))).all()
        assert np.diagonal(distances).max() <= tolerance


def test_cameras_are_selected_and_ordered_by_name() -> None:
    dataset = open_robot_dataset(GOLDEN / "lerobot_v21", KEY, FeatureNames(cameras=("wrist", "front")))
    images = dataset.episode(1).observations.images
    np.testing.assert_array_equal(images[2], [pixels(1, 2, 1), pixels(1, 2, 0)])


def test_the_newest_version_of_an_rlds_data_set_is_read(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("arm")
    (directory / "1.0.0").symlink_to(GOLDEN / "rlds")
    (directory / "0.9.0").mkdir()
    (directory / "0.9.0/features.json").write_text("{}")
    assert open_robot_dataset(directory, KEY).lengths == LENGTHS
