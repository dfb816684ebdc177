"""Logger protocol, the context that loggers are built from, and their registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

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
LOGGERS.add("jsonl", "quintet.tracking.loggers:JsonlLogger", help="one JSON line per step in metrics.jsonl")
LOGGERS.add(
    "tensorboard",
    "quintet.tracking.loggers:TensorboardLogger",
    help="TensorBoard events",
)
LOGGERS.add(
    "file",
    "quintet.tracking.loggers:FileLogger",
    help="one JSON line per step in <project>/<run name>.jsonl, as verl writes it",
)
LOGGERS.add(
    "wandb",
    "quintet.tracking.wandb_logger:WandbLogger",
    help="Weights & Biases; offline without a login",
    requires=("wandb",),
    extra="wandb",
)
LOGGERS.add(
    "vemlp_wandb",
    "quintet.tracking.wandb_logger:VemlpWandbLogger",
    help="Weights & Biases of Volcengine's machine learning platform",
    requires=("volcengine_ml_platform",),
    how="Volcengine's machine learning platform provides the package in its images",
)
LOGGERS.add(
    "swanlab",
    "quintet.tracking.swanlab_logger:SwanlabLogger",
    help="SwanLab; offline without a login",
    requires=("swanlab",),
    extra="swanlab",
)
LOGGERS.add(
    "mlflow",
    "quintet.tracking.mlflow_logger:MlflowLogger",
    help="MLflow; a local database without MLFLOW_TRACKING_URI",
    requires=("mlflow", "sqlalchemy", "alembic"),
    extra="mlflow",
)
LOGGERS.add(
    "trackio",
    "quintet.tracking.trackio_logger:TrackioLogger",
    help="Trackio; a local database without TRACKIO_SPACE_ID",
    requires=("trackio",),
    extra="trackio",
)
LOGGERS.add(
    "clearml",
    "quintet.tracking.clearml_logger:ClearmlLogger",
    help="ClearML; offline without credentials",
    requires=("clearml",),
    extra="clearml",
)
LOGGERS.add(
    "console",
    "quintet.tracking.loggers:ConsoleLogger",
    help="key metrics next to the progress bar, or as plain lines",
)
LOCAL_LOGGERS = frozenset({"jsonl", "tensorboard", "file", "console"})
"""Loggers that write before `log` returns, and end the run if they cannot; all others run in the background."""
