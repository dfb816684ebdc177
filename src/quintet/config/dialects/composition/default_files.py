"""Files in Hydra's defaults lists, as far as they tell which framework a configuration is of. Loads no Hydra."""

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from quintet.config.yaml_reader import read_file, read_text
from quintet.errors import ConfigError

LINK_TEXT = re.compile(r"\.{1,2}/[\w./-]+\.yaml\s*")
"""Content of a symbolic link that was checked out as a file, as on Windows or from an archive."""
MAX_FILES = 50
"""Files that are read to detect a framework; a run has fewer."""


def link_target(file: Path) -> Path | None:
    """Return the file that a symbolic link points to which was checked out as a file with its target as text; None for
    any other file."""
    if not file.is_file() or file.stat().st_size > 512:
        return None
    text = read_text(file)
    return file.parent / text.strip() if LINK_TEXT.fullmatch(text) else None


def is_broken_link(file: Path) -> bool:
    """Whether a file is the text of a symbolic link to a file that does not exist."""
    target = link_target(file)
    return target is not None and not target.is_file()


def is_beside(file: Path, directory: Path) -> bool:
    """Whether a file is beside or below a directory after symbolic links are followed. Those that lead elsewhere would
    read files of this machine that nobody has named."""
    try:
        return file.resolve().is_relative_to(directory.resolve().parent)
    except (OSError, RuntimeError):  # links that lead to each other
        return False


def trees_with_defaults(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the tree of a file, then those of the files beside it in its defaults list, and so on, each once.

    Raises:
        ConfigError: a file is no YAML mapping, or the text of a broken link.
        MachineError: one cannot be read.
    """
    if is_broken_link(path):
        message = f"{path} is the text of a symbolic link to {link_target(path)}, which does not exist"
        hint = "check out the submodule that has the file, or give a file that names this one in its defaults list"
        raise ConfigError(message, source=str(path), hint=hint)
    files = [path]
    for file in files:
        tree = read_file(link_target(file) or file, {})
        yield tree
        named = (path.parent / f"{name.removesuffix('.yaml')}.yaml" for name in default_names(tree))
        beside = (other for other in named if is_beside(other, path.parent))
        new = (other for other in beside if other not in files and other.is_file() and not is_broken_link(other))
        files += islice(dict.fromkeys(new), MAX_FILES - len(files))


def default_names(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names in a defaults list of files whose keys are those of the run, not of a section or a group."""
    defaults = tree.get("defaults")
    for entry in defaults if isinstance(defaults, list) else ():
        if isinstance(entry, str) and entry != "_self_" and not set(entry) & set("@/"):
            yield entry
