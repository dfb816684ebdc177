"""Random access to the rows of Parquet, Arrow, JSON, JSON Lines and CSV files of any size.

Of text files, only the offset of each row is in memory, eight bytes per row. Single rows of Parquet files cannot be
read: a table that is large when it is decoded is converted once to an Arrow file in the cache, of small compressed
batches, each of which is read when one of its rows is. So memory does not depend on the number of rows or on encodings.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quintet.arrow_values import checked
from quintet.config.native.data import DataConfig
from quintet.data.chat_messages import ColumnarRow
from quintet.data.data_files import cache_directory, resolve_files, write_atomically
from quintet.data.row_offsets import InvalidRowError, csv_offsets, json_error, json_offsets, line_offsets
from quintet.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

MAX_EAGER_BYTES = 256 << 20
"""Largest text file whose rows are all parsed when it is opened."""
MAX_DECODED_BYTES = 32 << 20
"""Largest Parquet table that is held in memory, decoded. Encoded sizes say nothing about memory: a repeated value is
stored once."""
BATCH_ROWS = 1024
"""Maximum rows per batch of a Parquet file's copy."""
BATCH_BYTES = 256 << 10
"""Size of such a batch, decoded: what is decompressed to read one row."""
READ_BYTES = 1 << 20
"""Bytes of a column of a Parquet file that are read at once."""
CACHED_BATCHES = 8
"""Batches of a copy that are kept after a row of them was read: rows are often read in order."""
MAX_CACHE_BYTES = 64 << 30
"""Size of all copies and encoded rows in the cache, above which those that were not used for longest are removed."""

OPEN_FILES = 16
"""Files that stay open in a process: both splits and the record of a run often have the same."""

Row = dict[str, Any]


class Table(Protocol):
    """The rows of one file."""

    path: Path

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Row:
        """
        Raises:
            ConfigError: the row cannot be read.
        """


def open_table(path: Path, key: str, cache: Path) -> Table:
    """Open a file; `key` is the configuration key that names it. A file that was opened lately is not read again.

    Raises:
        ConfigError: the file has an unknown suffix, is empty, cannot be read or contains an invalid row.
        MachineError: the cache cannot be written.
    """
    if path.suffix.lower() not in _OPEN_FUNCTIONS:
        suggestion = did_you_mean(path.suffix.lower(), FILE_SUFFIXES, "{}")
        hint = f"{suggestion} supported file suffixes: {', '.join(FILE_SUFFIXES)}".lstrip()
        raise ConfigError(f"{key}: {path} has an unsupported file suffix", key=key, value=str(path), hint=hint)
    try:
        table = _opened(path, key, cache, file_fingerprint(path))
    except InvalidRowError as error:
        raise error.as_config_error(path, key) from error
    except OSError as error:
        hint = "check that the file is complete and readable"
        raise ConfigError(f"{key}: cannot read {path}: {error}", key=key, value=str(path), hint=hint) from error
    if not len(table):
        raise ConfigError(f"{key}: {path} contains no rows", key=key, value=str(path), hint="use a file with rows")
    return table


@lru_cache(OPEN_FILES)
def _opened(path: Path, key: str, cache: Path, _fingerprint: str) -> Table:
    return _OPEN_FUNCTIONS[path.suffix.lower()](path, key, cache)


class _TextTable:
    """Rows of a text file, read from disk on access."""

    def __init__(self, path: Path, key: str, offsets: array[int], parse: Callable[[bytes], object]) -> None:
        self.path = path
        self._key = key
        self._offsets = offsets
        self._parse = parse
        self._file = path.open("rb")
        if offsets[-1] <= MAX_EAGER_BYTES:
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
            raise _row_error(start, error).as_config_error(self.path, self._key) from error
        if not isinstance(row, dict):
            raise InvalidRowError(start, "a row must be an object, {…}").as_config_error(self.path, self._key)
        return row


def _row_error(start: int, error: Exception) -> InvalidRowError:
    return json_error(start, error) if isinstance(error, json.JSONDecodeError) else InvalidRowError(start, str(error))


def _open_jsonl(path: Path, key: str, _cache: Path) -> Table:
    return _TextTable(path, key, line_offsets(path), json.loads)


def _open_json(path: Path, key: str, _cache: Path) -> Table:
    decoder = json.JSONDecoder()
    return _TextTable(path, key, json_offsets(path), lambda raw: decoder.raw_decode(raw.decode())[0])


def _open_csv(path: Path, key: str, _cache: Path) -> Table:
    columns, offsets = csv_offsets(path)
    if len(set(columns)) < len(columns):
        raise InvalidRowError(0, "two columns have the same name")

    def parse(raw: bytes) -> Row:
        return dict(zip(columns, next(csv.reader(io.StringIO(raw.decode(), newline=""))), strict=True))

    return _TextTable(path, key, offsets, parse)


_READ_ERRORS = (ValueError, OSError, OverflowError, NotImplementedError)
"""Errors of Arrow in a damaged file, and of Python for dates that it does not have."""


class _ArrowTable:
    """Rows of Arrow record batches, in memory or memory-mapped."""

    def __init__(self, path: Path, key: str, batches: Callable[[int], pa.RecordBatch], sizes: Sequence[int]) -> None:
        self.path = path
        self._key = key
        self._batch = batches
        self._ends = list(accumulate(sizes))
        self._checked: set[int] = set()
        """Batches whose values may be read. Checking all when the file is opened would read all of a large one."""

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Row:
        index, offset = _locate(number, self._ends)
        try:
            batch = self._batch(index)
            if index not in self._checked:
                checked(batch)
                self._checked.add(index)
            return ColumnarRow(batch.slice(offset, 1).to_pylist()[0])
        except _READ_ERRORS as error:
            raise _unreadable(self.path, self._key, "Arrow or Parquet", error) from error


def _open_parquet(path: Path, key: str, cache: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    directory, fingerprint = cache / "tables", file_fingerprint(path)
    try:
        with pq.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False) as file:
            copy = next(directory.glob(f"{fingerprint}-*.arrow"), None)
            if copy is None:
                batches, is_small = _first_batches(file)
                if is_small:
                    return _ArrowTable(path, key, batches.__getitem__, [batch.num_rows for batch in batches])
                rows = _rows_per_batch(batches)
                del batches
                copy = directory / f"{fingerprint}-{rows}.arrow"
                write_atomically(copy, partial(_write_arrow, file, rows))
                remove_unused(cache, copy)
            rows = int(copy.stem.rpartition("-")[2])
            sizes = [size for group in range(file.num_row_groups) for size in _batch_sizes(file, group, rows)]
    except pa.ArrowException as error:
        raise _unreadable(path, key, "Parquet", error) from error
    return _open_converted(path, key, copy, sizes)


def _first_batches(file: Any) -> tuple[list[pa.RecordBatch], bool]:
    """Return the batches of a Parquet file until they need more than `MAX_DECODED_BYTES`, and whether that is all."""
    batches, num_bytes = [], 0
    for batch in file.iter_batches(BATCH_ROWS):
        batches.append(batch)
        num_bytes += batch.nbytes
        if num_bytes > MAX_DECODED_BYTES:
            return batches, False
    return batches, True


def _rows_per_batch(batches: Sequence[pa.RecordBatch]) -> int:
    """Return a power of two of rows that need about `BATCH_BYTES`."""
    num_bytes, rows = (sum(sizes) for sizes in zip(*((batch.nbytes, batch.num_rows) for batch in batches), strict=True))
    return min(BATCH_ROWS, 1 << max(0, int(BATCH_BYTES * rows / num_bytes).bit_length() - 1))


def _batch_sizes(file: Any, group: int, batch_rows: int) -> Iterator[int]:
    """Yield the number of rows of each batch of a row group."""
    rows = file.metadata.row_group(group).num_rows
    yield from (min(batch_rows, rows - first) for first in range(0, rows, batch_rows))


def _unreadable(path: Path, key: str, kind: str, error: Exception) -> ConfigError:
    message = f"{key}: {path} is not a readable {kind} file: {error}"
    return ConfigError(message, key=key, value=str(path), hint="write the file again")


def _open_arrow(path: Path, key: str, _cache: Path) -> Table:
    """Open a memory-mapped Arrow file in the streaming format, as Hugging Face's datasets write it, or in the other."""
    import pyarrow as pa

    try:
        try:
            table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        except pa.ArrowException:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except pa.ArrowException as error:
        raise _unreadable(path, key, "Arrow", error) from error
    batches = table.to_batches()
    return _ArrowTable(path, key, batches.__getitem__, [batch.num_rows for batch in batches])


def _open_converted(path: Path, key: str, arrow_path: Path, sizes: Sequence[int]) -> _ArrowTable:
    """Open a copy. Its batches are read, not mapped: mapped pages would count as memory of the process."""
    import pyarrow as pa

    with suppress(OSError):  # the cache may belong to somebody else
        os.utime(arrow_path, ns=(time.time_ns(), arrow_path.stat().st_mtime_ns))
    reader = pa.ipc.open_file(pa.OSFile(str(arrow_path)))
    return _ArrowTable(path, key, lru_cache(CACHED_BATCHES)(reader.get_batch), sizes)


def _write_arrow(file: Any, batch_rows: int, output: Path) -> None:
    import pyarrow as pa

    # an Arrow file has one dictionary per column, but each row group may have another one
    schema = pa.schema([without_dictionary(field) for field in file.schema_arrow])
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(output), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
        for group in range(file.num_row_groups):
            batches = file.iter_batches(batch_rows, row_groups=[group])
            for batch, rows in zip(batches, _batch_sizes(file, group, batch_rows), strict=True):
                if batch.num_rows != rows:
                    raise pa.ArrowInvalid(f"row group {group} has a batch of {batch.num_rows} rows, not {rows}")
                writer.write_batch(checked(batch).cast(schema))


def remove_unused(cache: Path, used: Path, limit: int | None = None) -> None:
    """Remove the files in subdirectories of the cache that were not used for longest until all together have at most
    `limit` bytes, by default `MAX_CACHE_BYTES`; `used` stays. A process that has opened one of them keeps reading
    it."""
    limit = MAX_CACHE_BYTES if limit is None else limit
    files = [(file.stat(), file) for file in _cached_files(cache)]
    total = sum(status.st_size for status, _ in files)
    for status, file in sorted(files, key=lambda entry: entry[0].st_atime_ns):
        if total > limit and file != used:
            file.unlink(missing_ok=True)
            total -= status.st_size


def _cached_files(cache: Path) -> Iterator[Path]:
    """Yield the copies of Parquet files, and the encoded rows of fine-tuning."""
    for name in ("tables", "encoded"):
        yield from (cache / name).glob("*.arrow")


def cached_data(data: DataConfig) -> tuple[Path, int, int]:
    """Return the directory of the cache, the size of the files with rows in it, and the limit of it, in bytes."""
    cache = cache_directory(data.cache_dir)
    return cache, sum(file.stat().st_size for file in _cached_files(cache)), MAX_CACHE_BYTES


def without_dictionary(field: pa.Field) -> pa.Field:
    """Return a column with the type of its values, if they are stored in a dictionary."""
    import pyarrow as pa

    return field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field


def file_fingerprint(path: Path) -> str:
    """Return a key that changes with the file."""
    resolved, status = path.resolve(), path.stat()
    return hashlib.sha256(f"{resolved}/{status.st_size}/{status.st_mtime_ns}".encode()).hexdigest()[:32]


_OPEN_FUNCTIONS: Mapping[str, Callable[[Path, str, Path], Table]] = {
    ".parquet": _open_parquet,
    ".json": _open_json,
    ".jsonl": _open_jsonl,
    ".csv": _open_csv,
    ".arrow": _open_arrow,
}
FILE_SUFFIXES = tuple(_OPEN_FUNCTIONS)
"""Supported file suffixes."""


class ConcatenatedRows:
    """The rows of several tables in order."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._ends = list(accumulate(len(table) for table in tables))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> Row:
        index, offset = _locate(number, self._ends)
        return self._tables[index][offset]

    def describe_row(self, number: int) -> str:
        """Describe a row for messages: `train.parquet, row 7`, counted from 0."""
        index, offset = _locate(number, self._ends)
        return f"{self._tables[index].path}, row {offset}"

    def directory(self, number: int) -> Path:
        """Return the directory of the file that has a row."""
        return self._tables[_locate(number, self._ends)[0]].path.parent


def _locate(number: int, ends: Sequence[int]) -> tuple[int, int]:
    """Return the index of the part that has a row, and the row's number in it; `ends` are the ends of the parts."""
    if not 0 <= number < (ends[-1] if ends else 0):
        raise IndexError(number)
    index = bisect_right(ends, number)
    return index, number - (ends[index - 1] if index else 0)


def describe_data_files(data: DataConfig) -> list[dict[str, Any]]:
    """Return split, name, SHA-256 and rows of each data file, as JSON values.

    Raises:
        ConfigError: a name matches no file, or a file is unreadable.
        MachineError: a remote file cannot be copied, or the cache cannot be written.
    """
    cache = cache_directory(data.cache_dir)
    splits = {"train": data.train_files, "validation": data.validation_files}
    return [
        {"split": split, "name": path.name, "sha256": _digest(path), "rows": len(open_table(path, key, cache))}
        for split, names in splits.items()
        for key in [f"data.{split}_files"]
        for files in resolve_files(names, key, cache)
        for path in files
    ]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
