"""Writing of robot demonstrations as a LeRobot data set of version 2.1: Parquet files with PNG images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from quintet.data.data_files import write_atomically
from quintet.data.robot_demonstrations.dataset import RobotDemonstration
from quintet.envs.service.png import encode_png
from quintet.errors import MachineError

if TYPE_CHECKING:
    import pyarrow as pa

CHUNKS_SIZE: Final = 1000
"""Episodes of a directory."""
DATA_PATH: Final = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
INDEX_FEATURES: Final = ("frame_index", "episode_index", "index", "task_index")
STATE, ACTION = "observation.state", "action"
MAX_SAMPLED_FRAMES: Final = 64
"""Frames of an episode from which the statistics of its images are computed."""


class LeRobotWriter:
    """Writes the episodes of one robot. The data set is complete after `close`, which writes `meta/info.json`."""

    def __init__(
        self,
        directory: Path,
        *,
        frames_per_second: float,
        robot: str,
        overwrite: bool = False,
    ) -> None:
        """
        Raises:
            MachineError: the directory has files, and `overwrite` is false.
        """
        if directory.is_dir() and any(directory.iterdir()) and not overwrite:
            raise MachineError(f"{directory} is not empty", "use another directory, or --overwrite to replace it")
        self._directory, self._frequency, self._robot = directory, frames_per_second, robot
        self._features: dict[str, Any] = {}
        self._tasks: dict[str, int] = {}
        self._lines: dict[str, list[Mapping[str, Any]]] = {"episodes": [], "episodes_stats": []}
        self._num_frames = 0

    def write(self, episode: RobotDemonstration) -> None:
        """Write an episode.

        Raises:
            ValueError: it has other cameras or dimensions than the first one.
            MachineError: a file cannot be written.
        """
        import pyarrow.parquet as pq

        features = self._describe(episode)
        if self._features and features != self._features:
            raise ValueError("the episodes of a data set must have the same features")
        self._features = features
        index, count = len(self._lines["episodes"]), len(episode.actions)
        tasks = [self._tasks.setdefault(text, len(self._tasks)) for text in episode.observations.instructions]
        columns = self._columns(episode, index, tasks)
        path = DATA_PATH.format(episode_chunk=index // CHUNKS_SIZE, episode_index=index)
        write_atomically(self._directory / path, partial(pq.write_table, self._table(columns)))
        instructions = list(dict.fromkeys(episode.observations.instructions))
        self._lines["episodes"].append({"episode_index": index, "tasks": instructions, "length": count})
        stats = self._statistics(episode, columns)
        self._lines["episodes_stats"].append({"episode_index": index, "stats": stats})
        self._num_frames += count

    def close(self) -> None:
        """Write the files of `meta/`.

        Raises:
            MachineError: a file cannot be written.
        """
        tasks = [{"task_index": number, "task": task} for task, number in self._tasks.items()]
        lines: Mapping[str, Sequence[Mapping[str, Any]]] = {**self._lines, "tasks": tasks}
        for name, rows in lines.items():
            text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
            write_atomically(self._directory / f"meta/{name}.jsonl", partial(_write_text, text))
        info = json.dumps(self._info(), indent=4, ensure_ascii=False)
        write_atomically(self._directory / "meta/info.json", partial(_write_text, info))

    def _info(self) -> dict[str, Any]:
        episodes = len(self._lines["episodes"])
        return {
            "codebase_version": "v2.1",
            "robot_type": self._robot,
            "total_episodes": episodes,
            "total_frames": self._num_frames,
            "total_tasks": len(self._tasks),
            "total_videos": 0,
            "total_chunks": -(-episodes // CHUNKS_SIZE),
            "chunks_size": CHUNKS_SIZE,
            "fps": int(self._frequency) if float(self._frequency).is_integer() else self._frequency,
            "splits": {"train": f"0:{episodes}"},
            "data_path": DATA_PATH,
            "video_path": None,
            "features": self._features,
        }

    def _describe(self, episode: RobotDemonstration) -> dict[str, Any]:
        """Return `features` of `meta/info.json`."""
        _, cameras, height, width, _ = episode.observations.images.shape
        axes = ["height", "width", "channels"]
        image = {"dtype": "image", "shape": [height, width, 3], "names": axes}
        features: dict[str, Any] = dict.fromkeys(self._cameras(cameras), image)
        for name, values in ((STATE, episode.observations.state), (ACTION, episode.actions)):
            if values.shape[1]:
                features[name] = {"dtype": "float32", "shape": [values.shape[1]], "names": None}
        features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
        return features | {name: {"dtype": "int64", "shape": [1], "names": None} for name in INDEX_FEATURES}

    def _cameras(self, count: int) -> list[str]:
        return [f"observation.images.camera{number}" for number in range(count)]

    def _columns(self, episode: RobotDemonstration, index: int, tasks: Sequence[int]) -> dict[str, np.ndarray]:
        """Return the columns without images."""
        frames = np.arange(len(episode.actions))
        numbers = (frames, np.full_like(frames, index), frames + self._num_frames, np.asarray(tasks))
        columns = {STATE: episode.observations.state, ACTION: episode.actions.astype(np.float32)}
        columns = {name: values for name, values in columns.items() if name in self._features}
        columns["timestamp"] = (frames / self._frequency).astype(np.float32)
        columns |= dict(zip(INDEX_FEATURES, numbers, strict=True))
        images = episode.observations.images
        return {name: images[:, camera] for camera, name in enumerate(self._cameras(images.shape[1]))} | columns

    def _table(self, columns: Mapping[str, np.ndarray]) -> pa.Table:
        """Return a table whose schema Hugging Face's datasets reads back."""
        import pyarrow as pa

        arrays = {name: _arrow_column(values) for name, values in columns.items()}
        features = {"info": {"features": {name: _hf_feature(self._features[name]) for name in arrays}}}
        return pa.table(arrays).replace_schema_metadata({"huggingface": json.dumps(features)})

    def _statistics(self, episode: RobotDemonstration, columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return minimum, maximum, mean and deviation of each feature; of colours from 0 to 1, as [3, 1, 1]."""
        sampled = np.linspace(0, len(episode.actions) - 1, min(len(episode.actions), MAX_SAMPLED_FRAMES)).astype(int)
        stats = {}
        for name, values in columns.items():
            if values.ndim == 4:
                rows = (values[sampled] / 255.0).reshape(-1, 3)
                stats[name] = {key: [[[number]] for number in numbers] for key, numbers in _moments(rows).items()} | {
                    "count": [len(sampled)]
                }
            else:
                stats[name] = _moments(values.reshape(len(values), -1)) | {"count": [len(values)]}
        return stats


def _moments(rows: np.ndarray) -> dict[str, Any]:
    values = rows.astype(np.float64)
    moments = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    return {name: moment.tolist() for name, moment in moments.items()}


def _arrow_column(values: np.ndarray) -> pa.Array:
    import pyarrow as pa

    if values.ndim == 4:
        files = [{"bytes": encode_png(frame), "path": f"frame_{number:06d}.png"} for number, frame in enumerate(values)]
        return pa.array(files, type=pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    if values.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
    return pa.array(values)


def _hf_feature(feature: Mapping[str, Any]) -> dict[str, Any]:
    if feature["dtype"] == "image":
        return {"_type": "Image"}
    value = {"dtype": feature["dtype"], "_type": "Value"}
    (size,) = feature["shape"]
    return value if feature["names"] is None and size == 1 else {"feature": value, "length": size, "_type": "Sequence"}


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")
