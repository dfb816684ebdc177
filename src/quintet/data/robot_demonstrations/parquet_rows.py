"""Rows of Parquet files of robot demonstrations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.data.robot_demonstrations.dataset import InvalidDatasetError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


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
        return file.read(columns=list(columns))


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
        table = file.read_row_groups(groups, columns=list(columns)).slice(first - skipped, count)
        return {column: table.column(column).to_pylist() for column in columns}


def _check_columns(file: pq.ParquetFile, columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in file.schema_arrow.names]
    if missing:
        raise InvalidDatasetError(f"it has no column {missing[0]!r}")
