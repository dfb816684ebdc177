"""Checkpoints that are written at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from quintet.training.checkpoint.checkpoint import create_staging_directory, finish_checkpoint


def save_checkpoint(root: Path, step: int, state: dict[str, Any], write: Callable[[Path], None], *, keep: int) -> Path:
    """Write `root/global_step_<step>`: `write(directory)` writes the tensors, `state` is stored as JSON."""
    write(create_staging_directory(root, step))
    return finish_checkpoint(root, step, state, keep=keep)
