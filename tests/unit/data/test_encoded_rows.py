"""If these fail, a resumed fine-tuning encodes its rows again, or trains on tokens of other rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quintet.data import encoded_rows, tables
from quintet.data.conversations import TokenSequence
from quintet.data.encoded_rows import EncodedRows

INPUTS: dict[str, Any] = {"files": ["a"], "tokenizer": "b"}
ROWS = {
    5: [TokenSequence((7, 8, 9), (False, True, True))],
    2: [TokenSequence((1,), (False,)), TokenSequence((2, 3), (False, True))],
}


def no_note(message: str) -> None:
    pytest.fail(message)


def opened(cache: Path, inputs: dict[str, Any] = INPUTS) -> EncodedRows:
    return EncodedRows(cache, inputs, no_note)


def filled(cache: Path) -> Path:
    """Write the rows, and return their file."""
    rows = opened(cache)
    for number, sequences in ROWS.items():
        rows.add(number, sequences)
    rows.flush()
    (file,) = (cache / "encoded").iterdir()
    return file


def test_rows_come_back_as_they_were_encoded(tmp_path: Path) -> None:
    filled(tmp_path)
    rows = opened(tmp_path)
    assert {number: rows.get(number) for number in ROWS} == ROWS
    assert [number for number in range(8) if number in rows] == [2, 5]
    assert rows.get(3) == []


@pytest.mark.parametrize("changed", [{"files": ["c"]}, {"tokenizer": "d"}])
def test_other_data_or_another_tokenizer_has_other_rows(tmp_path: Path, changed: dict[str, Any]) -> None:
    filled(tmp_path)
    assert 5 not in opened(tmp_path, INPUTS | changed)


def test_another_version_has_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)
    monkeypatch.setattr(encoded_rows, "__version__", "9")
    assert 5 not in opened(tmp_path)


def test_rows_are_written_while_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded_rows, "ROWS_PER_FILE", 2)
    rows = opened(tmp_path)
    for number in range(5):
        rows.add(number, ROWS[5])
    assert [number for number in range(5) if number in opened(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("offset", [0, 300, 700, -20])
def test_a_damaged_file_counts_as_missing(tmp_path: Path, offset: int) -> None:
    file = filled(tmp_path)
    data = bytearray(file.read_bytes())
    data[offset : offset + 8 or None] = b"\xff" * 8
    file.write_bytes(data)
    rows = opened(tmp_path)
    assert all(rows.get(number) in ([], sequences) for number, sequences in ROWS.items())
    file.write_bytes(data[: len(data) // 2])
    assert 5 not in opened(tmp_path)


def test_a_cache_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "encoded").write_text("a file")
    notes: list[str] = []
    rows = EncodedRows(tmp_path, INPUTS, notes.append)
    for _ in range(2):
        rows.add(1, ROWS[5])
        rows.flush()
    assert len(notes) == 1
    assert "encode rows again" in notes[0]


def test_rows_count_towards_the_limit_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = filled(tmp_path)
    monkeypatch.setattr(tables, "MAX_CACHE_BYTES", old.stat().st_size)
    rows = opened(tmp_path, {"files": ["c"]})
    rows.add(1, ROWS[5])
    rows.flush()
    assert not old.exists()
    assert 1 in opened(tmp_path, {"files": ["c"]})


def test_a_check_of_all_columns_is_noted_for_the_same_inputs(tmp_path: Path) -> None:
    filled(tmp_path)
    assert not opened(tmp_path).are_checked
    opened(tmp_path).set_checked()
    assert opened(tmp_path).are_checked
    assert not opened(tmp_path, {"files": ["c"]}).are_checked
    assert opened(tmp_path).get(5) == ROWS[5], "the file of the note has no rows"
