"""Trackio logger; writes to a local database unless `TRACKIO_SPACE_ID` names a Space of Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from quintet.tracking.generations import COLUMNS, TABLE, LoggedGeneration
from quintet.tracking.logger import LoggerContext


class TrackioLogger:
    """Trackio run. `TRACKIO_DIR` is the directory of its database."""

    def __init__(self, context: LoggerContext) -> None:
        # read when trackio is imported
        os.environ.setdefault("TRACKIO_DIR", str((context.files / "trackio").resolve()))
        import trackio

        self._trackio = trackio
        is_resumed = context.resume_step is not None
        self._run = trackio.init(
            project=context.project,
            name=context.name,
            config=dict(context.facts),
            resume="allow" if is_resumed else "never",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "time_seconds": time_seconds}, step=step)

    def log_generations(self, step: int, generations: Sequence[LoggedGeneration]) -> None:
        """Log the table `val/generations` with a row per episode; images are in columns of their own."""
        num_images = max((len(generation.images) for generation in generations), default=0)
        columns = [*COLUMNS, *(f"image_{number}" for number in range(1, num_images + 1))]
        rows = []
        for logged in generations:
            images = [self._trackio.Image(image) for image in logged.images]
            rows.append(
                [step, logged.input, logged.output, logged.score, *images, *[None] * (num_images - len(images))]
            )
        self._run.log({TABLE: self._trackio.Table(columns=columns, data=rows)}, step=step)

    def log_video(self, step: int, name: str, path: Path) -> None:
        self._run.log({name: self._trackio.Video(str(path))}, step=step)

    def close(self) -> None:
        self._run.finish()
