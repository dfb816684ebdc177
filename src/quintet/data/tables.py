"""Rows of Parquet, JSON, JSON Lines and CSV files by number, of files of any size.

Text files stay where they are: what is kept in memory is where each row begins, eight bytes a row.
Parquet packs its rows so that one can't be read alone; a large file is rewritten once, block by block,
as an Arrow file in the cache, which the system maps into memory page by page.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quintet.data.files import made_whole
from quintet.data.scanning import BrokenRow, csv_offsets, json_offsets, line_offsets
from quintet.errors import ConfigError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["KINDS", "Rows", "Table", "open_table"]

SMALL = 256 << 20
"""Bytes of a table that is read into memory, and of a text file whose every row is looked at on opening."""
BATCH = 1024
"""Rows that are rewritten at a time."""

Row = dict[str, Any]


class Table(Protocol):
    """The rows of one file."""

    path: Path

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Row:
        """
        Raises:
            ConfigError: that row can't be read.
        """
        ...


def open_table(path: Path, key: str, cache: Path) -> Table:
    """A file's rows; `key` is what named it, for messages.

    Raises:
        ConfigError: it is of another kind, is empty, or holds a row that can't be read.
        MachineError: it can't be read, or the cache can't be written.
    """
    opener = _OPENERS.get(path.suffix.lower())
    if opener is None:
        close = nearest(path.suffix.lower(), KINDS)
        hint = (f"did you mean {close}? " if close else "") + f"files end in {', '.join(KINDS)}"
        raise ConfigError(f"{key}: {path} is of no kind that is known", key=key, value=str(path), hint=hint)
    try:
        table = opener(path, key, cache)
    except BrokenRow as error:
        raise error.told(path, key) from error
    except OSError as error:
        hint = "check that it is whole and may be read"
        raise ConfigError(f"{key}: can't read {path}: {error}", key=key, value=str(path), hint=hint) from error
    if not len(table):
        raise ConfigError(f"{key}: {path} holds no rows", key=key, value=str(path), hint="name a file with rows")
    return table


class _Text:
    """Rows of a text file, each read from the disk when it is asked for."""

    def __init__(self, path: Path, key: str, offsets: array[int], parse: Callable[[bytes], object]) -> None:
        self.path = path
        self._key = key
        self._offsets = offsets
        self._parse = parse
        self._file = path.open("rb")
        if offsets[-1] <= SMALL:
            for _ in self:
                pass

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __iter__(self) -> Iterator[Row]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, number: int) -> Row:
        start, stop = self._offsets[number], self._offsets[number + 1]
        raw = os.pread(self._file.fileno(), stop - start, start)
        try:
            row = self._parse(raw)
        except (ValueError, RecursionError, csv.Error) as error:
            raise BrokenRow(start, _reason(error)).told(self.path, self._key) from error
        if not isinstance(row, dict):
            raise BrokenRow(start, "a row must be an object, {…}").told(self.path, self._key)
        return row


def _reason(error: Exception) -> str:
    """Without the line: JSON counts those of the row alone."""
    return f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _lines(path: Path, key: str, _cache: Path) -> Table:
    return _Text(path, key, line_offsets(path), json.loads)


def _objects(path: Path, key: str, _cache: Path) -> Table:
    decoder = json.JSONDecoder()
    return _Text(path, key, json_offsets(path), lambda raw: decoder.raw_decode(raw.decode())[0])


def _cells(path: Path, key: str, _cache: Path) -> Table:
    names, offsets = csv_offsets(path)
    if len(set(names)) < len(names):
        raise BrokenRow(0, "two columns have the same name")

    def parse(raw: bytes) -> Row:
        return dict(zip(names, next(csv.reader(io.StringIO(raw.decode(), newline=""))), strict=True))

    return _Text(path, key, offsets, parse)


class _Arrow:
    """Rows of Arrow record batches, in memory or mapped into it."""

    def __init__(self, path: Path, batches: Callable[[int], pa.RecordBatch], sizes: Sequence[int]) -> None:
        self.path = path
        self._batch = batches
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Row:
        if not 0 <= number < len(self):
            raise IndexError(number)
        which = bisect_right(self._ends, number)
        batch = self._batch(which)
        within = number - (self._ends[which] - batch.num_rows)
        row: Row = batch.slice(within, 1).to_pylist()[0]
        return row


def _parquet(path: Path, key: str, cache: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            groups = [file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups)]
            if sum(groups) <= SMALL:
                batches = file.read().to_batches()
                return _Arrow(path, batches.__getitem__, [batch.num_rows for batch in batches])
            mapped = cache / "tables" / f"{_mark(path)}.arrow"
            if not mapped.is_file():
                made_whole(mapped, partial(_rewrite, file))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        told = f"{key}: {path} isn't a Parquet file that can be read: {error}"
        raise ConfigError(told, key=key, value=str(path), hint="write it again") from error
    return _mapped(path, mapped)


def _mapped(path: Path, mapped: Path) -> _Arrow:
    import pyarrow as pa

    reader = pa.ipc.open_file(pa.memory_map(str(mapped)))
    sizes = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
    return _Arrow(path, reader.get_batch, sizes)


def _rewrite(file: Any, part: Path) -> None:
    import pyarrow as pa

    # a file of Arrow has room for one dictionary a column, and each row group may bring its own
    schema = pa.schema([_spelled_out(field) for field in file.schema_arrow])
    with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in file.iter_batches(BATCH):
            writer.write_batch(batch.cast(schema))


def _spelled_out(field: pa.Field) -> pa.Field:
    import pyarrow as pa

    return field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field


def _mark(path: Path) -> str:
    """A name that changes when the file does."""
    there, status = path.resolve(), path.stat()
    return hashlib.sha256(f"{there}/{status.st_size}/{status.st_mtime_ns}".encode()).hexdigest()[:32]


_OPENERS: Mapping[str, Callable[[Path, str, Path], Table]] = {
    ".parquet": _parquet,
    ".json": _objects,
    ".jsonl": _lines,
    ".csv": _cells,
}
KINDS = tuple(_OPENERS)
"""How file names end."""


class Rows:
    """The rows of several tables, one after another."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._ends = list(accumulate(len(table) for table in tables))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Row:
        table, within = self._within(number)
        return table[within]

    def place(self, number: int) -> str:
        """Where a row lies, in words: `train.parquet, row 7`, counted from 0 as everywhere."""
        table, within = self._within(number)
        return f"{table.path}, row {within}"

    def _within(self, number: int) -> tuple[Table, int]:
        if not 0 <= number < len(self):
            raise IndexError(number)
        which = bisect_right(self._ends, number)
        table = self._tables[which]
        return table, number - (self._ends[which] - len(table))
