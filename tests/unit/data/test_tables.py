"""If these fail, a data file is read wrongly, eats the memory, or a broken one ends the run without saying where."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.config.native.data import DataConfig
from quintet.data import row_offsets, tables
from quintet.data.chat_messages import ColumnarRow
from quintet.data.data_files import cache_directory, resolve_files
from quintet.data.prompt_source import open_rows, open_split
from quintet.errors import ConfigError, MachineError

KEY = "data.train_files"
ROWS = [{"question": "2 + 3 = ?\nSay it.", "answer": "5"}, {"question": 'say "é"', "answer": "é, \\u00e9 ☃"}]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


def read(*names: str | Path, cache: Path | None = None) -> list[dict[str, Any]]:
    rows, _ = open_rows([str(name) for name in names], KEY, None if cache is None else str(cache))
    return [rows[number] for number in range(len(rows))]


@pytest.mark.parametrize("ending", tables.FILE_SUFFIXES)
def test_all_file_types_give_the_same_rows(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"rows{ending}", ROWS * 10)
    assert read(path) == ROWS * 10


@pytest.mark.parametrize("ending", [".json", ".jsonl", ".csv"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"rows{ending}", ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read(path) == ROWS


def test_a_json_file_may_contain_concatenated_objects(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(ROWS[0], indent=1) + "\n\n" + json.dumps(ROWS[1]))
    assert read(path) == ROWS


def test_blank_lines_hold_no_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"a": 1}\n\n  \n{"a": 2}')
    assert read(path) == [{"a": 1}, {"a": 2}]


text = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.recursive(
    st.none() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.dictionaries(text, values, max_size=3), min_size=1, max_size=8),
    block=st.integers(1, 40),
    indent=st.sampled_from([None, 2]),
    array=st.booleans(),
)
def test_json_rows_are_found_across_block_boundaries(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], block: int, indent: int | None, array: bool
) -> None:
    path = tmp_path_factory.mktemp("json") / "rows.json"
    ways = {"indent": indent, "ensure_ascii": False}
    path.write_text(json.dumps(rows, **ways) if array else "\n".join(json.dumps(row, **ways) for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_offsets, "BLOCK_BYTES", block)
        assert read(path) == rows


@pytest.mark.parametrize(
    ("name", "content", "line", "why"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": 2}\n{"a": \n', 3, "Expecting value"),
        ("a.jsonl", '{"a": 1}\n{"a": 1\n{"a": 2}\n', 2, "delimiter, column 8"),
        ("a.json", '[{"a": 1},\n {"a": 2,\n  "b" 3}]', 3, "delimiter, column 7"),
        ("a.jsonl", '{"a": 1}\n[2]\n', 2, "must be an object"),
        ("a.jsonl", b'{"a": "\xff"}\n', 1, "utf-8"),
        ("a.json", '[{"a": 1},\n {"a": 2}\n {"a": 3}]', 3, "comma"),
        ("a.json", '[{"a": 1},\n {"a": 2', 2, "delimiter"),
        ("a.json", '[{"a": 1},\n {"a": 2}\n', 3, "ends inside"),
        ("a.json", '[{"a": 1}]\n7', 2, "after the end"),
        ("a.json", '[{"a": 1},\n 3]', 2, "must be an object"),
        ("a.json", b'{"a": 1}\n{"a": "\xff"}', 1, "UTF-8"),
        ("a.csv", "a,b\n1,2\n3\n", 3, "1 cells"),
        ("a.csv", 'a,b\n1,2\n"3,4\n', 3, "end of data"),
        ("a.csv", "a,a\n1,2\n", 1, "same name"),
    ],
)
def test_an_invalid_row_is_reported_with_file_and_line(
    tmp_path: Path, name: str, content: str | bytes, line: int, why: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=why) as caught:
        read(path)
    assert caught.value.key == KEY
    assert f"{KEY}: {path}, line {line}: " in caught.value.message
    assert caught.value.hint


def test_an_invalid_row_of_a_large_file_is_reported_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_EAGER_BYTES", 0)
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a":\n{"a": 3}\n')
    rows, _ = open_rows([str(path)], KEY)
    assert rows[2] == {"a": 3}
    with pytest.raises(ConfigError, match="line 2"):
        rows[1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"\n", "contains no rows"),
        ("a.json", b"[]", "contains no rows"),
        ("a.json", b"", "contains no rows"),
        ("a.csv", b"a,b\n", "contains no rows"),
        ("a.parquet", b"PAR1 or not", "is not a readable Parquet file"),
        ("a.parqet", b"x", "did you mean .parquet"),
        ("a.txt", b"x", "supported file suffixes: .parquet, .json, .jsonl, .csv"),
    ],
)
def test_a_file_that_is_no_data_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.key == KEY


def test_an_empty_parquet_file_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="contains no rows"):
        read(tmp_path / "a.parquet")


def test_names_home_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("b", "a", "c[1]"):
        write(tmp_path / f"{name}.jsonl", [{"from": name}] * 2)
    rows, sizes = open_rows(["~/[ab].jsonl", "~/c[1].jsonl", "~/a.jsonl"], KEY)
    assert [rows[number]["from"] for number in range(len(rows))] == ["a", "a", "b", "b", "c[1]", "c[1]", "a", "a"]
    assert sizes == (4, 2, 2)
    assert rows.describe_row(3) == f"{tmp_path / 'b.jsonl'}, row 1"
    with pytest.raises(IndexError):
        rows[8]


def test_a_missing_file_is_reported_with_similar_names(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(ConfigError, match="no such file") as caught:
        read(tmp_path / "trian.jsonl")
    assert f"did you mean {tmp_path / 'train.jsonl'}?" in str(caught.value)
    with pytest.raises(ConfigError, match=r"contains train\.jsonl"):
        read(tmp_path / "elsewhere" / "other.csv")
    for wrong in (tmp_path / "*.parquet", tmp_path / "no" / "*" / "x.jsonl"):
        with pytest.raises(ConfigError, match="no such file"):
            read(wrong)
    with pytest.raises(ConfigError, match="is a directory"):
        read(tmp_path)


def test_a_large_parquet_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_DECODED_BYTES", 0)
    monkeypatch.setattr(tables, "BATCH_ROWS", 16)
    rows = [{"number": n, "kind": "odd" if n % 2 else "even", "words": [{"role": str(n)}]} for n in range(100)]
    table = pa.Table.from_pylist(rows)
    table = table.set_column(1, "kind", table["kind"].dictionary_encode())
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=30)
    assert read(tmp_path / "a.parquet", cache=tmp_path / "cache") == rows
    (made,) = (tmp_path / "cache" / "tables").iterdir()
    stamp = made.stat().st_mtime_ns
    assert read(tmp_path / "a.parquet", cache=tmp_path / "cache") == rows
    assert made.stat().st_mtime_ns == stamp
    write(tmp_path / "a.parquet", rows[:50])
    assert len(read(tmp_path / "a.parquet", cache=tmp_path / "cache")) == 50


def test_memory_for_repeated_values_is_one_batch(tmp_path: Path) -> None:
    """A text of 20 kB in 20,000 rows: a file of some kB, 400 MB when it is decoded."""
    text = "x" * 20_000
    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array([text]))})
    pq.write_table(table.cast(pa.schema([("text", pa.string())])), tmp_path / "a.parquet")
    before = pa.total_allocated_bytes()
    del table
    rows, _ = open_rows([str(tmp_path / "a.parquet")], KEY, str(tmp_path))
    assert len(rows) == 20_000
    assert rows[0] == rows[12_345] == rows[19_999] == {"text": text}
    assert pa.total_allocated_bytes() - before < tables.CACHED_BATCHES * 2 * tables.BATCH_BYTES
    (copy,) = (tmp_path / "tables").iterdir()
    assert copy.stat().st_size < 40 << 20


def test_the_cache_keeps_the_copies_that_were_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_DECODED_BYTES", 0)
    names = [tmp_path / f"{name}.parquet" for name in "abc"]
    opened = [open_rows([str(write(name, ROWS))], KEY, str(tmp_path))[0] for name in names[:2]]
    copies = {tables.file_fingerprint(name): name for name in names[:2]}
    (size, _) = [copy.stat().st_size for copy in (tmp_path / "tables").iterdir()]
    for age, name in enumerate(names[:2]):  # the first was used an hour before the second
        (copy,) = (tmp_path / "tables").glob(f"{tables.file_fingerprint(name)}-*")
        os.utime(copy, (age * 3600, age * 3600))
    tables._opened.cache_clear()  # as in another process
    open_rows([str(names[0])], KEY, str(tmp_path))
    monkeypatch.setattr(tables, "MAX_CACHE_BYTES", 2 * size)
    write(names[2], ROWS)
    open_rows([str(names[2])], KEY, str(tmp_path))
    left = {copy.stem.partition("-")[0] for copy in (tmp_path / "tables").iterdir()}
    assert left == {tables.file_fingerprint(names[0]), tables.file_fingerprint(names[2])} != set(copies)
    assert tables.cached_data(DataConfig(cache_dir=str(tmp_path))) == (tmp_path, 2 * size, 2 * size)
    assert opened[1][0] == ROWS[0], "a copy that is open can be read after it was removed"


def test_copies_of_large_tables_are_in_the_configured_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(tables, "MAX_DECODED_BYTES", 0)
    write(tmp_path / "a.parquet", ROWS)
    config = DataConfig(train_files=(f"{tmp_path}/a.parquet",), cache_dir=f"{tmp_path}/mine")
    assert len(open_split(config, None, "train").rows) == len(ROWS)
    assert len(list((tmp_path / "mine/tables").iterdir())) == 1
    assert not (tmp_path / "user").exists()


def test_an_unwritable_cache_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_DECODED_BYTES", 0)
    write(tmp_path / "a.parquet", ROWS)
    (tmp_path / "cache").write_text("no directory")
    with pytest.raises(MachineError, match="cannot write"):
        read(tmp_path / "a.parquet", cache=tmp_path / "cache")


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_directory(None) == tmp_path / ".cache" / "quintet"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_directory(None) == Path("/elsewhere/quintet")
    assert cache_directory("~/x") == tmp_path / "x"


def test_remote_files_are_copied_to_the_cache(tmp_path: Path) -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    for name in ("1", "2"):
        system.pipe_file(f"/quintet/{name}.jsonl", json.dumps({"from": name}).encode())
    assert read("memory://quintet/*.jsonl", cache=tmp_path) == [{"from": "1"}, {"from": "2"}]
    assert len(list((tmp_path / "copies").iterdir())) == 2
    assert read("memory://quintet/1.jsonl", cache=tmp_path) == [{"from": "1"}]
    with pytest.raises(MachineError, match="cannot copy"):
        read("memory://quintet/3.jsonl", cache=tmp_path)
    with pytest.raises(ConfigError, match="no file matches"):
        read("memory://quintet/*.csv", cache=tmp_path)
    with pytest.raises(ConfigError, match="cannot read nowhere://"):
        resolve_files(["nowhere://quintet/a.jsonl"], KEY, tmp_path)
    assert not list(tmp_path.rglob("*.part"))


def test_fifty_thousand_rows_cost_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 1 kB; what stays in memory is 8 bytes for each, whatever is read."""
    monkeypatch.setattr(tables, "MAX_EAGER_BYTES", 0)
    path, count = tmp_path / "large.jsonl", 50_000
    filler = "x" * 1000
    with path.open("w") as file:
        for number in range(count):
            file.write(f'{{"n": {number}, "text": "{filler}"}}\n')
    tracemalloc.start()
    rows, _ = open_rows([str(path)], KEY)
    opened, _ = tracemalloc.get_traced_memory()
    assert all(rows[number]["n"] == number for number in range(0, count, 97))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(rows) == count
    assert opened < 16 * count
    assert most < 16 * count + 3 * row_offsets.BLOCK_BYTES


def test_reading_text_loads_no_heavy_package(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    code = (
        "import sys; from quintet.data.prompt_source import open_rows; "
        f"rows, _ = open_rows([{str(path)!r}], 'data.train_files'); rows[0]; "
        "print([name for name in ('torch', 'transformers', 'pyarrow', 'fsspec') if name in sys.modules])"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == "[]"


def test_a_directory_of_save_to_disk_has_the_rows_of_its_arrow_files(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{number}"}]} for number in range(5)]
    directory = tmp_path / "talks" / "train"
    directory.mkdir(parents=True)
    files = [f"data-0000{part}-of-00002.arrow" for part in range(2)]
    for name, part in zip(files, (rows[:3], rows[3:]), strict=True):
        table = pa.Table.from_pylist(part)
        with pa.OSFile(str(directory / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in files]}))
    found, sizes = open_rows([str(directory)], "data.train_files", str(tmp_path))
    assert [found[number] for number in range(len(found))] == rows
    assert isinstance(found[0], ColumnarRow)
    assert list(sizes) == [5]
    with pytest.raises(ConfigError, match=r"is a directory\n  name files in it, such as .*talks/train"):
        open_rows([str(directory.parent)], "data.train_files", str(tmp_path))
    (directory / files[0]).write_bytes(b"no table")
    with pytest.raises(ConfigError, match="is not a readable Arrow file"):
        open_rows([str(directory)], "data.train_files", str(tmp_path))


def test_a_file_is_read_once_per_process_unless_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n')
    first = tables.open_table(path, KEY, tmp_path)
    assert tables.open_table(path, KEY, tmp_path) is first
    path.write_text('{"n": 10}\n')
    assert tables.open_table(path, KEY, tmp_path)[0] == {"n": 10}
