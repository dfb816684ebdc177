"""Resolution of configured file names: `~`, glob patterns and remote URLs, which are copied to the cache."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quintet.cache_directory import user_cache_directory
from quintet.errors import ConfigError, MachineError, nearest

LOCAL_SCHEME = "file://"
DATASET_STATE = "state.json"
"""File in a directory of `save_to_disk` that lists its Arrow files."""


def cache_directory(configured: str | None) -> Path:
    """Return `data.cache_dir`, else the user's cache, without creating it."""
    if configured is not None:
        return Path(configured).expanduser()
    return user_cache_directory()


def resolve_files(names: Sequence[str], key: str, cache: Path) -> tuple[tuple[Path, ...], ...]:
    """Return the files of each name, in order; the files of a pattern in alphabetical order.

    Raises:
        ConfigError: a name matches no file.
        MachineError: a remote file cannot be copied.
    """
    return tuple(_resolve(name, key, cache) for name in names)


def _resolve(name: str, key: str, cache: Path) -> tuple[Path, ...]:
    path_or_url = name.removeprefix(LOCAL_SCHEME)
    if "://" in path_or_url:
        return _download(path_or_url, key, cache)
    path = Path(path_or_url).expanduser()
    if path.is_file():
        return (path,)
    if path.is_dir():
        if files := _saved_dataset(path):
            return files
        splits = [split.name for split in sorted(path.iterdir()) if (split / DATASET_STATE).is_file()]
        hint = f"name files in it, such as {path / (splits[0] if splits else '*.parquet')}"
        raise ConfigError(f"{key}: {name} is a directory", key=key, value=name, hint=hint)
    matches = tuple(Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if Path(file).is_file())
    if not matches:
        raise ConfigError(f"{key}: no such file: {path}", key=key, value=name, hint=_missing_file_hint(path))
    return matches


def _saved_dataset(directory: Path) -> tuple[Path, ...]:
    """Return the Arrow files of a directory that `save_to_disk` of Hugging Face's datasets has written; none of another
    directory."""
    try:
        state = json.loads((directory / DATASET_STATE).read_bytes())
        return tuple(directory / Path(file["filename"]).name for file in state["_data_files"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def _missing_file_hint(path: Path) -> str:
    """Return a hint with similar names or the content of the directory."""
    parent = next(parent for parent in path.absolute().parents if parent.is_dir())
    if glob.has_magic(str(parent)):
        return f"* ? and [ make a pattern: write {glob.escape(str(parent))}/…"
    siblings = sorted(entry.name for entry in parent.iterdir())
    if parent == path.absolute().parent and (close := nearest(path.name, siblings)):
        return f"did you mean {parent / close}?"
    message = f"{parent} contains {', '.join(siblings[:8])}" if siblings else f"{parent} is empty"
    return f"{message}; `quintet data make` generates data of verifiable tasks"


def _download(url: str, key: str, cache: Path) -> tuple[Path, ...]:
    """Copy the files of an `fsspec` URL to the cache and return the copies."""
    scheme = url.partition("://")[0]
    try:
        import fsspec  # type: ignore[import-untyped]

        filesystem, remote_path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        hint = f"install the missing package ({error}), or copy the file to this machine and set {key} to its path"
        raise ConfigError(f"{key}: cannot read {scheme}:// URLs", key=key, value=url, hint=hint) from error
    try:
        remote_paths = sorted(filesystem.glob(remote_path)) if glob.has_magic(remote_path) else [remote_path]
        copies = tuple(_download_file(filesystem, source, cache) for source in remote_paths)
    except (OSError, ValueError, ImportError) as error:
        message = f"{key}: cannot copy {url} to {cache}: {type(error).__name__}: {error}"
        raise MachineError(message, f"copy the file to this machine and set {key} to its path") from error
    if not copies:
        hint = f"correct the pattern, such as {url.rpartition('/')[0]}/*"
        raise ConfigError(f"{key}: no file matches {url}", key=key, value=url, hint=hint)
    return copies


def _download_file(filesystem: Any, remote_path: str, cache: Path) -> Path:
    """Copy a file once, under a name that changes with the file."""
    name = remote_path.rpartition("/")[2]
    digest = hashlib.sha256(f"{filesystem.protocol}/{remote_path}/{filesystem.ukey(remote_path)}".encode()).hexdigest()[
        :16
    ]
    copy = cache / "copies" / f"{digest}-{name}"
    if not copy.is_file():
        write_atomically(copy, lambda temporary: filesystem.get_file(remote_path, str(temporary)))
    return copy


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path next to `path`, then rename the file to `path`.

    The file is complete or absent, even if several processes write it.

    Raises:
        MachineError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "free disk space, or use another directory" if is_full else "use another directory"
        raise MachineError(f"cannot write {path}: {error.strerror or error}", hint) from error
