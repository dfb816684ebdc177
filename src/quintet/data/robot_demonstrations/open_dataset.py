"""Opening of data sets of robot demonstrations, whose form follows from their files."""

from __future__ import annotations

from pathlib import Path

from quintet.data.robot_demonstrations.dataset import FeatureNames, RobotDataset
from quintet.data.robot_demonstrations.lerobot import INFO_FILE, LeRobotDataset
from quintet.data.robot_demonstrations.rlds import RldsDataset, find_rlds_version
from quintet.errors import ConfigError


def open_robot_dataset(directory: Path, key: str, names: FeatureNames | None = None) -> RobotDataset:
    """Open a LeRobot data set (v2.0, v2.1, v3.0), or one of TensorFlow Datasets in RLDS form; `key` is the
    configuration key that names it.

    Raises:
        ConfigError: the directory has neither form, a file is damaged or missing, or a feature does not exist.
    """
    dataset = _open(directory, key, names or FeatureNames())
    if dataset is not None and any(dataset.lengths):
        return dataset
    problem = "is neither a LeRobot nor an RLDS data set" if dataset is None else "contains no episodes"
    if not directory.is_dir():
        problem = "does not exist"
    hint = f"name a directory with {INFO_FILE} (LeRobot), or with features.json and .tfrecord files (RLDS)"
    raise ConfigError(f"{key}: {directory} {problem}", key=key, value=str(directory), hint=hint)


def _open(directory: Path, key: str, names: FeatureNames) -> RobotDataset | None:
    if (directory / INFO_FILE).is_file():
        return LeRobotDataset(directory, key, names)
    version = find_rlds_version(directory)
    return None if version is None else RldsDataset(version, key, names)
