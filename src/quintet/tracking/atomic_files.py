"""Atomic file writes, and operating-system errors as user-facing messages."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quintet.errors import MachineError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NOT_A_DIRECTORY = frozenset({errno.ENOTDIR, errno.EEXIST})
OUTPUT_KEY = "output_dir"
TEMPORARY_KEY = "TMPDIR"
"""Environment variable of the directory for temporary files."""


@contextmanager
def translate_os_errors(path: Path | str, key: str = OUTPUT_KEY) -> Iterator[None]:
    """Translate `OSError`s inside the block to one message about `path`, which the config key `key` names.

    Raises:
        MachineError: Full disk, missing permission, a file in place of a directory, or a missing file.
    """
    try:
        yield
    except OSError as error:
        raise _machine_error(Path(path), error, key) from error
    except Exception as error:
        # safetensors and tokenizers report the errno only in a message: "… (os error 28)"
        if number := re.search(r"os error (\d+)", str(error)):
            os_error = OSError(int(number[1]), os.strerror(int(number[1])))
            raise _machine_error(Path(path), os_error, key) from error
        raise


def _machine_error(path: Path, error: OSError, key: str) -> MachineError:
    if error.errno in _FULL:
        hint = "free some space, and the same command resumes from the last checkpoint"
        other = f"or set {key} to another disk" if key == TEMPORARY_KEY else f"{key} on another disk starts a new run"
        return MachineError(f"disk full: cannot write {path}", f"{hint}; {other}")
    if error.errno in _FORBIDDEN:
        return MachineError(f"no permission to write {path} ({error.strerror})", writable_hint(key))
    if error.errno in _NOT_A_DIRECTORY and (link := _dangling_link(path)) is not None:
        hint = f"create that directory or remove the link, or {writable_hint(key)}"
        return MachineError(f"{link} is a link to {link.readlink()}, which does not exist", hint)
    if error.errno in _NOT_A_DIRECTORY:
        return MachineError(f"{path} cannot be a directory: a file with that name exists", writable_hint(key))
    if error.errno == errno.ENOENT:
        hint = f"restore it, or set {key}=DIRECTORY to another directory"
        return MachineError(f"no such file: {error.filename or path}", hint)
    return MachineError(f"{path}: {error.strerror or error}")


def _dangling_link(path: Path) -> Path | None:
    """Return the link to nothing on the way to a path, if there is one."""
    return next((place for place in (path, *path.parents) if place.is_symlink() and not place.exists()), None)


def writable_hint(key: str = OUTPUT_KEY) -> str:
    """Return the hint of a directory that cannot be written."""
    return f"set {key}=DIRECTORY to a writable directory"


def write_atomic(path: Path, data: bytes, key: str = OUTPUT_KEY, *, flush: bool = True) -> None:
    """Write a file atomically: write a temporary file, flush it to disk and rename it. `key` is the configuration key
    of its directory.

    Without `flush` it is much faster, and the file may be empty after a power failure.

    Raises:
        MachineError: The file cannot be written; no temporary file is left behind.
    """
    temporary = path.with_name(f".{path.name}.partial")
    with translate_os_errors(path, key):
        if temporary.is_symlink():  # of a run directory from somebody else
            temporary.unlink()
        try:
            with open(temporary, "wb", opener=open_unlinked) as file:
                file.write(data)
                if flush:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        if flush:
            sync(path.parent)  # a rename survives a power failure only once the directory is on disk


def open_unlinked(path: str, flags: int) -> int:
    """Open a file, as the `opener` of `open`, unless its name is a link, which could name any file of this machine, or
    a pipe that nobody reads."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def sync(path: Path) -> None:
    """Flush a file or the entries of a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
