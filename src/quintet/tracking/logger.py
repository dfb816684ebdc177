"""Logger protocol, the context that loggers are built from, and their registry."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from quintet.registry import Registry
from quintet.tracking.atomic_files import OUTPUT_KEY
from quintet.tracking.progress import NullProgress, Progress


class Logger(Protocol):
    """A destination for metrics."""

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step; `time_seconds` counts from the start of the run."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoggerContext:
    """Arguments of a logger factory."""

    directory: Path
    """Run directory."""
    filename: str = "metrics.jsonl"
    """JSON-lines file. The warm start writes `warm_start.jsonl`, because its updates and the training steps both
    count from 1."""
    resume_step: int | None = None
    """Last step that a resumed run preserves; None for a new run."""
    reporter: Progress = field(default_factory=NullProgress)
    """Progress display that shows the metrics, and problems of loggers."""
    name: str = "run"
    """Run name."""
    project: str = "quintet"
    """Project name."""
    log_dir: Path | None = None
    """Directory of the files of loggers other than `jsonl`; None uses the run directory."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the run, its kind, versions and commit, see `run_facts`."""
    started: float = field(default_factory=time.time)
    """Unix time at which a run without interruptions would have begun: a record's time is this plus its
    `time_seconds`."""

    @property
    def files(self) -> Path:
        """Directory in which a logger creates a directory for its files."""
        return self.log_dir or self.directory

    @property
    def files_key(self) -> str:
        """Config key of `files` in messages."""
        return "tracking.log_dir" if self.log_dir else OUTPUT_KEY


@runtime_checkable
class VideoLogger(Protocol):
    """A logger that shows videos."""

    def log_video(self, step: int, name: str, path: Path) -> None:
        """Record a video of a step, an MP4 or GIF file; `name` is `train/video` or `validation/video`."""


LOGGERS: Registry[Logger] = Registry("logger", entry_points="quintet.loggers")
"""Factories take a `LoggerContext`."""
LOGGERS.add_file(__file__, "loggers.yaml")
LOCAL_LOGGERS = frozenset({"jsonl", "tensorboard", "file", "console"})
"""Loggers that write before `log` returns, and end the run if they cannot; all others run in the background."""
