"""From what a configuration names to files that are here: `~`, glob patterns, addresses of other machines."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quintet.errors import ConfigError, MachineError, nearest

__all__ = ["cache_directory", "find_files", "made_whole"]

LOCAL = "file://"


def cache_directory(configured: str | None) -> Path:
    """`data.cache_dir`, else `$XDG_CACHE_HOME/quintet`, else `~/.cache/quintet`; not made yet."""
    if configured is not None:
        return Path(configured).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "quintet"


def find_files(names: Sequence[str], key: str, cache: Path) -> tuple[tuple[Path, ...], ...]:
    """The files of each name, in the order given; those of a pattern in alphabetical order.

    Raises:
        ConfigError: a name that stands for no file.
        MachineError: a file of another machine that can't be copied.
    """
    return tuple(_find(name, key, cache) for name in names)


def _find(name: str, key: str, cache: Path) -> tuple[Path, ...]:
    plain = name.removeprefix(LOCAL)
    if "://" in plain:
        return _from_elsewhere(plain, key, cache)
    path = Path(plain).expanduser()
    if path.is_file():
        return (path,)
    if path.is_dir():
        hint = f"name the files in it, such as {path / '*.parquet'}"
        raise ConfigError(f"{key}: {name} is a directory", key=key, value=name, hint=hint)
    found = tuple(Path(file) for file in sorted(glob.glob(str(path), recursive=True)) if Path(file).is_file())
    if not found:
        raise ConfigError(f"{key}: there is no file {path}", key=key, value=name, hint=_what_is_there(path))
    return found


def _what_is_there(path: Path) -> str:
    """What lies where the file was looked for, in words."""
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    if any(sign in str(folder.relative_to(folder.anchor)) for sign in "*?["):
        return "check the pattern"
    here = sorted(entry.name for entry in folder.iterdir())
    if folder == path.absolute().parent and (close := nearest(path.name, here)):
        return f"did you mean {folder / close}?"
    told = f"{folder} holds {', '.join(here[:8])}" if here else f"{folder} is empty"
    return f"{told}; `quintet data make` makes data of verifiable tasks"


def _from_elsewhere(url: str, key: str, cache: Path) -> tuple[Path, ...]:
    """Copies of what lies at an address that `fsspec` understands."""
    scheme = url.partition("://")[0]
    try:
        import fsspec  # type: ignore[import-untyped]

        system, place = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        hint = f"install what it names ({error}), or copy the file here and give its path"
        raise ConfigError(f"{key}: can't read {scheme}://", key=key, value=url, hint=hint) from error
    try:
        places = sorted(system.glob(place)) if glob.has_magic(place) else [place]
        copies = tuple(_copy(system, one, cache) for one in places)
    except (OSError, ValueError, ImportError) as error:
        told = f"{key}: can't copy {url} to {cache}: {type(error).__name__}: {error}"
        raise MachineError(told, "copy the file here by hand and give its path") from error
    if not copies:
        raise ConfigError(f"{key}: nothing matches {url}", key=key, value=url, hint="check the pattern")
    return copies


def _copy(system: Any, place: str, cache: Path) -> Path:
    """A file's copy under a name that changes when the file does, made once."""
    name = place.rpartition("/")[2]
    mark = hashlib.sha256(f"{system.protocol}/{place}/{system.ukey(place)}".encode()).hexdigest()[:16]
    copy = cache / "copies" / f"{mark}-{name}"
    if not copy.is_file():
        made_whole(copy, lambda part: system.get_file(place, str(part)))
    return copy


def made_whole(path: Path, make: Callable[[Path], object]) -> None:
    """Have `make` write a file under another name beside `path`, then give it its own: it is there whole or not
    at all, also when several processes make it.

    Raises:
        MachineError: it can't be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            make(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(f"can't write {path}: {error}", "make room there, or name another directory") from error
