"""If these fail, a file of responses differs from its prompts, or looks complete before it is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hint_cases import HintCase, case, name_of

from quintet.data.response_file import BATCH_ROWS, ResponseFile

BYTES: list[dict[str, Any]] = [{"prompt": "1 + 1 = ?", "image": b"\x89PNG"}]
MIXED: list[dict[str, Any]] = [{"prompt": "1 + 1 = ?", "answer": 2}, {"prompt": "1 + 2 = ?", "answer": "three"}]


def written(path: Path, rows: Sequence[dict[str, Any]], sources: Sequence[Path] = ()) -> Path:
    file = ResponseFile.plan(path, "responses", lambda: rows, sources)
    file.write(rows, [[f"a{number}", f"b{number}"] for number in range(len(rows))])
    return path


def planned(name_and_rows: tuple[str, list[dict[str, Any]]]) -> None:
    name, rows = name_and_rows
    ResponseFile.plan(Path(name), "responses", lambda: rows, ())


CASES = [
    case(planned, ("x.jsonl", BYTES), "generation.output_path=x.parquet", ("x.parquet", BYTES)),
    case(planned, ("x.parquet", MIXED), "generation.output_path=x.jsonl", ("x.jsonl", MIXED)),
]


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_rows_that_a_format_cannot_have_are_refused_before_anything_is_generated(entry: HintCase) -> None:
    entry.check()


def test_columns_of_parquet_files_keep_their_types(tmp_path: Path) -> None:
    schema = pa.schema(
        [("prompt", pa.string()), ("score", pa.float32()), ("kind", pa.dictionary(pa.int8(), pa.string()))]
    )
    rows = [{"prompt": f"{n}", "score": None if n % 2 else 0.5, "kind": "sum"} for n in range(BATCH_ROWS + 2)]
    source = tmp_path / "source.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), source)
    table = pq.read_table(written(tmp_path / "out.parquet", rows, [source]))
    assert table.schema.field("score").type == pa.float32()
    assert table.schema.field("kind").type == pa.string()
    assert table.schema.field("responses").type == pa.list_(pa.string())
    last = BATCH_ROWS + 1
    assert table.to_pylist()[last] == {**rows[last], "responses": [f"a{last}", f"b{last}"]}


def test_a_column_of_responses_is_replaced(tmp_path: Path) -> None:
    rows = [{"prompt": "1 + 1 = ?", "responses": "an older one"}]
    for suffix in ("parquet", "jsonl"):
        path = written(tmp_path / f"out.{suffix}", rows)
        row = pq.read_table(path).to_pylist()[0] if suffix == "parquet" else json.loads(path.read_text())
        assert row == {"prompt": "1 + 1 = ?", "responses": ["a0", "b0"]}


def test_columns_that_only_later_rows_have_become_columns_of_all(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": str(n), "answer": None} for n in range(BATCH_ROWS)]
    rows.append({"prompt": "last", "answer": 3, "note": "late"})
    found = pq.read_table(written(tmp_path / "out.parquet", rows)).to_pylist()
    assert (found[0]["answer"], found[0]["note"]) == (None, None)
    assert (found[-1]["answer"], found[-1]["note"]) == (3, "late")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_an_error_in_the_middle_leaves_the_file_of_before(tmp_path: Path, suffix: str) -> None:
    rows = [{"prompt": str(number)} for number in range(3)]
    path = written(tmp_path / f"out.{suffix}", rows)
    before = path.read_bytes()

    def broken() -> Iterator[list[str]]:
        yield ["a"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ResponseFile.plan(path, "responses", lambda: rows, ()).write(rows, broken())
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
