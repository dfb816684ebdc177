"""Checkpoints: directories made whole elsewhere and renamed in, with a manifest of hashes.

checkpoints/global_step_20/
  hf/                        model, config and tokenizer, as transformers loads them
  actor_optimizer.safetensors  critic.safetensors  critic_optimizer.safetensors
  state.json                 step, counters
  manifest.json              size and SHA-256 of every file, written last
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.errors import MachineError

__all__ = ["Checkpoint", "find_checkpoint", "open_checkpoint", "save_checkpoint"]

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint: its directory, its step and what `state.json` holds."""

    directory: Path
    step: int
    state: dict[str, Any]


def save_checkpoint(root: Path, step: int, state: dict[str, Any], write: Callable[[Path], None], *, keep: int) -> Path:
    """Write `root/global_step_<step>`: `write(directory)` puts the tensors, `state` goes to JSON.

    Until the last rename the checkpoint doesn't exist; after it the ones older than the newest
    `keep` are removed.
    """
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    staging = root / f".staging_{step}"
    staging.mkdir()
    write(staging)
    (staging / "state.json").write_text(json.dumps({"step": step, **state}, indent=1, sort_keys=True))
    (staging / MANIFEST).write_text(json.dumps(_manifest(staging), indent=1))
    for path in (*staging.rglob("*"), staging):
        _sync(path)
    final = root / f"global_step_{step}"
    if final.exists():
        final.rename(root / f".staging_old_{step}")
    staging.rename(final)
    _sweep(root)
    _sync(root)
    for old in _superseded(root, step, keep):
        shutil.rmtree(old)
    return final


def _superseded(root: Path, step: int, keep: int) -> list[Path]:
    """All but the newest `keep` up to `step`. Later ones belong to a run that went another way, or
    are damaged."""
    past = [path for path in _by_step(root) if _step(path) <= step]
    return [path for path in _by_step(root) if path not in past[:keep]]


def find_checkpoint(root: Path, reject: Callable[[Path, str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole; `reject(directory, reason)` hears of every newer one."""
    for directory in _by_step(root):
        fault = _fault(directory)
        if fault is None:
            return _read(directory)
        reject(directory, fault)
    return None


def open_checkpoint(directory: Path) -> Checkpoint:
    """That very checkpoint.

    Raises:
        MachineError: it isn't there, or it is damaged; the message says which file and how.
    """
    if not directory.is_dir():
        raise MachineError(f"no checkpoint at {directory}", "resume=PATH names a global_step_N directory")
    if fault := _fault(directory):
        raise MachineError(f"the checkpoint {directory} is damaged: {fault}", "give the one before it, or resume=auto")
    return _read(directory)


def _read(directory: Path) -> Checkpoint:
    state = json.loads((directory / "state.json").read_text())
    return Checkpoint(directory, int(state["step"]), state)


def _by_step(root: Path) -> list[Path]:
    """Checkpoints, newest first."""
    found = [path for path in root.glob("global_step_*") if path.name.removeprefix("global_step_").isdigit()]
    return sorted(found, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("global_step_"))


def _sweep(root: Path) -> None:
    """Remove what an interrupted save left."""
    for rest in root.glob(".staging_*"):
        shutil.rmtree(rest)


def _manifest(directory: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(p.relative_to(directory)): {"size": p.stat().st_size, "sha256": _digest(p)} for p in files}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fault(directory: Path) -> str | None:
    """What is wrong with a checkpoint; None when every file has its size and hash."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        return "its manifest is missing or unreadable"
    for name, expected in manifest.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["size"]:
            return f"{name} has {path.stat().st_size} bytes, not {expected['size']}"
        if _digest(path) != expected["sha256"]:
            return f"{name} doesn't match its hash"
    return None


def _sync(path: Path) -> None:
    """Have the file or directory entry on the disk before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
