"""Weights & Biases logger; writes to disk only if nobody is logged in."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quintet.tracking.atomic_files import translate_os_errors, write_atomic
from quintet.tracking.generations import TABLE, LoggedGeneration, table_columns
from quintet.tracking.logger import LoggerContext

RUN_ID_FILE = "wandb_id"
"""File in the run directory with the W&B run id, so that a resumed run continues it."""
MAX_TABLE_ROWS = 10
"""Validations in a table of generations; each logs the whole table again."""


class WandbLogger:
    """W&B run. Without an API key it is offline and never prompts; `wandb sync` uploads it later."""

    def __init__(self, context: LoggerContext) -> None:
        self._wandb = self._import()
        directory = context.directory
        self._rows: list[dict[str, Any]] = []
        self._num_images = 0
        context.files.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=context.project,
            name=context.name,
            dir=str(context.files),
            id=_run_id(directory, new_run=context.resume_step is None),
            resume="allow",
            config=dict(context.facts),
            job_type=context.facts.get("run", {}).get("kind"),
            **self._options(),
        )

    def _import(self) -> Any:
        import wandb

        return wandb

    def _options(self) -> dict[str, Any]:
        """Return further arguments of `init`."""
        settings = self._wandb.Settings(console="off", silent=True, x_disable_stats=True)
        return {"mode": None if _is_online() else "offline", "settings": settings}

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "time_seconds": time_seconds}, step=step)

    def log_generations(self, step: int, generations: Sequence[LoggedGeneration]) -> None:
        """Log the table `val/generations` with a row for each of the last `MAX_TABLE_ROWS` validations of this process,
        in the columns of verl and VAGEN. The whole table is sent each time."""
        row: dict[str, Any] = {"step": step}
        for number, logged in enumerate(generations, 1):
            row |= {f"input_{number}": logged.input, f"output_{number}": logged.output, f"score_{number}": logged.score}
            images = [self._wandb.Image(image, file_type="png") for image in logged.images]
            row |= {f"image_{number}_{index}": image for index, image in enumerate(images, 1)}
        self._rows = [*self._rows, row][-MAX_TABLE_ROWS:]
        self._num_images = max(self._num_images, *(len(generation.images) for generation in generations), 0)
        columns = table_columns(len(generations), self._num_images)
        data = [[logged.get(column) for column in columns] for logged in self._rows]
        table = self._wandb.Table(columns=[*columns], data=data)
        self._run.log({TABLE: table}, step=step)

    def log_video(self, step: int, name: str, path: Path) -> None:
        # without `format` W&B expects frames
        self._run.log({name: self._wandb.Video(str(path), format=path.suffix[1:])}, step=step)

    def close(self) -> None:
        self._run.finish()


class VemlpWandbLogger(WandbLogger):
    """W&B run in Volcengine's machine learning platform, whose package has W&B's interface."""

    def _import(self) -> Any:
        import volcengine_ml_platform
        from volcengine_ml_platform import wandb

        volcengine_ml_platform.init(
            ak=os.environ["VOLC_ACCESS_KEY_ID"],
            sk=os.environ["VOLC_SECRET_ACCESS_KEY"],
            region=os.environ["MLP_TRACKING_REGION"],
        )
        return wandb

    def _options(self) -> dict[str, Any]:
        return {}


def _is_online() -> bool:
    """Return whether the user is logged in or has set `WANDB_MODE`."""
    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    return (
        os.access(netrc, os.R_OK) and netrc.is_file() and "wandb" in netrc.read_text(errors="replace", encoding="utf-8")
    )


def _run_id(directory: Path, *, new_run: bool) -> str:
    path = directory / RUN_ID_FILE
    with translate_os_errors(path):
        if not new_run and path.is_file():
            return path.read_text(encoding="ascii").strip()
    run_id = secrets.token_hex(4)
    write_atomic(path, run_id.encode())
    return run_id
