"""Metrics of a run, read further as the file grows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from quintet.contained_files import open_contained
from quintet.errors import MachineError
from quintet.tracking.loggers import parse_metrics

Row = dict[str, Any]
MAX_READ_BYTES = 512 << 20
"""Size of a longer file, which a later call reads further."""


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


class MetricsFile:
    """Rows of a `metrics.jsonl`. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[Row] = []
        self._columns: dict[str, tuple[int, tuple[list[float], list[float], list[float]]]] = {}
        """Number of rows that were read for a metric, and its steps, seconds and values."""
        self._offset = 0
        self._inode = 0

    def rows(self) -> list[Row]:
        """Return all complete rows; reads only the part of the file appended since the last call.

        A file that was replaced or cut, because the run resumed from a checkpoint, is read again. A link out of the
        run's directory and a pipe count as missing, and a damaged line is left out.
        """
        try:
            with open_contained(self._path.parent, self._path.name) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._rows = []
                    self._columns = {}
                    self._offset = 0
                    self._inode = status.st_ino
                file.seek(self._offset)
                data = file.read(MAX_READ_BYTES)
        except (OSError, MachineError):
            self._rows = []
            self._columns = {}
            self._offset = 0
            return self._rows
        complete = data[: data.rfind(b"\n") + 1]
        self._rows += [row for line in complete.splitlines(keepends=True) if (row := parse_metrics(line)) is not None]
        self._offset += len(complete)
        return self._rows

    def names(self) -> list[str]:
        """Return the names of all metrics, sorted."""
        names: set[str] = set()
        for row in self.rows():
            names.update(row)
        return sorted(names - {"step", "time_seconds"})

    def curve(self, name: str) -> Curve:
        """Return a metric at the steps that have a finite value."""
        rows = self.rows()
        done, columns = self._columns.get(name, (0, ([], [], [])))
        steps, seconds, values = columns
        for row in rows[done:]:
            value = row.get(name)
            if value is not None:
                steps.append(row["step"])
                seconds.append(row.get("time_seconds") or 0.0)
                values.append(value)
        self._columns[name] = (len(rows), columns)
        return Curve(tuple(steps), tuple(seconds), tuple(values))
