"""Weights & Biases: metrics of a run in its own project, on the network or, where nobody is logged in, on disk."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.tracking.run_directory import machine_errors, write_atomic

if TYPE_CHECKING:
    from quintet.tracking.loggers import LoggerContext

__all__ = ["WandbLogger"]

IDENTITY = "wandb_id"
"""File in the run's directory that holds the run's name at Weights & Biases, so that a resumed run goes on there."""


class WandbLogger:
    """One line a step. Without a key nothing is asked and nothing sent: `wandb sync` uploads it later."""

    def __init__(self, context: LoggerContext) -> None:
        import wandb

        directory = context.directory
        self._run = wandb.init(
            project=context.project,
            name=context.name,
            dir=str(directory),
            id=_identity(directory, fresh=context.resume_step is None),
            resume="allow",
            mode=None if _may_send() else "offline",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "time_seconds": time_seconds}, step=step)

    def close(self) -> None:
        self._run.finish()


def _may_send() -> bool:
    """Whether somebody is logged in, or said by `WANDB_MODE` what they want."""
    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    with machine_errors(netrc):
        return netrc.is_file() and "wandb" in netrc.read_text(errors="replace")


def _identity(directory: Path, *, fresh: bool) -> str:
    path = directory / IDENTITY
    with machine_errors(path):
        if not fresh and path.is_file():
            return path.read_text(encoding="ascii").strip()
    identity = secrets.token_hex(4)
    write_atomic(path, identity.encode())
    return identity
