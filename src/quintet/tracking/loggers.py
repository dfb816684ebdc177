"""Where metrics go: a JSON-lines file, TensorBoard, the console.

A metric without a definition in `quintet.tracking.metrics` is refused.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from quintet.registry import Registry
from quintet.tracking.metrics import describe
from quintet.tracking.progress import NullProgress, Reporter
from quintet.tracking.run_directory import machine_errors, write_atomic

__all__ = [
    "LOGGERS",
    "ConsoleLogger",
    "JsonlLogger",
    "Logger",
    "LoggerContext",
    "MetricLogger",
    "TensorboardLogger",
    "open_loggers",
    "read_metrics",
    "truncate",
]


class Logger(Protocol):
    """One place where metrics go."""

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of one step; `time_seconds` counts from the run's start."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoggerContext:
    """What a logger may need in order to open."""

    directory: Path
    """The run's directory."""
    filename: str = "metrics.jsonl"
    """JSON-lines file; the warm start writes `warm_start.jsonl`, so that its updates and the steps
    of reinforcement learning, which both count from 1, stay apart."""
    resume_step: int | None = None
    """The last step that a resumed run keeps; None for a new run."""
    reporter: Reporter = field(default_factory=NullProgress)
    """Shows the metrics to people."""
    name: str = "run"
    """As people call the run."""
    project: str = "quintet"
    """As people call what the run belongs to."""


LOGGERS: Registry[Logger] = Registry("logger", entry_points="quintet.loggers")
"""Factories take a `LoggerContext`."""


class JsonlLogger:
    """One line a step: `step`, `time_seconds`, then the metrics by name. On disk before `log` returns.

    Values that are not finite are written as null, because JSON has no word for them.
    """

    def __init__(self, context: LoggerContext) -> None:
        self._path = context.directory / context.filename
        with machine_errors(self._path):
            self._file = self._path.open("ab", buffering=0)

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        line: dict[str, Any] = {"step": step, "time_seconds": round(time_seconds, 3)}
        line.update((name, _finite(metrics[name])) for name in sorted(metrics))
        with machine_errors(self._path):
            self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


class TensorboardLogger:
    """A scalar for each metric, written with TensorBoard's own event writer.

    On resume a session mark tells TensorBoard to hide events of later steps that an interrupted run
    left behind. The mark covers a whole directory, so files other than `metrics.jsonl` get their own.
    """

    def __init__(self, context: LoggerContext) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        stem = Path(context.filename).stem
        self._path = context.directory / "tensorboard" / ("" if stem == "metrics" else stem)
        with machine_errors(self._path):
            self._path.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self._path))
        if context.resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(step=context.resume_step + 1, session_log=start)

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=metrics[name]) for name in sorted(metrics)]
        self._add(step=step, summary=Summary(value=values))
        with machine_errors(self._path):
            self._writer.flush()

    def close(self) -> None:
        with machine_errors(self._path):
            self._writer.close()

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        with machine_errors(self._path):
            self._writer.add_event(event_pb2.Event(wall_time=time.time(), **fields))


class ConsoleLogger:
    """Hands the metrics to whatever shows the run's progress."""

    def __init__(self, context: LoggerContext) -> None:
        self._reporter = context.reporter

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        self._reporter.report(step, metrics)

    def close(self) -> None:
        pass


class MetricLogger:
    """Several loggers as one; lets only defined metrics through."""

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self._loggers = tuple(loggers)

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        """Log to every logger.

        Raises:
            ValueError: a metric is not defined; nothing is written then.
        """
        for name in metrics:
            try:
                describe(name)
            except KeyError as error:
                raise ValueError(f"{error.args[0]} Define it with quintet.tracking.metrics.define") from None
        for logger in self._loggers:
            logger.log(step, time_seconds, metrics)

    def close(self) -> None:
        for logger in self._loggers:
            logger.close()


def open_loggers(names: Iterable[str], context: LoggerContext) -> MetricLogger:
    """The loggers of those names.

    Raises:
        ConfigError: an unknown name, or a package that is not installed.
        MachineError: the run's directory can't be written.
    """
    factories = [LOGGERS.get(name).load() for name in names]
    return MetricLogger(factory(context) for factory in factories)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics file; empty where there is none.

    Reading stops at the first line that is not whole: a process was killed while it wrote it.
    """
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    with machine_errors(path):
        data = path.read_bytes()
    for raw in data.splitlines(keepends=True):
        line = _parse(raw)
        if line is None:
            break
        lines.append(line)
    return lines


def _parse(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def truncate(directory: Path, step: int, filename: str = "metrics.jsonl") -> None:
    """Forget what an interrupted run logged after `step`, and a line that it left half-written.

    The lines kept are the very bytes that were written. A step must be logged before its checkpoint
    is made, else its line may be missing after a resume.

    Raises:
        MachineError: the file can't be rewritten.
    """
    path = directory / filename
    if not path.exists():
        return
    with machine_errors(path):
        data = path.read_bytes()
    kept: list[bytes] = []
    for raw in data.splitlines(keepends=True):
        line = _parse(raw)
        if line is None:
            break
        if line["step"] <= step:
            kept.append(raw)
    write_atomic(path, b"".join(kept))


def _wandb(context: LoggerContext) -> Logger:
    from quintet.tracking.wandb import WandbLogger

    return WandbLogger(context)


LOGGERS.add("jsonl", JsonlLogger, help="one JSON line a step in metrics.jsonl")
LOGGERS.add("tensorboard", TensorboardLogger, help="TensorBoard events", requires=("tensorboard",))
LOGGERS.add("wandb", _wandb, help="Weights & Biases; offline where nobody is logged in", requires=("wandb",))
LOGGERS.add("console", ConsoleLogger, help="key metrics beside the progress bar, or as plain lines")
