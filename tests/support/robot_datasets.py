"""Data sets of robot demonstrations for tests, and files in their formats."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quintet.data.robot_demonstrations.dataset import RobotDataset, RobotDemonstration
from quintet.data.robot_demonstrations.open_dataset import open_robot_dataset
from quintet.data.robot_demonstrations.tfrecord import masked_crc32c
from quintet.data.robot_demonstrations.writer import LeRobotWriter
from quintet.embodied_records import RobotObservation
from quintet.envs.service.png import encode_png

KEY = "warm_start.files"
GOLDEN = Path(__file__).parents[1] / "unit/data/robot_demonstrations/golden"


def episode(length: int, number: int = 0, *, size: int = 8, cameras: int = 1, dim: int = 2) -> RobotDemonstration:
    """An episode whose images, states and actions tell their time step."""
    rng = np.random.default_rng(number)
    images = rng.integers(0, 256, (length, cameras, size, size, 3), dtype=np.uint8)
    steps = np.arange(length, dtype=np.float32)[:, None]
    state = np.concatenate([steps, np.full_like(steps, number)], axis=1)
    actions = (steps + np.arange(dim) / 10 + 100 * number).astype(np.float32)
    return RobotDemonstration(RobotObservation(images, state, (f"task {number % 2}",) * length), actions)


def lerobot(directory: Path, episodes: Sequence[RobotDemonstration], *, overwrite: bool = False) -> RobotDataset:
    """Write episodes, and open them."""
    writer = LeRobotWriter(directory, frames_per_second=10.0, robot="arm", overwrite=overwrite)
    for demonstration in episodes:
        writer.write(demonstration)
    writer.close()
    return open_robot_dataset(directory, KEY)


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def message(number: int, content: bytes) -> bytes:
    """A field with a length."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(values: Sequence[Any] | np.ndarray) -> bytes:
    """A `Feature` of byte strings, floats or integers."""
    if isinstance(values[0], bytes):
        return message(1, b"".join(message(1, value) for value in values))
    array = np.asarray(values)
    if array.dtype.kind == "f":
        return message(2, message(1, array.astype("<f4").tobytes()))
    return message(3, message(1, b"".join(varint(int(value)) for value in array.ravel())))


def features(values: Mapping[str, Any]) -> bytes:
    entries = ((name.encode(), feature(value)) for name, value in values.items())
    return b"".join(message(1, message(1, name) + message(2, value)) for name, value in entries)


def example(values: Mapping[str, Any]) -> bytes:
    return message(1, features(values))


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    checksums = struct.pack("<I", masked_crc32c(length)), struct.pack("<I", masked_crc32c(data))
    return length + checksums[0] + data + checksums[1]


def tensor(*shape: int, encoding: str = "none") -> dict[str, Any]:
    return {"tensor": {"dtype": "float32", "encoding": encoding, "shape": {"dimensions": list(map(str, shape))}}}


STEPS: Mapping[str, Any] = {
    "action": tensor(2),
    "observation": {
        "featuresDict": {
            "features": {"image": {"image": {"shape": {"dimensions": ["4", "4", "3"]}}}, "state": tensor(3)}
        }
    },
    "language_instruction": {"text": {}},
}


def steps(length: int) -> dict[str, Any]:
    """The features of an episode."""
    image = encode_png(np.full((4, 4, 3), 7, np.uint8))
    return {
        "steps/action": np.arange(2 * length, dtype=np.float32),
        "steps/observation/image": [image] * length,
        "steps/observation/state": np.ones(3 * length, dtype=np.float32),
        "steps/language_instruction": [b"reach"] * length,
    }


def rlds(
    directory: Path,
    records: Sequence[bytes],
    step_features: Mapping[str, Any] = STEPS,
    info: Mapping[str, Any] | None = None,
) -> Path:
    """Write a data set of one shard, whose file has these records; return that file."""
    directory.mkdir(parents=True, exist_ok=True)
    nested = {"sequence": {"feature": {"featuresDict": {"features": dict(step_features)}}}}
    (directory / "features.json").write_text(json.dumps({"featuresDict": {"features": {"steps": nested}}}))
    split = {"name": "train", "shardLengths": [str(len(records))]}
    content = {"name": "arm", "fileFormat": "tfrecord", "splits": [split], **(info or {})}
    (directory / "dataset_info.json").write_text(json.dumps(content))
    file = directory / "arm-train.tfrecord-00000-of-00001"
    file.write_bytes(b"".join(records))
    return file
