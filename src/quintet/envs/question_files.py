"""Rows of files for text environments; each split has its own rows."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Final

from quintet.arrow_values import checked
from quintet.envs.start_states import Split, layout_split, split_of
from quintet.errors import ConfigError

SUFFIXES: Final = (".parquet", ".jsonl", ".json")
MAX_CHECKED_ROWS: Final = 1000
"""Rows that are checked before a run."""
Row = tuple[Any, ...]
"""Values of the columns in their order."""


def row_of(path: str, columns: tuple[str, ...], seed: int, max_rows: int | None = None) -> Row:
    """Return the row of a seed. A row with the same first column is in one split only, by a hash of that column.

    Raises:
        ConfigError: `env.path` cannot be read, lacks a column, or has no row for the split of the seed.
    """
    split = split_of(seed)
    rows = _rows_by_split(path, columns, max_rows)[split]
    if not rows:
        raise _error(path, f"none of its rows belongs to the {split} split, to which a hash assigns a third of them")
    return rows[seed // len(Split) % len(rows)]


def cell_text(value: object, column: str, path: str) -> str:
    """Return the text of a cell, which is text or a number.

    Raises:
        ConfigError: it is anything else, such as a list of chat messages.
    """
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise _error(path, f"the column {column} contains {value!r:.60}, which is neither text nor a number")
    return str(value)


def check_file(path: str, columns: tuple[str, ...]) -> None:
    """Check that a file can be read, has the columns, and has no empty cell in them in its first rows.

    Raises:
        ConfigError: it cannot, lacks a column, or a cell is empty.
    """
    for number, row in enumerate(islice(_read(path, columns), MAX_CHECKED_ROWS)):
        for column, value in zip(columns, row, strict=True):
            if value is None or not str(value).strip():
                raise _error(path, f"row {number} has no {column}: {value!r}")


@lru_cache(maxsize=4)
def _rows_by_split(path: str, columns: tuple[str, ...], max_rows: int | None) -> dict[Split, list[Row]]:
    rows: dict[Split, list[Row]] = {split: [] for split in Split}
    for row in islice(_read(path, columns), max_rows):
        rows[layout_split(json.dumps(row[0]))].append(row)
    for split, part in rows.items():
        random.Random(split).shuffle(part)  # noqa: S311 - an order, no secret
    return rows


def _read(path: str, columns: tuple[str, ...]) -> Iterator[Row]:
    root = Path(path)
    files = sorted(entry for entry in root.rglob("*") if entry.suffix in SUFFIXES) if root.is_dir() else [root]
    if not root.exists() or not files:
        problem = f"contains no file that ends in {', '.join(SUFFIXES)}" if root.is_dir() else "does not exist"
        raise _error(path, problem)
    for file in files:
        if file.suffix not in SUFFIXES:
            raise _error(path, f"{file} does not end in {', '.join(SUFFIXES)}")
        try:
            yield from _read_parquet(file, columns) if file.suffix == ".parquet" else _read_json(file, columns)
        except KeyError as error:
            raise _error(path, f"{file} has rows without the column {error.args[0]}") from error
        except (OSError, TypeError, ValueError, OverflowError, NotImplementedError) as error:
            raise _error(path, f"cannot read {file}: {str(error).splitlines()[0]}") from error


def _read_parquet(file: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as parquet:
        for column in columns:
            if column not in parquet.schema_arrow.names:
                raise KeyError(column)
        for batch in parquet.iter_batches(columns=list(columns)):
            yield from (tuple(row[column] for column in columns) for row in checked(batch).to_pylist())


def _read_json(file: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    """Yield the rows of a JSON list, or of a file with one row per line."""
    text = file.read_text(encoding="utf-8")
    lines = (json.loads(line) for line in text.splitlines() if line.strip())
    for row in json.loads(text) if text.lstrip().startswith("[") else lines:
        yield tuple(row[column] for column in columns)


def _error(path: str, problem: str) -> ConfigError:
    hint = f"use a file that ends in {', '.join(SUFFIXES)}, or a directory of them"
    return ConfigError(f"env.path = {path}: {problem}", key="env.path", value=path, hint=hint)
