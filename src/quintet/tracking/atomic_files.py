"""Atomic file writes, and operating-system errors as user-facing messages."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from quintet.errors import MachineError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_NOT_A_DIRECTORY = frozenset({errno.ENOTDIR, errno.EEXIST})
WRITABLE_HINT = "set `output_dir` to a writable directory"


@contextmanager
def translate_os_errors(path: Path | str) -> Iterator[None]:
    """Translate `OSError`s inside the block to one message about `path`.

    Raises:
        MachineError: Full disk, missing permission, a file in place of a directory, or a missing file.
    """
    try:
        yield
    except OSError as error:
        raise _machine_error(Path(path), error) from error
    except SafetensorError as error:
        # safetensors reports the errno only in its message: "… (os error 28)"
        if number := re.search(r"os error (\d+)", str(error)):
            os_error = OSError(int(number[1]), os.strerror(int(number[1])))
            raise _machine_error(Path(path), os_error) from error
        raise


def _machine_error(path: Path, error: OSError) -> MachineError:
    if error.errno in _FULL:
        return MachineError(
            f"disk full: cannot write {path}",
            hint="free some space, or set `output_dir` to another disk; the same command then resumes from the last "
            "checkpoint",
        )
    if error.errno in _FORBIDDEN:
        return MachineError(f"no permission to write {path} ({error.strerror})", hint=WRITABLE_HINT)
    if error.errno in _NOT_A_DIRECTORY:
        return MachineError(f"{path} cannot be a directory: a file with that name exists", hint=WRITABLE_HINT)
    if error.errno == errno.ENOENT:
        return MachineError(f"no such file: {error.filename or path}", hint="check the path")
    return MachineError(f"{path}: {error.strerror or error}")


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically: write a temporary file, flush it to disk and rename it.

    Raises:
        MachineError: The file cannot be written; no temporary file is left behind.
    """
    temporary = path.with_name(f".{path.name}.partial")
    with translate_os_errors(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """Flush the directory: a rename survives a power failure only once the directory is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
