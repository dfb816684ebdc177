"""If these fail, a damaged or hostile data set crashes a run, exhausts its memory, or is read as something else."""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from robot_datasets import GOLDEN, KEY, STEPS, episode, example, feature, lerobot, message, record, rlds, steps, tensor

from quintet import hardware
from quintet.data.robot_demonstrations import dataset as dataset_module
from quintet.data.robot_demonstrations.dataset import FeatureNames, InvalidDatasetError, iter_episodes
from quintet.data.robot_demonstrations.example_proto import parse_example
from quintet.data.robot_demonstrations.frames import decode_frame
from quintet.data.robot_demonstrations.lerobot import expand_template
from quintet.data.robot_demonstrations.open_dataset import open_robot_dataset
from quintet.data.robot_demonstrations.tfrecord import masked_crc32c
from quintet.envs.service.png import encode_png
from quintet.errors import ConfigError

pytestmark = pytest.mark.attack


def read_all(directory: Path) -> None:
    for _ in iter_episodes([open_robot_dataset(directory, KEY)]):
        pass


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ],
)
def test_the_checksum_is_the_masked_one_of_rfc_3720(data: bytes, crc: int) -> None:
    rotated = masked_crc32c(memoryview(data)) - 0xA282EAD8 & 0xFFFFFFFF
    assert (rotated >> 17 | rotated << 15) & 0xFFFFFFFF == crc


def test_every_flipped_byte_of_a_tfrecord_file_is_noticed(tmp_path: Path) -> None:
    file = rlds(tmp_path, [record(example(steps(2))), record(example(steps(1)))])
    read_all(tmp_path)
    content = file.read_bytes()
    for position in range(0, len(content), 7):
        file.write_bytes(content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
        with pytest.raises(ConfigError, match=r"tfrecord-00000-of-00001, record \d+ at byte [\d,]+: "):
            read_all(tmp_path)


def test_a_truncated_tfrecord_file_is_noticed(tmp_path: Path) -> None:
    records = [record(example(steps(2))), record(example(steps(1)))]
    file = rlds(tmp_path, records)
    content = file.read_bytes()
    for size in (0, 5, len(records[0]) - 1, len(records[0]), len(records[0]) + 20, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(ConfigError, match=r"the file ends inside|and dataset_info.json says 2"):
            read_all(tmp_path)


def test_a_length_beyond_the_file_allocates_nothing(tmp_path: Path) -> None:
    length = struct.pack("<Q", 1 << 60)
    rlds(tmp_path, [length + struct.pack("<I", masked_crc32c(length)) + bytes(16)])
    with pytest.raises(ConfigError, match="record 0 at byte 0: the record has 1,152,921,504,606,846,976 bytes"):
        read_all(tmp_path)


def test_mutated_examples_are_read_or_refused() -> None:
    """Nothing but `InvalidDatasetError` leaves the parser, and it ends."""
    data = example({"a": [b"x", b"yz"], "b": np.arange(4.0), "c": np.array([1, -2, 300])})
    parsed = parse_example(memoryview(data), {"a", "b", "c"})
    assert [bytes(value) for value in parsed["a"]] == [b"x", b"yz"]
    np.testing.assert_array_equal(parsed["b"], np.arange(4.0))
    np.testing.assert_array_equal(parsed["c"], [1, -2, 300])
    rng = np.random.default_rng(0)
    num_refused = 0
    for _ in range(3000):
        mutated = bytearray(data)
        for position in rng.integers(0, len(data), rng.integers(1, 4)):
            mutated[position] = rng.integers(0, 256)
        try:
            parse_example(memoryview(bytes(mutated[: rng.integers(1, len(data) + 1)])), {"a", "b", "c"})
        except InvalidDatasetError:
            num_refused += 1
    assert num_refused > 1000


def test_sequence_examples_have_the_values_of_all_steps() -> None:
    lists = b"".join(message(1, feature(np.array([float(step), 1.0]))) for step in range(3))
    entry = message(1, message(1, b"steps/action") + message(2, lists))
    data = message(1, b"") + message(2, entry)
    np.testing.assert_array_equal(parse_example(memoryview(data), {"steps/action"})["steps/action"], [0, 1, 1, 1, 2, 1])


def test_unpacked_numbers_are_read() -> None:
    floats = message(2, b"".join(b"\x0d" + struct.pack("<f", value) for value in (0.5, -2.0)))
    integers = message(3, b"\x08\x07\x08\x01")
    entries = (message(1, message(1, name) + message(2, data)) for name, data in ((b"f", floats), (b"i", integers)))
    parsed = parse_example(memoryview(message(1, b"".join(entries))), {"f", "i"})
    np.testing.assert_array_equal(parsed["f"], [0.5, -2.0])
    np.testing.assert_array_equal(parsed["i"], [7, 1])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"steps/action": np.zeros(3, np.float32)}, r"3 numbers are not a multiple of 2"),
        ({"steps/action": [b"x"]}, "steps/action is missing, or has no numbers"),
        ({"steps/action": np.array([np.nan, 0, 0, 0], np.float32)}, "action, time step 0: a value is not finite"),
        ({"steps/observation/state": np.ones(3, np.float32)}, "different numbers of steps"),
        ({"steps/observation/image": [b"PNG"] * 2}, "observation/image, time step 0: the image cannot be decoded"),
        ({"steps/observation/image": [b"PNG"]}, "it has 2 steps and 1 images steps/observation/image"),
        ({"steps/language_instruction": [b"\xff", b"\xff"]}, "language_instruction is not UTF-8"),
        ({"steps/language_instruction": [b"a"]}, "language_instruction is not a text per step"),
    ],
)
def test_inconsistent_examples_are_named(tmp_path: Path, change: Mapping[str, Any], problem: str) -> None:
    rlds(tmp_path, [record(example({**steps(2), **change}))])
    with pytest.raises(ConfigError, match=f"record 0 at byte 0.*{problem}"):
        read_all(tmp_path)


@pytest.mark.parametrize(
    ("features", "info", "problem"),
    [
        ({**STEPS, "action": {"featuresDict": {"features": {"grip": tensor(1)}}}}, {}, "steps/action/grip"),
        ({**STEPS, "action": tensor(2, encoding="zlib")}, {}, "encoding 'zlib'"),
        ({**STEPS, "action": {"tensor": {"shape": {"dimensions": ["x"]}}}}, {}, "the shape is invalid"),
        ({**STEPS, "action": []}, {}, "a feature is not an object"),
        (STEPS, {"fileFormat": "array_record"}, "fileFormat is 'array_record'"),
        (STEPS, {"splits": []}, "there is no split 'train'"),
        (STEPS, {"splits": [{"name": "train", "shardLengths": ["x"]}]}, "splits.0.shardLengths.0: "),
        (
            STEPS,
            {"splits": [{"name": "train", "filepathTemplate": "../../etc/passwd", "shardLengths": ["1"]}]},
            "cannot read .*/set/passwd: No such file",
        ),
    ],
)
def test_descriptions_that_cannot_be_read_are_named(
    tmp_path: Path, features: Mapping[str, Any], info: Mapping[str, Any], problem: str
) -> None:
    rlds(tmp_path / "set", [record(example(steps(2)))], features, info)
    with pytest.raises(ConfigError, match=problem):
        read_all(tmp_path / "set")


def test_deeply_nested_features_are_refused(tmp_path: Path) -> None:
    rlds(tmp_path, [record(example(steps(1)))])
    (tmp_path / "features.json").write_text('{"a":' * 100_000)
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_all(tmp_path)
    nested: dict[str, Any] = {"text": {}}
    for _ in range(50):
        nested = {"featuresDict": {"features": {"a": nested}}}
    (tmp_path / "features.json").write_text(json.dumps(nested))
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_all(tmp_path)


def test_an_image_of_a_billion_pixels_is_refused_before_it_is_decoded() -> None:
    file = bytearray(encode_png(np.zeros((4, 4, 3), np.uint8)))
    file[16:24] = struct.pack(">II", 40_000, 40_000)
    file[29:33] = struct.pack(">I", zlib.crc32(bytes(file[12:29])))
    with pytest.raises(InvalidDatasetError, match=r"1600000000|40000 × 40000 pixels, more than"):
        decode_frame(bytes(file), "row 0")


def test_an_episode_that_would_not_fit_into_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "MAX_EPISODE_BYTES", 8 * 8 * 3 * 4)
    with pytest.raises(ConfigError, match="episode 0: an episode of 5 frames with 192 bytes of images each is too"):
        lerobot(tmp_path, [episode(5)])


def rewrite(path: Path, change: Callable[[dict[str, list[Any]]], object]) -> None:
    """Change the columns of a Parquet file."""
    table = pq.read_table(path)
    columns = {name: table[name].to_pylist() for name in table.column_names}
    change(columns)
    pq.write_table(pa.table(columns), path)


FILE = "data/chunk-000/episode_000001.parquet"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda columns: columns.pop("action"), "it has no column 'action'"),
        (lambda columns: columns.update(task_index=[0, 9, 0]), "row 1: task_index 9 is not in the tasks"),
        (lambda columns: columns.update(action=[[1.0, 2.0]] * 2 + [[1.0]]), "action.*have different lengths"),
        (lambda columns: columns.update(action=[[1.0]] * 3), "a row has 1 numbers, not 2"),
        (lambda columns: columns.update(action=[[1.0, 2.0], [1.0, float("inf")], [0.0, 0.0]]), "time step 1"),
        (
            lambda columns: columns.update({"observation.images.camera0": [{"bytes": b"GIF"}] * 3}),
            "column observation.images.camera0, row 0: the image cannot be decoded",
        ),
        (
            lambda columns: columns.update({"observation.images.camera0": [{"path": "a.png"}] * 3}),
            "row 0: the cell has no bytes of an image",
        ),
        (lambda columns: [column.pop() for column in columns.values()], "episode 1 has 3 rows, and the file 2"),
        (lambda columns: columns.update(episode_index=[0, 0, 0]), "episode 1 has 3 rows, and the file 0"),
    ],
)
def test_damaged_rows_are_named(tmp_path: Path, change: Callable[[Any], object], problem: str) -> None:
    lerobot(tmp_path, [episode(2), episode(3, 1)])
    rewrite(tmp_path / FILE, change)
    with pytest.raises(ConfigError, match=f"(?s)episode_000001.parquet.*{problem}"):
        read_all(tmp_path)


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    lerobot(tmp_path, [episode(2), episode(3, 1)])
    content = (tmp_path / FILE).read_bytes()
    for damaged in (b"", b"PAR1", content[:-20], content[:100] + bytes(200) + content[300:]):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"episode_000001.parquet"):
            read_all(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*episode_000001.parquet: No such file"):
        read_all(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("meta/info.json", {"codebase_version": "v1.6"}, "codebase_version 'v1.6' is not read"),
        ("meta/info.json", {"fps": 0}, "fps: "),
        ("meta/info.json", {"total_episodes": 3}, "2 distinct episodes in 2 rows, and meta/info.json says 3"),
        ("meta/info.json", {"data_path": "/etc/passwd"}, "leads out of the data set"),
        ("meta/info.json", {"data_path": "../{episode_index}"}, "leads out of the data set"),
        ("meta/info.json", {"data_path": "{episode.__class__}"}, "cannot read"),
        ("meta/info.json", {"data_path": "{secret}"}, "variable 'secret' without a value"),
        ("meta/info.json", {"features": {}}, "there is no feature 'action'"),
        ("meta/episodes.jsonl", "{}", "line 1: Field required"),
        ("meta/tasks.jsonl", "[" * 100_000, "line 1: "),
        ("meta/episodes.jsonl", '{"episode_index": 0, "length": 4000000}\n' * 2, "1 distinct episodes in 2 rows"),
    ],
)
def test_damaged_descriptions_are_named(tmp_path: Path, file: str, content: Any, problem: str) -> None:
    lerobot(tmp_path, [episode(2), episode(3, 1)])
    if isinstance(content, dict):
        content = json.dumps({**json.loads((tmp_path / file).read_text()), **content})
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read_all(tmp_path)


def test_templates_format_only_numbers_and_names() -> None:
    values = {"episode_index": 7, "episode_chunk": 0, "video_key": "observation.images.top"}
    template = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    expected = Path("videos/chunk-000/observation.images.top/episode_000007.mp4")
    assert expand_template(template, values) == expected
    with pytest.raises(InvalidDatasetError, match="leads out"):
        expand_template("videos/{video_key}", {"video_key": "../../x"})


def test_a_missing_decoder_of_videos_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "is_installed", lambda name: name != "av")
    monkeypatch.setattr(hardware, "extra_packages", {"video": ["av<20"]}.__getitem__)
    dataset = open_robot_dataset(GOLDEN / "lerobot_v21_video", KEY)
    with pytest.raises(
        ConfigError, match=r"(?s)videos are decoded by PyAV, which is not installed.*pip install 'av<20'"
    ):
        dataset.episode(0)
    assert len(dataset.episode(0, with_images=False).actions) == 5


def test_damaged_videos_are_named(tmp_path: Path) -> None:
    pytest.importorskip("av")
    shutil.copytree(GOLDEN / "lerobot_v21_video", tmp_path / "set")
    front = tmp_path / "set/videos/chunk-000/observation.images.front"
    shutil.copy(front / "episode_000001.mp4", front / "episode_000000.mp4")
    dataset = open_robot_dataset(tmp_path / "set", KEY)
    with pytest.raises(ConfigError, match=r"episode_000000.mp4, frame 3: there is no frame at 0.300 s: the video ends"):
        dataset.episode(0)
    content = (front / "episode_000001.mp4").read_bytes()
    for damaged in (b"", content[:200], b"#EXTM3U\nfile:///etc/passwd\n"):
        (front / "episode_000001.mp4").write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"episode_000001.mp4: the video cannot be decoded"):
            dataset.episode(1)


def test_images_of_another_resolution_are_refused(tmp_path: Path) -> None:
    lerobot(tmp_path, [episode(2, cameras=2)])
    info = json.loads((tmp_path / "meta/info.json").read_text())
    info["features"]["observation.images.camera1"]["shape"] = [4, 4, 3]
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(ConfigError, match="the image has 8 × 8 pixels, the data set 4 × 4"):
        read_all(tmp_path)
    names = FeatureNames(cameras=("camera0",))
    assert open_robot_dataset(tmp_path, KEY, names).episode(0).observations.images.shape == (2, 1, 8, 8, 3)
