"""Metrics of a run, read further as the file grows: all of them as columns, or what a list of runs shows."""

from __future__ import annotations

import os
import re
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from quintet.contained_files import open_contained
from quintet.errors import MachineError
from quintet.tracking.loggers import parse_metrics
from quintet.tracking.metric_columns import SECONDS, STEP, MetricColumns, complete_lines

MAX_COLUMN_BYTES: Final = 96 << 20
"""Memory of the columns of all runs; those that were not used for longest are read again when they are needed."""
HEADLINE_METRICS: Final = (
    *("val/{env}/success_rate", "trajectory/success_rate", "env/success_once", "val/{env}/reward"),
    *("critic/score/mean", "env/return", "val/loss", "train/loss", "sft/loss"),
)
"""Metrics that a list of runs shows: the first that a run has."""
MAX_HEADLINE_VALUES: Final = 1024
"""Values of the headline that are kept of a run; of more, minima and maxima."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Values of a metric of a run, with their steps and times."""

    steps: Sequence[float]
    seconds: Sequence[float]
    """Time since the start of the run."""
    values: Sequence[float]

    def downsampled(self, points: int) -> Curve:
        """Return at most `points` points: minimum and maximum of equally long parts, so that spikes stay visible."""
        if len(self.values) <= points:
            return self
        values = np.asarray(self.values)
        selected: set[int] = {0, len(values) - 1}
        bounds = np.linspace(0, len(values), max(points // 2, 2), dtype=int)
        for start, end in pairwise(bounds):
            part = values[start:end]
            selected.update((start + int(part.argmin()), start + int(part.argmax())))
        return Curve(*([column[i] for i in sorted(selected)] for column in (self.steps, self.seconds, self.values)))


@dataclass(slots=True)
class _GrowingFile:
    """Position up to which a file was read."""

    path: Path
    offset: int = 0
    inode: int = 0

    def blocks(self) -> Iterator[bytes]:
        """Yield the complete lines that were appended since the last call.

        Raises:
            OSError: the file cannot be read.
            MachineError: it is a link out of the run's directory, or no file.
            _ReplacedError: it was replaced or cut, because the run resumed from a checkpoint.
        """
        with open_contained(self.path.parent, self.path.name) as file:
            status = os.fstat(file.fileno())
            if self.inode and (status.st_ino != self.inode or status.st_size < self.offset):
                raise _ReplacedError
            self.inode = status.st_ino
            file.seek(self.offset)
            for block in complete_lines(file):
                self.offset += len(block)
                yield block


class _ReplacedError(Exception):
    """A file is another one than before."""


@dataclass(slots=True)
class _ReadColumns:
    file: _GrowingFile
    columns: MetricColumns = field(default_factory=MetricColumns)


class ColumnBudget:
    """Bounds the memory of the columns of all files."""

    def __init__(self, limit: int = MAX_COLUMN_BYTES) -> None:
        self._limit = limit
        self._sizes: dict[MetricsFile, int] = {}
        """In the order of their last use."""
        self._lock = threading.Lock()

    def use(self, file: MetricsFile, num_bytes: int) -> None:
        """Note the size of a file's columns, and drop those that were not used for longest, except this one."""
        with self._lock:
            self._sizes.pop(file, None)
            self._sizes[file] = num_bytes
            while len(self._sizes) > 1 and sum(self._sizes.values()) > self._limit:
                oldest = next(iter(self._sizes))
                del self._sizes[oldest]
                oldest.forget()


class MetricsFile:
    """Columns of a `metrics.jsonl`. One thread reads at a time; any may call `forget`."""

    def __init__(self, path: Path, budget: ColumnBudget | None = None) -> None:
        self._path = path
        self._budget = budget or ColumnBudget()
        self._read = _ReadColumns(_GrowingFile(path))

    def forget(self) -> None:
        """Give back the memory; the next call reads the file again."""
        self._read = _ReadColumns(_GrowingFile(self._path))

    def columns(self) -> MetricColumns:
        """Return all complete lines; reads only the part of the file that was appended since the last call.

        A file that was replaced or cut is read again. A link out of the run's directory and a pipe count as missing,
        and a damaged line is left out.
        """
        read = self._read
        try:
            for block in read.file.blocks():
                read.columns.add_block(block)
        except _ReplacedError:
            self.forget()
            return self.columns()
        except (OSError, MachineError):
            self.forget()
            return self._read.columns
        self._budget.use(self, read.columns.nbytes)
        return read.columns

    def names(self) -> list[str]:
        """Return the names of all metrics, sorted."""
        return self.columns().names

    def curve(self, name: str) -> Curve:
        """Return a metric at the steps that have a finite value."""
        columns = self.columns()
        values = columns.values(name)
        present = ~np.isnan(values)
        steps, _ = columns.points(name)
        return Curve(tuple(steps), tuple(columns.seconds[present].tolist()), tuple(values[present].tolist()))


class Headline:
    """Summary of a `metrics.jsonl` for a list of runs: its last step, and the metric that shows best whether the run
    learns. Reads each byte once, and keeps some kilobytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._file = _GrowingFile(self._path)
        self.step: int | None = None
        self.seconds: float | None = None
        self.name = ""
        """Name of the metric, empty if there is none yet."""
        self._rank = len(HEADLINE_METRICS)
        self._values = array("d")

    def refresh(self) -> None:
        """Read what was appended to the file."""
        try:
            for block in self._file.blocks():
                self._add(block)
        except _ReplacedError:
            self._begin()
            self.refresh()
        except (OSError, MachineError):
            self._begin()

    def values(self, points: int) -> list[float]:
        """Return at most so many values of the metric."""
        return list(Curve(self._values, self._values, self._values).downsampled(points).values)

    def _add(self, block: bytes) -> None:
        last = next(filter(None, map(parse_metrics, reversed(block.splitlines(keepends=True)))), None)
        if last is not None:
            self.step, self.seconds = last[STEP], last.get(SECONDS)
        for rank, (literal, pattern) in enumerate(_PATTERNS[: self._rank + 1]):
            if literal in block and (matches := pattern.findall(block)):
                name = self.name if rank == self._rank else min(match[0] for match in matches).decode()
                if rank < self._rank:
                    self._rank, self.name, self._values = rank, name, array("d")
                self._values.extend(float(value) for found, value in matches if found.decode() == name)
                break
        if len(self._values) > MAX_HEADLINE_VALUES:
            self._values = array("d", self.values(MAX_HEADLINE_VALUES // 2))


def _pattern(metric: str) -> tuple[bytes, re.Pattern[bytes]]:
    """Return the beginning of a metric in a line of the file, and a pattern of it with name and finite value."""
    before, _, after = metric.partition("{env}")
    name = re.escape(before) + (f'[^"/]+{re.escape(after)}' if after else "")
    return f'"{before}'.encode(), re.compile(rf'"({name})": (-?\d[-+.\deE]*)[,}}]'.encode())


_PATTERNS: Final = tuple(map(_pattern, HEADLINE_METRICS))
