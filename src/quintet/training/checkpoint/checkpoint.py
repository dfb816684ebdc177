"""Checkpoints: directories that are completed under a staging name and renamed, with a manifest of hashes.

checkpoints/
  latest_checkpointed_iteration.txt   step of the newest complete one, written before older ones are deleted
  global_step_20/
    hf/              model, configuration and tokenizer, loadable by transformers
    actor/ critic/   weights and optimizer state as the ranks' shards: safetensors, and JSON tables that locate them
    state.json       step, counters, configuration of the run
    manifest.json    size and SHA-256 of every file
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quintet.contained_files import check_entries, is_contained, read_contained
from quintet.errors import MachineError
from quintet.file_formats import check_format, format_fields
from quintet.tracking.atomic_files import sync, write_atomic

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
LATEST_STEP_FILE = "latest_checkpointed_iteration.txt"
"""File name of verl, which its users' scripts read."""
CHECKPOINT_PREFIX = "global_step_"
STAGING_PREFIX = ".staging_"
NUMBER = re.compile("[0-9]{1,18}")
"""Step in the name of a directory."""
REPLACED_PREFIX = f"{STAGING_PREFIX}old_"
"""Prefix of a checkpoint that is being replaced by another one of its step."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint: directory, step and the contents of `state.json`."""

    directory: Path
    step: int
    state: dict[str, Any]

    def entry(self, name: str, kind: type[T], default: T | None = None) -> T:
        """Return an entry of the state, or `default` if it is missing.

        Raises:
            MachineError: it has another type, or is missing without a default.
        """
        value = self.state.get(name, default)
        if not isinstance(value, kind):
            message = f"{self.directory / STATE_FILE}: {name} is {str(value)[:60]!r}, not of the type {kind.__name__}"
            raise MachineError(message, "use another checkpoint, or start again with resume=never")
        return value


def create_staging_directory(root: Path, step: int) -> Path:
    """Create the empty staging directory of a step, and delete those of interrupted saves."""
    root.mkdir(parents=True, exist_ok=True)
    finish_interrupted_replacements(root)
    _delete_staging_directories(root)
    staging = staging_directory(root, step)
    staging.mkdir()
    return staging


def staging_directory(root: Path, step: int) -> Path:
    """Return the path of the staging directory of a step."""
    return root / f"{STAGING_PREFIX}{step}"


def finish_checkpoint(root: Path, step: int, state: dict[str, Any], *, keep: int, delete: Path | None = None) -> Path:
    """Turn the filled staging directory of a step into its checkpoint. Delete all but the newest `keep`, and `delete`
    in any case."""
    staging = staging_directory(root, step)
    (staging / STATE_FILE).write_text(
        json.dumps({"step": step, **format_fields(), **state}, indent=1, sort_keys=True), encoding="utf-8"
    )
    (staging / MANIFEST_FILE).write_text(json.dumps(_manifest(staging), indent=1), encoding="utf-8")
    final = move_into_place(root, staging, step)
    _write_latest_step(root, step)
    for old in _outdated(root, step, keep):
        _delete(old)
    if delete is not None and delete != final and delete.is_dir():
        shutil.rmtree(delete)
    return final


def move_into_place(root: Path, staging: Path, step: int) -> Path:
    """Rename a complete directory to the checkpoint of a step."""
    for path in (*_files(staging), *(path for path in staging.rglob("*") if path.is_dir()), staging):
        sync(path)
    final = root / f"{CHECKPOINT_PREFIX}{step}"
    if final.exists():
        final.rename(root / f"{REPLACED_PREFIX}{step}")
    staging.rename(final)
    _delete_staging_directories(root)
    sync(root)
    return final


def finish_interrupted_replacements(root: Path) -> None:
    """Restore checkpoints whose replacement ended between the two renames of `move_into_place`: the complete new
    checkpoint, or else the one before."""
    for replaced in root.glob(f"{REPLACED_PREFIX}*"):
        step = replaced.name.removeprefix(REPLACED_PREFIX)
        final = root / f"{CHECKPOINT_PREFIX}{step}"
        if NUMBER.fullmatch(step) and not final.exists():
            candidates = (staging_directory(root, int(step)), replaced)
            next((path for path in candidates if find_damage(path) is None), replaced).rename(final)


def _write_latest_step(root: Path, step: int) -> None:
    """Write the step file for users' scripts; resuming does not read it."""
    write_atomic(root / LATEST_STEP_FILE, str(step).encode())


def _outdated(root: Path, step: int, keep: int) -> list[Path]:
    """Return all but the newest `keep` up to `step`. Later ones are damaged or belong to an abandoned continuation."""
    past = [path for path in _by_step(root) if _step(path) <= step]
    return [path for path in _by_step(root) if path not in past[:keep]]


def find_checkpoint(root: Path, reject: Callable[[Path, str], None]) -> Checkpoint | None:
    """Return the newest intact checkpoint; `reject(directory, reason)` is called for each newer one."""
    for directory in _by_step(root):
        damage = find_damage(directory) if is_contained(root, directory) else f"it leads out of {root}"
        if damage is None:
            return read_checkpoint(directory)
        reject(directory, damage)
    return None


def open_checkpoint(directory: Path) -> Checkpoint:
    """Verify and return the checkpoint at `directory`.

    Raises:
        MachineError: it does not exist or is damaged; the message names the file.
    """
    if not directory.is_dir() or not (
        directory.name.startswith(CHECKPOINT_PREFIX) or (directory / MANIFEST_FILE).exists()
    ):
        raise MachineError(f"no checkpoint at {directory}", "give the path of a global_step_N directory")
    if damage := find_damage(directory):
        hint = "use an older checkpoint, or resume=auto"
        raise MachineError(f"the checkpoint {directory} is damaged: {damage}", hint)
    return read_checkpoint(directory)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Return a checkpoint that was verified before.

    Raises:
        MachineError: it has a newer format.
    """
    state = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
    check_format(state, directory)
    return Checkpoint(directory, int(state["step"]), state)


def _by_step(root: Path) -> list[Path]:
    """Return all checkpoints, newest first."""
    paths = root.glob(f"{CHECKPOINT_PREFIX}*")
    numbered = (path for path in paths if NUMBER.fullmatch(path.name.removeprefix(CHECKPOINT_PREFIX)))
    return sorted(numbered, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix(CHECKPOINT_PREFIX))


def _delete_staging_directories(root: Path) -> None:
    for path in root.glob(f"{STAGING_PREFIX}*"):
        _delete(path)


def _delete(path: Path) -> None:
    """Delete a directory, or a link or file in its place."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def weights_digest(directory: Path) -> str:
    """Return one hash of all weight files in a model directory."""
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.iterdir() if path.suffix in (".safetensors", ".bin")):
        digest.update(f"{path.name} {_digest(path)}\n".encode())
    return digest.hexdigest()


def _manifest(directory: Path) -> dict[str, dict[str, Any]]:
    files = _files(directory)
    return {str(p.relative_to(directory)): {"size": p.stat().st_size, "sha256": _digest(p)} for p in files}


def _files(directory: Path) -> list[Path]:
    """Return all files of a directory except symbolic links."""
    return sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_damage(directory: Path) -> str | None:
    """Describe the first damage of a checkpoint; None if every file has its size and hash, and nothing in it is a link
    out of it."""
    try:
        manifest = json.loads(read_contained(directory, MANIFEST_FILE))
        expected = {name: (row["size"], row["sha256"]) for name, row in manifest.items()}
        check_entries(directory)
    except MachineError as error:
        return error.message
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "its manifest is missing or unreadable"
    if STATE_FILE not in expected:
        return f"its manifest does not list {STATE_FILE}"
    damages = (_file_damage(directory, name, size, digest) for name, (size, digest) in expected.items())
    return next(filter(None, damages), None) or _state_damage(directory)


def _state_damage(directory: Path) -> str | None:
    """Describe what is wrong with the state of a checkpoint, as far as all runs have it."""
    try:
        state = json.loads(read_contained(directory, STATE_FILE))
        is_valid = (
            type(state["step"]) is int
            and isinstance(state.get("experiment", {}), dict)
            and 0.0 <= float(state.get("seconds", 0.0)) < math.inf
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, MachineError):
        is_valid = False
    return None if is_valid else f"{STATE_FILE} is no state of a run"


def _file_damage(directory: Path, name: str, size: object, digest: object) -> str | None:
    """Describe how a file differs from the manifest."""
    path = directory / name
    if not is_contained(directory, path):
        return f"its manifest names {name}, which is outside the checkpoint"
    try:
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if _digest(path) != digest:
            return f"{name} does not match its hash"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return None
