"""Statistics of the actions of demonstrations, as in `dataset_statistics.json` of OpenVLA, which normalize actions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from quintet.data.data_files import write_atomically
from quintet.data.robot_demonstrations.dataset import RobotDataset, iter_episodes

LOW, HIGH = 0.01, 0.99
"""Quantiles that become -1 and 1 of normalized actions."""


def dataset_statistics(datasets: Sequence[RobotDataset]) -> dict[str, Any]:
    """Return the statistics of actions and proprioception over all time steps, without decoding images.

    `mask` is False for dimensions that are not normalized: those with at most two values in [-1, 1], as of a gripper.

    Raises:
        ConfigError: a file is damaged.
    """
    episodes = list(iter_episodes(datasets, with_images=False))
    actions = np.concatenate([episode.actions for episode in episodes])
    states = np.concatenate([episode.observations.state for episode in episodes])
    return {
        "action": _moments(actions) | {"mask": [not is_binary(values) for values in actions.T]},
        "proprio": _moments(states),
        "num_transitions": len(actions),
        "num_trajectories": len(episodes),
    }


def write_statistics(path: Path, statistics: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the statistics of data sets by name.

    Raises:
        MachineError: the file cannot be written.
    """
    write_atomically(path, partial(_write, json.dumps(statistics, indent=2)))


def _write(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def is_binary(values: np.ndarray) -> bool:
    """Return whether a dimension of actions has at most two values, which are in [-1, 1]."""
    return len(np.unique(values[:4096])) <= 2 and len(np.unique(values)) <= 2 and bool(np.abs(values).max() <= 1)


def _moments(rows: np.ndarray) -> dict[str, list[float]]:
    values = rows.astype(np.float64)
    return {
        "mean": values.mean(axis=0).tolist(),
        "std": values.std(axis=0).tolist(),
        "max": values.max(axis=0).tolist(),
        "min": values.min(axis=0).tolist(),
        "q01": np.quantile(values, LOW, axis=0).tolist(),
        "q99": np.quantile(values, HIGH, axis=0).tolist(),
    }
