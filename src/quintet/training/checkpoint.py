"""Checkpoints: directories made whole elsewhere and renamed in, with a manifest of hashes.

checkpoints/
  latest_checkpointed_iteration.txt   the newest one's step, written once that is whole and before older ones go
  global_step_20/
    hf/              model, configuration and tokenizer, as transformers loads them
    actor/ critic/   weights and optimizer as the ranks hold them: safetensors, and tables of what is where
    state.json       step, counters, the run's configuration
    manifest.json    size and SHA-256 of every file
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

__all__ = [
    "LATEST",
    "MANIFEST",
    "NAME",
    "STAGING",
    "STATE",
    "Checkpoint",
    "complete",
    "fault",
    "find_checkpoint",
    "open_checkpoint",
    "put_in_place",
    "read_checkpoint",
    "save_checkpoint",
    "stage",
    "staging_directory",
    "weights_digest",
]

MANIFEST = "manifest.json"
STATE = "state.json"
LATEST = "latest_checkpointed_iteration.txt"
"""verl's name; its users' scripts look for it."""
NAME = "global_step_"
STAGING = ".staging_"


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
    write(stage(root, step))
    return complete(root, step, state, keep=keep)


def stage(root: Path, step: int) -> Path:
    """An empty directory in which the checkpoint of that step is made; what an interrupted save left goes."""
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    staging = staging_directory(root, step)
    staging.mkdir()
    return staging


def staging_directory(root: Path, step: int) -> Path:
    """Where the checkpoint of that step is made."""
    return root / f"{STAGING}{step}"


def complete(root: Path, step: int, state: dict[str, Any], *, keep: int, without: Path | None = None) -> Path:
    """Make what `stage` began, and others have filled, the checkpoint of that step. Older ones go but for `keep`, and
    `without` in any case."""
    staging = staging_directory(root, step)
    (staging / STATE).write_text(json.dumps({"step": step, **state}, indent=1, sort_keys=True))
    (staging / MANIFEST).write_text(json.dumps(_manifest(staging), indent=1))
    final = put_in_place(root, staging, step)
    _note_latest(root, step)
    for old in _superseded(root, step, keep):
        shutil.rmtree(old)
    if without is not None and without != final and without.is_dir():
        shutil.rmtree(without)
    return final


def put_in_place(root: Path, staging: Path, step: int) -> Path:
    """Give a directory that is whole the name of that step's checkpoint."""
    for path in (*_files(staging), *(path for path in staging.rglob("*") if path.is_dir()), staging):
        _sync(path)
    final = root / f"{NAME}{step}"
    if final.exists():
        final.rename(root / f"{STAGING}old_{step}")
    staging.rename(final)
    _sweep(root)
    _sync(root)
    return final


def _note_latest(root: Path, step: int) -> None:
    """For scripts; nothing here reads it."""
    partial = root / f".{LATEST}"
    partial.write_text(str(step))
    _sync(partial)
    partial.rename(root / LATEST)


def _superseded(root: Path, step: int, keep: int) -> list[Path]:
    """All but the newest `keep` up to `step`. Later ones belong to a run that went another way, or
    are damaged."""
    past = [path for path in _by_step(root) if _step(path) <= step]
    return [path for path in _by_step(root) if path not in past[:keep]]


def find_checkpoint(root: Path, reject: Callable[[Path, str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole; `reject(directory, reason)` hears of every newer one."""
    for directory in _by_step(root):
        found = fault(directory)
        if found is None:
            return read_checkpoint(directory)
        reject(directory, found)
    return None


def open_checkpoint(directory: Path) -> Checkpoint:
    """That very checkpoint.

    Raises:
        MachineError: it isn't there, or it is damaged; the message says which file and how.
    """
    if not directory.is_dir() or not (directory.name.startswith(NAME) or (directory / MANIFEST).exists()):
        raise MachineError(f"no checkpoint at {directory}", "resume=PATH names a global_step_N directory")
    if found := fault(directory):
        raise MachineError(f"the checkpoint {directory} is damaged: {found}", "give the one before it, or resume=auto")
    return read_checkpoint(directory)


def read_checkpoint(directory: Path) -> Checkpoint:
    """A checkpoint that was found whole."""
    state = json.loads((directory / STATE).read_text())
    return Checkpoint(directory, int(state["step"]), state)


def _by_step(root: Path) -> list[Path]:
    """Checkpoints, newest first."""
    found = [path for path in root.glob(f"{NAME}*") if path.name.removeprefix(NAME).isdigit()]
    return sorted(found, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix(NAME))


def _sweep(root: Path) -> None:
    """Remove what an interrupted save left."""
    for rest in root.glob(f"{STAGING}*"):
        shutil.rmtree(rest)


def weights_digest(directory: Path) -> str:
    """One hash of all files with weights that lie in a model's directory."""
    found = hashlib.sha256()
    for path in sorted(path for path in directory.iterdir() if path.suffix in (".safetensors", ".bin")):
        found.update(f"{path.name} {_digest(path)}\n".encode())
    return found.hexdigest()


def _manifest(directory: Path) -> dict[str, dict[str, Any]]:
    files = _files(directory)
    return {str(p.relative_to(directory)): {"size": p.stat().st_size, "sha256": _digest(p)} for p in files}


def _files(directory: Path) -> list[Path]:
    """Its own files, without those behind a link."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault(directory: Path) -> str | None:
    """What is wrong with a checkpoint; None when every file has its size and hash."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        expected = {name: (row["size"], row["sha256"]) for name, row in manifest.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "its manifest is missing or unreadable"
    if STATE not in expected:
        return f"its manifest doesn't name {STATE}"
    return next(
        (found for name, (size, digest) in expected.items() if (found := _unlike(directory, name, size, digest))), None
    )


def _unlike(directory: Path, name: str, size: object, digest: object) -> str | None:
    """In what a file differs from what the manifest says of it."""
    path = directory / name
    try:
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if _digest(path) != digest:
            return f"{name} doesn't match its hash"
    except OSError as error:
        return f"{name} can't be read: {error.strerror or error}"
    return None


def _sync(path: Path) -> None:
    """Have the file or directory entry on the disk before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
