"""LeRobot data sets of the versions 2.0, 2.1 and 3.0.

    meta/info.json       features, and templates of file names
    2.x                  meta/episodes.jsonl, meta/tasks.jsonl; a Parquet file and videos per episode
    3.0                  meta/episodes/*/*.parquet, meta/tasks.parquet; episodes share Parquet files and videos

Images are PNG or JPEG files in Parquet columns, or frames of videos.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from quintet import hardware
from quintet.arrow_values import checked
from quintet.data.robot_demonstrations.dataset import (
    FeatureNames,
    InvalidDatasetError,
    RobotDemonstration,
    check_size,
    finite_rows,
    reading,
    select_cameras,
    select_state,
)
from quintet.data.robot_demonstrations.frames import decode_frame, stack_cameras, stack_frames
from quintet.data.row_images import MAX_FILE_PIXELS
from quintet.embodied_records import RobotObservation

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

INFO_FILE: Final = "meta/info.json"
ACTION: Final = "action"
EPISODE_INDEX, TASK_INDEX = "episode_index", "task_index"
VERSIONS: Final = ("v2.0", "v2.1", "v3.0")
PANDAS_INDEX: Final = "__index_level_0__"
"""Column of `tasks.parquet` with the texts."""
_VARIABLE: Final = re.compile(r"\{(\w+)(?::0?(\d{1,2})d)?\}")


class Feature(BaseModel):
    """A feature of `meta/info.json`."""

    model_config = ConfigDict(extra="ignore")

    dtype: str
    shape: tuple[PositiveInt, ...]

    @property
    def is_image(self) -> bool:
        """Whether it is an image, in a column or a video."""
        return self.dtype in ("image", "video") and len(self.shape) == 3

    @property
    def resolution(self) -> tuple[int, int]:
        """Height and width; data sets of version 2.0 may have the channels first."""
        return self.shape[1:] if self.shape[0] == 3 and self.shape[2] != 3 else self.shape[:2]  # type: ignore[return-value]


class Info(BaseModel):
    """`meta/info.json`."""

    model_config = ConfigDict(extra="ignore")

    codebase_version: str
    fps: PositiveFloat
    chunks_size: PositiveInt = 1000
    data_path: str
    video_path: str | None = None
    features: dict[str, Feature]
    total_episodes: NonNegativeInt


class _Line(BaseModel):
    model_config = ConfigDict(extra="ignore")


LineT = TypeVar("LineT", bound=_Line)


class _EpisodeLine(_Line):
    episode_index: NonNegativeInt
    length: NonNegativeInt


class _TaskLine(_Line):
    task_index: NonNegativeInt
    task: str


@dataclass(frozen=True, slots=True)
class _Episode:
    """An episode and the places of its data."""

    index: int
    length: int
    values: Mapping[str, Any]
    """Variables of the templates of its files, and with version 3.0 the columns of its row."""


class LeRobotDataset:
    """The episodes of a data set; see `RobotDataset`."""

    def __init__(self, directory: Path, key: str, names: FeatureNames) -> None:
        """
        Raises:
            ConfigError: a file is missing or damaged, or a feature does not exist.
        """
        self._directory, self._key = directory, key
        self.name = directory.resolve().name
        with reading(directory / INFO_FILE, key):
            self._info = read_info((directory / INFO_FILE).read_bytes())
            features = self._info.features
            images = [name for name, feature in features.items() if feature.is_image]
            numbers = [name for name, feature in features.items() if feature.dtype.startswith(("float", "int"))]
            self.cameras = select_cameras(images, names.cameras)
            self._state = select_state([name for name in numbers if name.startswith("observation.")], names.state)
            if ACTION not in numbers:
                raise InvalidDatasetError(f"there is no feature {ACTION!r} of numbers")
            self.action_dim = prod(features[ACTION].shape)
        is_v3 = self._info.codebase_version == "v3.0"
        self._episodes = self._read_episodes_v3() if is_v3 else self._read_episodes_v2()
        self._tasks = self._read_tasks_v3() if is_v3 else self._read_tasks_v2()
        self.lengths = tuple(episode.length for episode in self._episodes)
        # the rows of several episodes are in one file, which is not to be read again for each of them
        self._first_rows = lru_cache(maxsize=64)(self._find_rows)

    def episode(self, index: int, *, with_images: bool = True) -> RobotDemonstration:
        episode, features = self._episodes[index], self._info.features
        columns = [name for name in self.cameras if with_images and features[name].dtype == "image"]
        numbers = [ACTION, *([self._state] if self._state else []), TASK_INDEX]
        path = self._path(self._info.data_path, episode)
        with reading(path, self._key):
            first = self._first_rows(path).get(episode.index)
            rows = read_rows(path, [*numbers, *columns], first, episode.length, f"episode {episode.index}")
            actions = self._numbers(rows, ACTION, first)
            state = np.zeros((episode.length, 0), dtype=np.float32)
            if self._state:
                state = self._numbers(rows, self._state, first)
            instructions = self._instructions(rows[TASK_INDEX], first)
            images = {name: self._images(rows[name], name, first) for name in columns}
        if with_images:
            images |= {name: self._video(name, episode) for name in self.cameras if name not in images}
        with reading(path, self._key):
            frames = stack_cameras([images[name] for name in self.cameras if name in images], episode.length)
        return RobotDemonstration(RobotObservation(frames, state, instructions), actions)

    def _numbers(self, rows: Mapping[str, list[Any]], name: str, first: int | None) -> np.ndarray:
        width = prod(self._info.features[name].shape)
        location = f"column {name}, rows from {first}"
        try:
            values = np.asarray(rows[name], dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise InvalidDatasetError("the rows have different lengths, or contain no numbers", location) from error
        if values.size != len(rows[name]) * width:
            raise InvalidDatasetError(f"a row has {values.size // max(1, len(values))} numbers, not {width}", location)
        return finite_rows(values, width, location)

    def _instructions(self, indices: Sequence[Any], first: int | None) -> tuple[str, ...]:
        for row, index in enumerate(indices, first or 0):
            if index not in self._tasks:
                problem = f"{TASK_INDEX} {index} is not in the tasks of the data set"
                raise InvalidDatasetError(problem, f"row {row}")
        return tuple(self._tasks[index] for index in indices)

    def _images(self, cells: Sequence[Any], name: str, first: int | None) -> np.ndarray:
        frames = []
        for row, cell in enumerate(cells, first or 0):
            location = f"column {name}, row {row}"
            content = cell.get("bytes") if isinstance(cell, dict) else cell
            if not isinstance(content, bytes):
                hint = "write the data set with its images in the Parquet files"
                raise InvalidDatasetError("the cell has no bytes of an image", location, hint)
            frames.append(decode_frame(content, location))
        return stack_frames(frames, self._info.features[name].resolution, f"column {name}, rows from {first}")

    def _video(self, name: str, episode: _Episode) -> np.ndarray:
        values = dict(episode.values) | {"video_key": name}
        start = 0.0
        if self._info.codebase_version == "v3.0":
            values |= {part: values.get(f"videos/{name}/{part}") for part in ("chunk_index", "file_index")}
            start = float(values.get(f"videos/{name}/from_timestamp") or 0.0)
        path = self._path(str(self._info.video_path), _Episode(episode.index, episode.length, values))
        with reading(path, self._key):
            frames = read_video_frames(path, start, self._info.fps, episode.length)
            return stack_frames(list(frames), self._info.features[name].resolution, "the video")

    def _find_rows(self, path: Path) -> dict[int, int]:
        """Return the first row of each episode in a Parquet file."""
        (indices,) = read_table(path, [EPISODE_INDEX]).columns
        episodes, first = np.unique(indices.to_numpy(), return_index=True)
        return dict(zip(episodes.tolist(), first.tolist(), strict=True))

    def _path(self, template: str, episode: _Episode) -> Path:
        with reading(self._directory / INFO_FILE, self._key):
            return self._directory / expand_template(template, episode.values)

    def _image_bytes(self) -> int:
        return sum(3 * prod(self._info.features[name].resolution) for name in self.cameras)

    def _read_episodes_v2(self) -> list[_Episode]:
        path = self._directory / "meta/episodes.jsonl"
        with reading(path, self._key):
            lines = _read_lines(path, _EpisodeLine)
            self._check_episodes([line.episode_index for line in lines], [line.length for line in lines])
        return [
            _Episode(
                line.episode_index,
                line.length,
                {EPISODE_INDEX: line.episode_index, "episode_chunk": line.episode_index // self._info.chunks_size},
            )
            for line in sorted(lines, key=lambda line: line.episode_index)
        ]

    def _read_episodes_v3(self) -> list[_Episode]:
        episodes: list[_Episode] = []
        paths = sorted((self._directory / "meta/episodes").glob("*/*.parquet"))
        for path in paths:
            with reading(path, self._key):
                names = [name for name in column_names(path) if name in (EPISODE_INDEX, "length")]
                names += [name for name in column_names(path) if name.startswith(("data/", "videos/"))]
                for number, row in enumerate(read_table(path, names).to_pylist()):
                    _check_row(row, number)
                    values = row | {part: row.get(f"data/{part}") for part in ("chunk_index", "file_index")}
                    episodes.append(_Episode(row[EPISODE_INDEX], row["length"], values))
        with reading(self._directory / "meta/episodes", self._key):
            self._check_episodes([episode.index for episode in episodes], [episode.length for episode in episodes])
        return sorted(episodes, key=lambda episode: episode.index)

    def _check_episodes(self, indices: Sequence[int], lengths: Sequence[int]) -> None:
        if len(indices) != self._info.total_episodes or len(set(indices)) != len(indices):
            problem = f"it has {len(set(indices))} distinct episodes in {len(indices)} rows"
            raise InvalidDatasetError(f"{problem}, and {INFO_FILE} says {self._info.total_episodes}")
        for index, length in zip(indices, lengths, strict=True):
            check_size(length, self._image_bytes(), f"episode {index}")

    def _read_tasks_v2(self) -> dict[int, str]:
        path = self._directory / "meta/tasks.jsonl"
        with reading(path, self._key):
            return {line.task_index: line.task for line in _read_lines(path, _TaskLine)}

    def _read_tasks_v3(self) -> dict[int, str]:
        path = self._directory / "meta/tasks.parquet"
        with reading(path, self._key):
            name = next((name for name in ("task", PANDAS_INDEX) if name in column_names(path)), TASK_INDEX)
            indices, texts = read_table(path, [TASK_INDEX, name]).columns
            return dict(zip(indices.to_pylist(), map(str, texts.to_pylist()), strict=True))


def read_info(data: bytes) -> Info:
    """Return the content of `meta/info.json`.

    Raises:
        InvalidDatasetError: it is malformed, or has another version.
    """
    try:
        info = Info.model_validate_json(data)
    except ValidationError as error:
        details = error.errors()[0]
        raise InvalidDatasetError(details["msg"], ".".join(map(str, details["loc"]))) from error
    if info.codebase_version not in VERSIONS:
        hint = f"convert it with LeRobot to one of {', '.join(VERSIONS)}"
        raise InvalidDatasetError(f"codebase_version {info.codebase_version!r} is not read", hint=hint)
    return info


def expand_template(template: str, values: Mapping[str, Any]) -> Path:
    """Return a relative path such as `data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet` with values.

    Raises:
        InvalidDatasetError: a variable has no value, or the path leads out of the data set.
    """

    def replace(match: re.Match[str]) -> str:
        value = values.get(match[1])
        if not isinstance(value, int | str):
            raise InvalidDatasetError(f"the template {template!r} has the variable {match[1]!r} without a value")
        return str(value).zfill(int(match[2] or 0))

    path = PurePosixPath(_VARIABLE.sub(replace, template))
    if path.is_absolute() or ".." in path.parts:
        raise InvalidDatasetError(f"the template {template!r} leads out of the data set")
    return Path(path)


def _read_lines(path: Path, kind: type[LineT]) -> list[LineT]:
    lines = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                lines.append(kind.model_validate(json.loads(line)))
            except (ValueError, RecursionError) as error:
                first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
                raise InvalidDatasetError(str(first), f"line {number}") from error
    return lines


def _check_row(row: Mapping[str, Any], number: int) -> None:
    for name in (EPISODE_INDEX, "length"):
        if not isinstance(row.get(name), int) or row[name] < 0:
            raise InvalidDatasetError(f"{name} is {row.get(name)!r}, not a count", f"row {number}")


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.stat()  # pyarrow's message about a missing file has its name twice
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InvalidDatasetError(f"it is not a readable Parquet file: {error}") from error


def column_names(path: Path) -> list[str]:
    """Return the names of the columns of a file."""
    with _opened(path) as file:
        return list(file.schema_arrow.names)


def read_table(path: Path, columns: Sequence[str]) -> pa.Table:
    """Return some columns of a file.

    Raises:
        InvalidDatasetError: the file is damaged, or lacks one.
    """
    with _opened(path) as file:
        _check_columns(file, columns)
        return checked(file.read(columns=list(columns)))


def read_rows(path: Path, columns: Sequence[str], first: int | None, count: int, name: str) -> Mapping[str, list[Any]]:
    """Return the cells of `count` rows from `first`, by column; only their row groups are read.

    Raises:
        InvalidDatasetError: the file is damaged, or has fewer rows of what `name` says.
    """
    with _opened(path) as file:
        _check_columns(file, columns)
        if first is None or first + count > file.metadata.num_rows:
            available = 0 if first is None else file.metadata.num_rows - first
            raise InvalidDatasetError(f"{name} has {count} rows, and the file {available}")
        groups = []
        skipped = 0
        end = 0
        for number in range(file.metadata.num_row_groups):
            size = file.metadata.row_group(number).num_rows
            if end + size <= first:
                skipped += size
            elif end < first + count:
                groups.append(number)
            end += size
        table = checked(file.read_row_groups(groups, columns=list(columns))).slice(first - skipped, count)
        return {column: table.column(column).to_pylist() for column in columns}


def _check_columns(file: pq.ParquetFile, columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in file.schema_arrow.names]
    if missing:
        raise InvalidDatasetError(f"it has no column {missing[0]!r}")


EXTRA: Final = "video"
"""Extra of this distribution with PyAV."""


def read_video_frames(path: Path, start: float, frequency: float, count: int) -> np.ndarray:
    """Return `count` frames from the time `start` in seconds on, at `frequency` frames per second, RGB uint8
    [T, height, width, 3].

    Raises:
        InvalidDatasetError: the video is damaged, has frames at other times, or PyAV is not installed.
    """
    if not hardware.is_installed("av"):
        command = hardware.install_command(hardware.extra_packages(EXTRA))
        raise InvalidDatasetError("videos are decoded by PyAV, which is not installed", hint=command)
    import av

    path.stat()
    try:
        with av.open(str(path), format="mp4") as container:
            return _select(_decode(container, start, frequency), start, frequency, count)
    except (av.FFmpegError, IndexError, ValueError) as error:
        raise InvalidDatasetError(f"the video cannot be decoded: {error}") from error


def _decode(container: Any, start: float, frequency: float) -> Iterator[tuple[float, np.ndarray]]:
    """Yield times and frames, from the last key frame before `start` on."""
    stream = container.streams.video[0]
    if stream.width * stream.height > MAX_FILE_PIXELS:
        raise ValueError(f"{stream.width} × {stream.height} pixels, more than {MAX_FILE_PIXELS:,}")
    container.seek(max(0, int((start - 0.5 / frequency) / stream.time_base)), stream=stream)
    for frame in container.decode(stream):
        if frame.time is not None and frame.time > start - 0.5 / frequency:
            yield frame.time, frame.to_ndarray(format="rgb24")


def _select(frames: Iterator[tuple[float, np.ndarray]], start: float, frequency: float, count: int) -> np.ndarray:
    """Return the frames, each of which must be within half a period of its time."""
    selected: list[np.ndarray] = []
    while len(selected) < count:
        expected = start + len(selected) / frequency
        time, frame = next(frames, (None, None))
        if time is None or frame is None or abs(time - expected) > 0.5 / frequency:
            state = "the video ends" if time is None else f"the next frame is at {time:.3f} s"
            raise InvalidDatasetError(f"there is no frame at {expected:.3f} s: {state}", f"frame {len(selected)}")
        selected.append(frame)
    return np.stack(selected) if selected else np.zeros((0, 1, 1, 3), dtype=np.uint8)
