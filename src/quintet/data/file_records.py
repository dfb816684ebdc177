"""Records of the data files of a run: name, hash and number of rows."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from quintet.config.native.data import DataConfig
from quintet.data.data_files import cache_directory, resolve_files
from quintet.data.tables import open_table


def describe_data_files(data: DataConfig) -> list[dict[str, Any]]:
    """Return split, name, SHA-256 and rows of each data file, as JSON values.

    Raises:
        ConfigError: a name matches no file, or a file is unreadable.
        MachineError: a remote file cannot be copied, or the cache cannot be written.
    """
    cache = cache_directory(data.cache_dir)
    splits = {"train": data.train_files, "validation": data.validation_files}
    return [
        {"split": split, "name": path.name, "sha256": _digest(path), "rows": len(open_table(path, key, cache))}
        for split, names in splits.items()
        for key in [f"data.{split}_files"]
        for files in resolve_files(names, key, cache)
        for path in files
    ]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
