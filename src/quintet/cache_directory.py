"""Directories of the user's cache, on machines without a home, or with one that cannot be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

CACHE_VARIABLE = "QUINTET_CACHE"
"""Environment variable with the directory of the cache."""


def user_cache_directory() -> Path:
    """Return `$QUINTET_CACHE`, else `$XDG_CACHE_HOME/quintet`, else `~/.cache/quintet`, without creating it; a
    directory of the user for temporary files if the user has no home."""
    if cache := os.environ.get(CACHE_VARIABLE):
        return Path(cache).expanduser()
    if cache_home := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache_home) / "quintet"
    try:
        return Path.home() / ".cache" / "quintet"
    except RuntimeError:  # HOME is not set, and the user is not in the password database
        return temporary_cache_directory()


def temporary_cache_directory() -> Path:
    """Return a directory of the user for temporary files, without creating it. All processes share it."""
    return Path(tempfile.gettempdir()) / f"quintet-{os.getuid()}"


def private_directories() -> Iterator[Path]:
    """Create and yield directories that only this user can write: code may be loaded from them."""
    for directory in dict.fromkeys((user_cache_directory(), temporary_cache_directory())):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.lstat()
        except OSError:
            continue
        is_private = status.st_uid == os.getuid() and not status.st_mode & 0o022 and not directory.is_symlink()
        if is_private and os.access(directory, os.W_OK):
            yield directory
