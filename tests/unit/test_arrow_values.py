"""If these fail, a data file from somebody else ends the process that reads it."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quintet.arrow_values import checked
from quintet.config.dialects.vagen.env_rows import _read_file
from quintet.data.robot_demonstrations.dataset import InvalidDatasetError
from quintet.data.robot_demonstrations.lerobot import read_rows, read_table
from quintet.data.tables import open_table
from quintet.envs.question_files import _read
from quintet.envs.svg import targets
from quintet.errors import ConfigError

MARK = 12_345
FAR = 1 << 30
"""Offset and index far outside of every buffer."""
READ_ALL = """
import sys
from pathlib import Path
from quintet.data.tables import open_table
from quintet.envs.svg.targets import _read_arrow
from quintet.errors import ConfigError

for path in map(Path, sys.argv[1:]):
    for read in (lambda: open_table(path, "data.train_files", path.parent)[1], lambda: list(_read_arrow(path))):
        try:
            read()
        except (ConfigError, ValueError) as error:
            print(type(error).__name__, str(error).splitlines()[0])
"""


def int32(*values: int) -> pa.Buffer:
    return pa.array(values, pa.int32()).buffers()[1]


def write_hostile(path: Path, *, is_stream: bool, name: str) -> None:
    """Write two rows, of which the second is outside of the buffers: the number in the file is changed."""
    column = {
        "text": pa.array(["a", "b" * MARK]),
        "list": pa.array([["a"], ["b"] * MARK]),
        "dictionary": pa.DictionaryArray.from_arrays(pa.array([0, MARK], pa.int32()), pa.array(["a"] * (MARK + 1))),
    }[name]
    batch = pa.RecordBatch.from_arrays([column], ["svg"])
    create = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, create(sink, batch.schema) as writer:
        writer.write_batch(batch)
    values = {"dictionary": (0, MARK)}.get(name, (0, 1, 1 + MARK))
    before, after = (struct.pack(f"<{len(values)}i", *values[:-1], last) for last in (values[-1], FAR))
    assert path.read_bytes().count(before) == 1
    path.write_bytes(path.read_bytes().replace(before, after))


def test_values_outside_of_the_buffers_of_arrow_files_are_errors(tmp_path: Path) -> None:
    """Without the check, the reader is ended by a signal."""
    paths = []
    for name in ("text", "list", "dictionary"):
        for is_stream in (True, False):
            paths.append(tmp_path / f"{name}-{is_stream}.arrow")
            write_hostile(paths[-1], is_stream=is_stream, name=name)
    command = [sys.executable, "-c", READ_ALL, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(paths)
    for path, line in zip(paths, lines[::2], strict=True):
        assert line.startswith(f"ConfigError data.train_files: {path} is not a readable Arrow or Parquet file")


def test_the_check_returns_its_argument() -> None:
    table = pa.table({"a": ["x", None], "b": [[1], []]})
    assert checked(table) is table


def test_text_that_is_not_utf_8_is_an_error_of_the_file(tmp_path: Path) -> None:
    """In every reader of Parquet files."""
    path = tmp_path / "rows.parquet"
    text = pa.Array.from_buffers(pa.string(), 1, [None, int32(0, 2), pa.py_buffer(b"\xff\xfe")])
    info = pa.StructArray.from_arrays([text], ["env_name"])
    pq.write_table(pa.table({"svg": text, "extra_info": info}), path)
    with pytest.raises(ConfigError, match="not a readable Arrow or Parquet file"):
        open_table(path, "data.train_files", tmp_path)[0]
    with pytest.raises(ConfigError, match="no Parquet file of start states"):
        list(_read_file(path, "data.train_files"))
    with pytest.raises(ConfigError, match="cannot read"):
        list(_read(str(path), ("svg",)))
    with pytest.raises(ConfigError, match="cannot read"):
        list(targets._read(str(path)))
    for read in (lambda: read_table(path, ["svg"]), lambda: read_rows(path, ["svg"], 0, 1, "episode 0")):
        with pytest.raises(InvalidDatasetError, match="not a readable Parquet file"):
            read()
