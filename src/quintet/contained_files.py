"""Files of a directory that may come from somebody else: none outside of it is read or written through a link.

Pipes and devices are refused as well, because reading them may never end.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from quintet.errors import MachineError

LINK_HINT = "replace the link by a copy of what it names"
NO_FILE_HINT = "remove it, or replace it by the original file"
MAX_LINE_BYTES = 64 << 20
"""A longer line is damaged; one with the tokens of an episode has a tenth of that."""
MAX_FILE_BYTES = 16 << 20
"""Size up to which a file is read as a whole."""


def is_contained(directory: Path, path: Path) -> bool:
    """Return whether a path is in a directory after all links are followed."""
    try:
        return path.resolve().is_relative_to(directory.resolve())
    except (OSError, RuntimeError):  # links that lead to each other
        return False


def contained_path(directory: Path, relative: Path | str) -> Path:
    """Return the path of a file of a directory, unless it is a link that leaves the directory: one that comes from
    somebody else must not show files of this machine. `relative` starts at the directory, or is absolute.

    Raises:
        MachineError: it leaves the directory.
    """
    path = directory / relative
    if not is_contained(directory, path):
        raise MachineError(f"{path} leads out of {directory}", LINK_HINT)
    return path


def open_contained(directory: Path, relative: Path | str) -> BinaryIO:
    """Open a file of a directory for reading.

    Raises:
        MachineError: it leaves the directory, or is no regular file.
        FileNotFoundError: it is missing.
    """
    path = contained_path(directory, relative)
    if not stat.S_ISREG(path.stat().st_mode):
        raise MachineError(f"{path} is not a file", NO_FILE_HINT)
    return path.open("rb")


def read_contained(directory: Path, relative: Path | str) -> bytes:
    """Return the contents of a file of a directory.

    Raises:
        MachineError: see `open_contained`; or it is too large.
        FileNotFoundError: it is missing.
    """
    with open_contained(directory, relative) as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise MachineError(
            f"{directory / relative} has more than {MAX_FILE_BYTES >> 20} MiB", "replace it by the original file"
        )
    return data


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file up to the first one that is too long, of which the beginning is yielded."""
    while line := file.readline(MAX_LINE_BYTES):
        yield line
        if len(line) == MAX_LINE_BYTES:
            return


def check_entries(directory: Path, root: Path | None = None) -> None:
    """Check that a directory has only files, directories, and links to what is in it, or in `root`.

    Raises:
        MachineError: it has another entry; the message names it.
    """
    for entry in _entries(directory):
        if entry.is_symlink():
            contained_path(root or directory, Path(entry.path).absolute())
        elif not entry.is_file() and not entry.is_dir():
            raise MachineError(f"{entry.path} is not a file", NO_FILE_HINT)


def _entries(directory: Path | str) -> Iterator[os.DirEntry[str]]:
    """Yield everything below a directory; directories that are links are not entered."""
    with suppress(FileNotFoundError), os.scandir(directory) as entries:  # deleted meanwhile by another rank
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(entry.path)
