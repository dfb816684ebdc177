"""Files of rows with their responses, in Parquet or JSON Lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.data.data_files import write_atomically
from quintet.data.tables import without_dictionary
from quintet.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

KEY = "generation.output_path"
BATCH_ROWS = 1024
"""Rows per row group of a Parquet file."""

Row = Mapping[str, Any]
ReadRows = Callable[[], Iterable[Row]]
"""Returns the rows in their order; called once for each pass over them."""


@dataclass(frozen=True, slots=True)
class ResponseFile:
    """File that will have the rows and a column of responses."""

    path: Path
    column: str
    schema: pa.Schema | None
    """Columns of a Parquet file; None for JSON Lines."""

    @classmethod
    def plan(cls, path: Path, column: str, rows: ReadRows, sources: Sequence[Path]) -> ResponseFile:
        """Return the file for rows that come from the files `sources`, or from none if these are unknown.

        Raises:
            ConfigError: the format cannot represent the rows.
        """
        if path.suffix == ".jsonl":
            for number, row in enumerate(rows()):
                _json_line(row, number, path)
            return cls(path, column, None)
        return cls(path, column, _with_responses(_schema(rows, sources, path), column))

    def write(self, rows: Iterable[Row], responses: Iterable[Sequence[str]]) -> None:
        """Write the file atomically.

        Raises:
            MachineError: it cannot be written.
        """
        complete = ({**row, self.column: list(texts)} for row, texts in zip(rows, responses, strict=True))
        write = self._write_json_lines if self.schema is None else self._write_parquet
        write_atomically(self.path, lambda path: write(path, complete))

    def _write_json_lines(self, path: Path, rows: Iterable[Row]) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.writelines(_json_line(row, number, self.path) for number, row in enumerate(rows))

    def _write_parquet(self, path: Path, rows: Iterable[Row]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with pq.ParquetWriter(path, self.schema) as writer:
            for batch in _batched(rows):
                writer.write_table(pa.Table.from_pylist(batch, schema=self.schema))


def _json_line(row: Row, number: int, path: Path) -> str:
    try:
        return json.dumps(row, ensure_ascii=False) + "\n"
    except TypeError as error:
        problem = f"row {number} cannot be written as JSON: {error}"
        raise _unsupported_rows(path, problem, ".parquet") from error


def _schema(rows: ReadRows, sources: Sequence[Path], path: Path) -> pa.Schema:
    """Return the columns of Parquet files, or those that follow from the values of other rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if sources and all(source.suffix.lower() == ".parquet" for source in sources):
            schemas = [pq.read_schema(source) for source in sources]
        else:
            schemas = [pa.Table.from_pylist(batch).schema for batch in _batched(rows())]
        return pa.unify_schemas([schema.remove_metadata() for schema in schemas], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise _unsupported_rows(path, f"a column has values of several types: {error}", ".jsonl") from error


def _with_responses(schema: pa.Schema, column: str) -> pa.Schema:
    import pyarrow as pa

    fields = [without_dictionary(field) for field in schema if field.name != column]
    return pa.schema([*fields, pa.field(column, pa.list_(pa.string()))])


def _batched(rows: Iterable[Row]) -> Iterator[list[dict[str, Any]]]:
    remaining = iter(rows)
    while batch := [dict(row) for row in islice(remaining, BATCH_ROWS)]:
        yield batch


def _unsupported_rows(path: Path, problem: str, suffix: str) -> ConfigError:
    return ConfigError(f"{KEY} = {path}: {problem}", key=KEY, value=str(path), hint=f"{KEY}={path.with_suffix(suffix)}")
