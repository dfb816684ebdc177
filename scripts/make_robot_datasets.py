"""Make tests/unit/data/robot_demonstrations/golden with the frameworks whose formats Quintet reads.

    python -m venv rlds && rlds/bin/pip install tensorflow-cpu==2.21.0 tensorflow-datasets==4.9.10 importlib_resources
    rlds/bin/python scripts/make_robot_datasets.py rlds DIRECTORY
    python -m venv v21 && v21/bin/pip install lerobot==0.3.3
    v21/bin/python scripts/make_robot_datasets.py lerobot DIRECTORY/lerobot_v21
    v21/bin/python scripts/make_robot_datasets.py lerobot DIRECTORY/lerobot_v21_video --video
    python -m venv v30 && v30/bin/pip install lerobot==0.4.4
    v30/bin/python scripts/make_robot_datasets.py lerobot DIRECTORY/lerobot_v30_video --video

Three episodes of 5, 3 and 4 steps, whose content tests/support/golden_episodes.py computes again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))
from golden_episodes import LENGTHS, action, instruction, pixels, state


def make_rlds(directory: Path) -> None:
    """Write the data set as in the modified LIBERO data sets of OpenVLA."""
    import numpy as np
    import tensorflow_datasets as tfds

    features = tfds.features
    scalars = {name: features.Scalar(dtype=np.float32) for name in ("discount", "reward")}
    scalars |= {name: features.Scalar(dtype=np.bool_) for name in ("is_first", "is_last", "is_terminal")}
    steps = {
        "observation": {
            "image": features.Image(shape=(16, 16, 3), dtype=np.uint8, encoding_format="png"),
            "wrist_image": features.Image(shape=(16, 16, 3), dtype=np.uint8, encoding_format="jpeg"),
            "state": features.Tensor(shape=(8,), dtype=np.float32),
        },
        "action": features.Tensor(shape=(7,), dtype=np.float32),
        "language_instruction": features.Text(),
        **scalars,
    }
    metadata = {"file_path": features.Text()}

    def examples() -> Any:
        for episode, length in enumerate(LENGTHS):
            rows = [
                {
                    "observation": {
                        "image": pixels(episode, step, 0),
                        "wrist_image": pixels(episode, step, 1),
                        "state": state(step),
                    },
                    "action": action(episode, step),
                    "language_instruction": instruction(episode),
                    "discount": 1.0,
                    "reward": float(step == length - 1),
                    "is_first": step == 0,
                    "is_last": step == length - 1,
                    "is_terminal": step == length - 1,
                }
                for step in range(length)
            ]
            yield episode, {"steps": rows, "episode_metadata": {"file_path": f"{episode}.hdf5"}}

    tfds.dataset_builders.store_as_tfds_dataset(
        name="arm_reach",
        version="1.0.0",
        data_dir=directory,
        features=features.FeaturesDict({"steps": features.Dataset(steps), "episode_metadata": metadata}),
        split_datasets={"train": list(examples())},
    )
    shutil.move(directory / "arm_reach/1.0.0", directory / "rlds")
    shutil.rmtree(directory / "arm_reach")


def make_lerobot(directory: Path, *, video: bool) -> None:
    """Write the data set with the installed version of LeRobot."""
    from lerobot.datasets.lerobot_dataset import CODEBASE_VERSION, LeRobotDataset

    size = 64 if video else 16
    kind = {"dtype": "video" if video else "image", "shape": (size, size, 3), "names": ["height", "width", "channels"]}
    cameras = [f"observation.images.{name}" for name in ("front", "wrist")]
    features = dict.fromkeys(cameras, kind) | {
        "observation.state": {"dtype": "float32", "shape": (8,), "names": None},
        "action": {"dtype": "float32", "shape": (7,), "names": None},
    }
    dataset = LeRobotDataset.create(
        "local/arm", fps=10, features=features, root=directory, robot_type="arm", use_videos=video
    )
    for episode, length in enumerate(LENGTHS):
        for step in range(length):
            frame: dict[str, Any] = {"observation.state": state(step), "action": action(episode, step)}
            frame |= {name: pixels(episode, step, camera, size) for camera, name in enumerate(cameras)}
            if CODEBASE_VERSION == "v3.0":
                dataset.add_frame(frame | {"task": instruction(episode)})
            else:
                dataset.add_frame(frame, task=instruction(episode))
        dataset.save_episode()
    if hasattr(dataset, "finalize"):
        dataset.finalize()
    shutil.rmtree(directory / "images", ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("rlds", "lerobot"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--video", action="store_true")
    arguments = parser.parse_args()
    if arguments.kind == "rlds":
        make_rlds(arguments.directory)
    else:
        make_lerobot(arguments.directory, video=arguments.video)


if __name__ == "__main__":
    main()
