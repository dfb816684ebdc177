"""Data sets of TensorFlow Datasets in RLDS form: `dataset_info.json`, `features.json` and TFRecord files.

An episode is one example. The features of its steps are stored flat, such as `steps/observation/image`, with the values
of all steps one after another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
from quintet.data.robot_demonstrations.example_proto import Values, parse_example
from quintet.data.robot_demonstrations.frames import decode_frame, stack_cameras, stack_frames
from quintet.data.robot_demonstrations.tfrecord import TfrecordFile
from quintet.embodied_records import RobotObservation

FEATURES_FILE: Final = "features.json"
INFO_FILE: Final = "dataset_info.json"
SPLIT: Final = "train"
STEPS: Final = "steps/"
ACTION: Final = "steps/action"
OBSERVATION: Final = "steps/observation/"
INSTRUCTIONS: Final = (
    "steps/language_instruction",
    "steps/observation/natural_language_instruction",
    "steps/observation/language_instruction",
)
"""Features with the instruction, the first of which is used."""
DEFAULT_TEMPLATE: Final = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
VERSION: Final = re.compile(r"\d+\.\d+\.\d+")
MAX_DEPTH: Final = 16
"""Largest nesting of features."""


@dataclass(frozen=True, slots=True)
class _Feature:
    """A feature of `features.json`."""

    kind: str
    """`image`, `tensor` or `text`."""
    shape: tuple[int, ...] = ()
    encoding: str = "none"
    """Encoding of a tensor."""


class _Split(BaseModel):
    name: str
    filepath_template: str = Field(DEFAULT_TEMPLATE, alias="filepathTemplate")
    shard_lengths: tuple[int, ...] = Field((), alias="shardLengths")


class _Info(BaseModel):
    """`dataset_info.json`, whose integers are texts."""

    model_config = ConfigDict(extra="ignore")

    name: str
    file_format: str = Field("tfrecord", alias="fileFormat")
    splits: tuple[_Split, ...] = ()


def find_rlds_version(directory: Path) -> Path | None:
    """Return the directory of the newest version of a data set, which may be `directory`; None if there is none."""
    if (directory / FEATURES_FILE).is_file():
        return directory
    versions = [path.parent for path in directory.glob(f"*/{FEATURES_FILE}") if VERSION.fullmatch(path.parent.name)]
    return max(versions, key=lambda path: tuple(map(int, path.name.split("."))), default=None)


class RldsDataset:
    """The episodes of the training split; see `RobotDataset`."""

    def __init__(self, directory: Path, key: str, names: FeatureNames) -> None:
        """
        Raises:
            ConfigError: a file is missing or damaged, or a feature does not exist.
        """
        self._key = key
        with reading(directory / FEATURES_FILE, key):
            self._features = _read_features((directory / FEATURES_FILE).read_bytes())
            images = [name for name in self._observations() if self._features[name].kind == "image"]
            numbers = [name for name in self._observations() if self._features[name].kind == "tensor"]
            self.cameras = select_cameras(images, names.cameras)
            self._state = select_state(numbers, names.state)
            self.action_dim = self._width(ACTION)
            self._instruction = next((name for name in INSTRUCTIONS if name in self._features), None)
        with reading(directory / INFO_FILE, key):
            info = _read_info((directory / INFO_FILE).read_bytes())
            split = next((split for split in info.splits if split.name == SPLIT), None)
            if split is None:
                raise InvalidDatasetError(f"there is no split {SPLIT!r}")
        self.name = info.name
        self._records: list[tuple[TfrecordFile, int]] = []
        for path, length in _files(directory, info, split):
            self._records += self._open(path, length)
        self.lengths = tuple(self._length(index) for index in range(len(self._records)))

    def episode(self, index: int, *, with_images: bool = True) -> RobotDemonstration:
        file, number = self._records[index]
        names = [ACTION, *filter(None, (self._state, self._instruction)), *(self.cameras if with_images else ())]
        with reading(file.path, self._key):
            values = _parse(file, number, names, verify=with_images)
            location, length = file.location(number), self.lengths[index]
            images = self._images(values, length, location) if with_images else stack_cameras([], length)
            state = np.zeros((length, 0), dtype=np.float32)
            if self._state is not None:
                state = self._rows(values, self._state, location)
            actions = self._rows(values, ACTION, location)
            if len(state) != length or len(actions) != length:
                raise InvalidDatasetError("its features have different numbers of steps", location)
            return RobotDemonstration(
                RobotObservation(images, state, self._instructions(values, length, location)), actions
            )

    def _observations(self) -> list[str]:
        return [name for name in self._features if name.startswith(OBSERVATION)]

    def _width(self, name: str) -> int:
        """Return the numbers per step of a tensor."""
        feature = self._features.get(name)
        if feature is None or feature.kind != "tensor":
            parts = [each for each in self._features if each.startswith(f"{name}/")]
            problem = f"{name} is not a tensor" + (f", but has the parts {', '.join(parts)}" if parts else "")
            raise InvalidDatasetError(problem, hint="convert the data set, with one tensor of actions per step")
        if feature.encoding != "none":
            raise InvalidDatasetError(
                f"{name} has the encoding {feature.encoding!r}", hint="write the data set without that encoding"
            )
        return prod(feature.shape)

    def _open(self, path: Path, length: int) -> list[tuple[TfrecordFile, int]]:
        with reading(path, self._key):
            file = TfrecordFile(path)
            if len(file) != length:
                raise InvalidDatasetError(f"it has {len(file)} records, and {INFO_FILE} says {length}")
        return [(file, number) for number in range(len(file))]

    def _length(self, index: int) -> int:
        file, number = self._records[index]
        with reading(file.path, self._key):
            values = _parse(file, number, [ACTION], verify=False)
            location = file.location(number)
            length = len(self._rows(values, ACTION, location))
            pixels = sum(prod(self._features[name].shape) for name in self.cameras)
            check_size(length, pixels, location)
        return length

    def _rows(self, values: Mapping[str, Values], name: str, location: str) -> np.ndarray:
        numbers = values.get(name)
        if not isinstance(numbers, np.ndarray):
            raise InvalidDatasetError(f"{name} is missing, or has no numbers", location)
        return finite_rows(numbers, self._width(name), f"{location}, {name}")

    def _images(self, values: Mapping[str, Values], length: int, location: str) -> np.ndarray:
        return stack_cameras([self._frames(values, name, length, location) for name in self.cameras], length)

    def _frames(self, values: Mapping[str, Values], name: str, length: int, location: str) -> np.ndarray:
        files = values.get(name)
        if isinstance(files, np.ndarray) or files is None or len(files) != length:
            count = "none" if files is None else len(files)
            raise InvalidDatasetError(f"it has {length} steps and {count} images {name}", location)
        location = f"{location}, {name}"
        frames = [decode_frame(file, f"{location}, time step {index}") for index, file in enumerate(files)]
        height, width = self._features[name].shape[:2] if all(self._features[name].shape[:2]) else frames[0].shape[:2]
        return stack_frames(frames, (height, width), location)

    def _instructions(self, values: Mapping[str, Values], length: int, location: str) -> tuple[str, ...]:
        if self._instruction is None:
            return ("",) * length
        texts = values.get(self._instruction)
        if isinstance(texts, np.ndarray) or texts is None or len(texts) != length:
            raise InvalidDatasetError(f"{self._instruction} is not a text per step", location)
        try:
            return tuple(bytes(text).decode() for text in texts)
        except UnicodeDecodeError as error:
            raise InvalidDatasetError(f"{self._instruction} is not UTF-8", location) from error


def _parse(file: TfrecordFile, number: int, names: Sequence[str], *, verify: bool) -> Mapping[str, Values]:
    data = file.data(number, verify=verify)
    try:
        return parse_example(data, names)
    except InvalidDatasetError as error:
        raise InvalidDatasetError(error.problem, file.location(number)) from error


def _files(directory: Path, info: _Info, split: _Split) -> Iterator[tuple[Path, int]]:
    """Yield the files of a split, and the number of examples in each."""
    count = len(split.shard_lengths)
    for index, length in enumerate(split.shard_lengths):
        name = split.filepath_template
        values = {"DATASET": info.name, "SPLIT": split.name, "FILEFORMAT": info.file_format}
        values |= {"SHARD_INDEX": f"{index:05d}", "NUM_SHARDS": f"{count:05d}"}
        values |= {"SHARD_X_OF_Y": f"{index:05d}-of-{count:05d}"}
        for variable, value in values.items():
            name = name.replace(f"{{{variable}}}", value)
        yield directory / Path(name).name, length


def _read_info(data: bytes) -> _Info:
    try:
        info = _Info.model_validate_json(data)
    except ValidationError as error:
        details = error.errors()[0]
        raise InvalidDatasetError(details["msg"], ".".join(map(str, details["loc"]))) from error
    if info.file_format != "tfrecord":
        hint = "write it again with file_format=tfrecord"
        raise InvalidDatasetError(f"fileFormat is {info.file_format!r}, which is not read", hint=hint)
    return info


def _read_features(data: bytes) -> dict[str, _Feature]:
    import json

    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidDatasetError(f"it is not valid JSON: {error}") from error
    features = dict(_flatten(tree, "", 0))
    if not any(name.startswith(STEPS) for name in features):
        raise InvalidDatasetError("there are no steps", hint="name a data set in RLDS form, an episode per example")
    return features


def _flatten(node: Any, name: str, depth: int) -> Iterator[tuple[str, _Feature]]:
    """Yield the features below a node under their flat names."""
    if not isinstance(node, dict) or depth > MAX_DEPTH:
        raise InvalidDatasetError("a feature is not an object, or they are nested too deeply", name)
    parts, sequence = node.get("featuresDict"), node.get("sequence")
    if isinstance(parts, dict) and isinstance(parts.get("features"), dict):
        for part, child in parts["features"].items():
            yield from _flatten(child, f"{name}/{part}" if name else part, depth + 1)
    elif isinstance(sequence, dict) and name == STEPS.rstrip("/"):
        yield from _flatten(sequence.get("feature"), name, depth + 1)
    elif isinstance(node.get("image"), dict):
        yield name, _Feature("image", _shape(node["image"], name))
    elif isinstance(node.get("tensor"), dict):
        yield name, _Feature("tensor", _shape(node["tensor"], name), str(node["tensor"].get("encoding", "none")))
    elif "text" in node:
        yield name, _Feature("text")


def _shape(node: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return a shape; unknown dimensions are 0."""
    try:
        dimensions = [int(dimension) for dimension in (node.get("shape") or {}).get("dimensions", ())]
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidDatasetError("the shape is invalid", name) from error
    return tuple(max(0, dimension) for dimension in dimensions)
