"""Progress of a run as a file, for `quintet status`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from quintet.contained_files import read_contained
from quintet.errors import MachineError
from quintet.tracking.atomic_files import open_unlinked
from quintet.tracking.progress import Phase, Progress

WRITE_SECONDS = 1.0
"""Minimum time between two writes of one phase."""


@dataclass(slots=True)
class PhaseProgress:
    """Phase of a run, and how much of it is done."""

    phase: str
    done: int
    total: int
    unit: str

    @classmethod
    def read(cls, path: Path) -> PhaseProgress | None:
        """Return the progress in a file; None if there is none, or if it is damaged."""
        from pydantic import TypeAdapter

        try:
            return TypeAdapter(cls).validate_json(read_contained(path.parent, path.name))
        except (OSError, ValueError, MachineError):
            return None


class RecordedProgress:
    """Progress display that also writes the outermost phase to a file; its timestamp is the time of the last progress
    of any phase."""

    def __init__(self, display: Progress, path: Path) -> None:
        self._display, self._path = display, path
        self._outermost: PhaseProgress | None = None
        self._written_at = 0.0

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        self._display.report(step, metrics)

    def note(self, text: str) -> None:
        self._display.note(text)

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0, unit: str = "step") -> Iterator[Phase]:
        is_outermost = self._outermost is None
        current = PhaseProgress(name, done, total, unit)
        if is_outermost:
            self._outermost = current
        self._write()
        try:
            with self._display.phase(name, total, done, unit) as phase:
                yield _RecordedPhase(self, phase, current)
        finally:
            self._write()
            if is_outermost:
                self._outermost = None

    def write_if_due(self) -> None:
        """Write the progress unless that was done less than `WRITE_SECONDS` ago."""
        if time.monotonic() - self._written_at >= WRITE_SECONDS:
            self._write()

    def _write(self) -> None:
        if self._outermost is None:
            return
        self._written_at = time.monotonic()
        partial = self._path.with_name(f".{self._path.name}.partial")
        with suppress(OSError):  # a full disk ends the run at its next metrics, with a message
            with open(partial, "w", opener=open_unlinked) as file:
                file.write(json.dumps(asdict(self._outermost)))
            os.replace(partial, self._path)


class _RecordedPhase:
    def __init__(self, progress: RecordedProgress, displayed: Phase, counted: PhaseProgress) -> None:
        self._progress, self._displayed, self._counted = progress, displayed, counted

    def advance(self, metrics: Mapping[str, float] | None = None, count: int = 1) -> None:
        self._displayed.advance(metrics, count)
        self._counted.done += count
        self._progress.write_if_due()
