"""Logger protocol, the context that loggers are built from, and their registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from quintet.registry import Registry
from quintet.tracking.progress import NullProgress, Reporter


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
    reporter: Reporter = field(default_factory=NullProgress)
    """Progress display that shows the metrics."""
    name: str = "run"
    """Run name."""
    project: str = "quintet"
    """Project name."""


LOGGERS: Registry[Logger] = Registry("logger", entry_points="quintet.loggers")
"""Factories take a `LoggerContext`."""
LOGGERS.add("jsonl", "quintet.tracking.loggers:JsonlLogger", help="one JSON line per step in metrics.jsonl")
LOGGERS.add(
    "tensorboard",
    "quintet.tracking.loggers:TensorboardLogger",
    help="TensorBoard events",
    requires=("tensorboard",),
)
LOGGERS.add(
    "wandb",
    "quintet.tracking.wandb_logger:WandbLogger",
    help="Weights & Biases; offline without a login",
    requires=("wandb",),
)
LOGGERS.add(
    "console",
    "quintet.tracking.loggers:ConsoleLogger",
    help="key metrics next to the progress bar, or as plain lines",
)
