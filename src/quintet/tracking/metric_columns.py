"""Metrics of a run as columns: eight bytes per value, parsed in blocks by Arrow.

A line of `metrics.jsonl` as a dictionary takes about 10 KB. A run of 100,000 steps has 1 GB of them, and 40 MB of
columns.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from quintet.contained_files import MAX_LINE_BYTES, open_contained
from quintet.errors import MachineError
from quintet.tracking.atomic_files import translate_os_errors
from quintet.tracking.loggers import parse_metrics

BLOCK_BYTES: Final = 2 << 20
"""Bytes that are parsed at once."""
STEP: Final = "step"
SECONDS: Final = "time_seconds"
NAN: Final = math.nan
NULL: Final = re.compile(rb'"([^"]*)": null')

Reject = Callable[[str], None]
"""Called with what is wrong with a line or file that is left out."""


@dataclass(frozen=True, slots=True)
class MetricColumn:
    """Values of a metric, one per line of the file; NaN where a line has no finite value."""

    values: array[float] = field(default_factory=lambda: array("d"))
    nulls: array[int] = field(default_factory=lambda: array("q"))
    """Numbers of the lines whose value is null: it was not finite when it was logged."""


class MetricColumns:
    """Metrics by name. Lines are numbered from 0, in the order of the file."""

    def __init__(self) -> None:
        self.steps = array("q")
        """Step of each line."""
        self._columns: dict[str, MetricColumn] = {}

    @classmethod
    def from_lines(cls, lines: Iterable[Mapping[str, Any]]) -> MetricColumns:
        """Return the columns of parsed lines; those without a step are left out."""
        columns = cls()
        for line in lines:
            if isinstance(line.get(STEP), int):
                columns.add(line)
        return columns

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def nbytes(self) -> int:
        """Memory of the values."""
        return (1 + len(self._columns)) * self.steps.itemsize * len(self.steps)

    @property
    def names(self) -> list[str]:
        """Names of the metrics, sorted."""
        return sorted(self._columns.keys() - {SECONDS})

    @property
    def seconds(self) -> np.ndarray:
        """Time since the start of the run at each line, [lines]; 0 where a line has none."""
        seconds: np.ndarray = np.nan_to_num(self.values(SECONDS), nan=0.0)
        return seconds

    def values(self, name: str) -> np.ndarray:
        """Return a copy of the values of a metric, [lines]; NaN where a line has no finite value."""
        column = self._columns.get(name)
        return np.full(len(self), NAN) if column is None else np.array(column.values)

    def points(self, name: str) -> tuple[array[int], array[float]]:
        """Return the steps at which a metric has a finite value, and the values. They are not copied if all lines have
        one, and are not to be changed."""
        values = self.values(name)
        present = ~np.isnan(values)
        if len(self) and present.all():
            return self.steps, self._columns[name].values
        steps, points = array("q"), array("d")
        steps.frombytes(np.array(self.steps)[present].tobytes())
        points.frombytes(values[present].tobytes())
        return steps, points

    def null_steps(self, name: str) -> list[int]:
        """Return the steps at which a metric was not finite."""
        column = self._columns.get(name)
        return [] if column is None else [self.steps[number] for number in column.nulls]

    def line(self, number: int) -> dict[str, Any]:
        """Return the step, the time and the finite values of a line by name."""
        values = {name: column.values[number] for name, column in self._columns.items()}
        return {STEP: self.steps[number]} | {name: value for name, value in values.items() if not math.isnan(value)}

    def lines_with(self, is_wanted: Callable[[str], bool]) -> Iterator[dict[str, Any]]:
        """Yield the lines with a finite value of one of the metrics whose names are wanted."""
        present = [~np.isnan(self.values(name)) for name in self.names if is_wanted(name)]
        numbers = np.flatnonzero(np.any(present, axis=0)) if present else ()
        return (self.line(int(number)) for number in numbers)

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line, whose step is an integer."""
        number = len(self)
        self.steps.append(line[STEP])
        for name, value in line.items():
            if name != STEP:
                column = self._column(name, number)
                is_finite = isinstance(value, int | float) and math.isfinite(value)
                column.values.append(value if is_finite else NAN)
                if not is_finite:
                    column.nulls.append(number)
        self._fill()

    def add_block(self, block: bytes, reject: Reject = lambda _: None) -> None:
        """Append complete lines; `reject` is called with the number of each one in the block that is damaged."""
        if not self._add_table(block):
            for number, raw in enumerate(block.splitlines(keepends=True), 1):
                line = parse_metrics(raw)
                if line is None:
                    reject(str(number))
                else:
                    self.add(line)

    def _column(self, name: str, lines: int) -> MetricColumn:
        """Return a column; a new one has no value in the `lines` before."""
        if name not in self._columns:
            self._columns[name] = MetricColumn(array("d", [NAN]) * lines)
        return self._columns[name]

    def _fill(self) -> None:
        """Append to the columns which the last lines do not have."""
        for column in self._columns.values():
            if missing := len(self) - len(column.values):
                column.values.extend(array("d", [NAN]) * missing)

    def _add_table(self, block: bytes) -> bool:
        """Append the lines of a block that Arrow can parse; return False, and append none, for another block."""
        table = _parse_table(block, self._columns or parse_metrics(block[: block.find(b"\n") + 1]) or ())
        if table is None:
            return False
        columns = dict(zip(table.column_names, table.columns, strict=True))
        steps = _numbers(columns.pop(STEP))
        values = {name: _floats(column) for name, column in columns.items()}
        nulls = {name: np.isnan(numbers) for name, numbers in values.items()}
        are_finite = all(nulls[name].sum() == columns[name].null_count for name in columns)
        if not are_finite or any(np.isinf(numbers).any() for numbers in values.values()):
            return False
        start = len(self)
        self.steps.frombytes(steps.tobytes())
        for name, numbers in values.items():
            self._column(name, start).values.frombytes(numbers.tobytes())
        self._fill()
        if b": null" in block:
            self._add_nulls(block.splitlines(), start)
        return True

    def _add_nulls(self, lines: Iterable[bytes], start: int) -> None:
        """Record the nulls of lines from `start` on: Arrow does not distinguish them from lines without the metric."""
        for number, raw in enumerate(lines, start):
            for name in NULL.findall(raw):
                self._columns[name.decode()].nulls.append(number)


def _parse_table(block: bytes, names: Iterable[str]) -> Any:
    """Return the lines of a block as a table of Arrow; None if a line is damaged, or a value is no number.

    Columns whose type is given are parsed three times as fast as others.
    """
    import pyarrow as pa
    from pyarrow import json

    types = dict.fromkeys(names, pa.float64()) | {STEP: pa.int64()}
    try:
        table = json.read_json(
            pa.BufferReader(block),
            read_options=json.ReadOptions(use_threads=False, block_size=max(len(block), 1)),
            parse_options=json.ParseOptions(explicit_schema=pa.schema(list(types.items()))),
        )
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    is_number = (pa.types.is_floating, pa.types.is_integer, pa.types.is_null)
    are_numbers = all(any(test(kind) for test in is_number) for kind in table.schema.types)
    is_complete = table.num_rows == block.count(b"\n") and table[STEP].null_count == 0
    return table if are_numbers and is_complete else None


def _floats(column: Any) -> np.ndarray:
    """Return a column as float64, NaN for null."""
    numbers = _numbers(column).astype(np.float64)
    if column.null_count:
        numbers[np.concatenate([_are_null(chunk) for chunk in column.chunks])] = NAN
    return numbers


def _numbers(column: Any) -> np.ndarray:
    """Return the 64-bit numbers of a column, any number for null.

    Arrow's own conversion imports pandas, which takes 50 MB and half a second.
    """
    return np.concatenate([_chunk_numbers(chunk) for chunk in column.chunks])


def _chunk_numbers(chunk: Any) -> np.ndarray:
    import pyarrow as pa

    if pa.types.is_null(chunk.type):
        return np.zeros(len(chunk))
    kind = np.int64 if pa.types.is_integer(chunk.type) else np.float64
    return np.frombuffer(chunk.buffers()[1], kind, len(chunk), chunk.offset * kind().itemsize)


def _are_null(chunk: Any) -> np.ndarray:
    """Return which values of a chunk are null, from its bitmap of the others."""
    import pyarrow as pa

    if not chunk.null_count or pa.types.is_null(chunk.type):
        return np.full(len(chunk), bool(chunk.null_count))
    bits = np.unpackbits(np.frombuffer(chunk.buffers()[0], np.uint8), bitorder="little")
    are_null: np.ndarray = bits[chunk.offset : chunk.offset + len(chunk)] == 0
    return are_null


def read_columns(path: Path, reject: Reject = lambda _: None) -> MetricColumns:
    """Return the metrics of a file, empty if there is none. `reject(reason)` is called for each damaged
    line, and for a file that cannot be read, such as a link out of the run's directory. An incomplete last line is
    left out: a process was killed while writing it, or is writing it."""
    columns = MetricColumns()
    if not path.exists():
        return columns
    try:
        with translate_os_errors(path), open_contained(path.parent, path.name) as file:
            _read_blocks(file, columns, path.name, reject)
    except MachineError as error:
        reject(error.message)
    return columns


def _read_blocks(file: BinaryIO, columns: MetricColumns, name: str, reject: Reject) -> None:
    num_lines = 0
    for block in complete_lines(file):
        first = num_lines
        columns.add_block(block, lambda line: reject(f"{name}:{first + int(line)} is not a line of metrics"))  # noqa: B023 - called in this turn
        num_lines += block.count(b"\n")


def complete_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield blocks of complete lines up to the end of a file, or to a line that is too long."""
    rest = b""
    while data := file.read(BLOCK_BYTES):
        data = rest + data
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        if end:
            yield data[:end]
        elif len(rest) > MAX_LINE_BYTES:
            return
