"""Files of a model directory that may come from somebody else: none outside of it is read."""

from __future__ import annotations

import json
from pathlib import Path

from quintet.contained_files import check_entries, contained_path
from quintet.errors import MachineError

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Files that name the file of each tensor, which transformers opens."""


def check_model_files(directory: Path) -> None:
    """Check that a model directory has no link out of it, and that its index names no file outside of it. Models in the
    cache of Hugging Face are links to files of their repository.

    Raises:
        MachineError: one of these; the message names the file.
    """
    snapshots = directory.resolve().parent
    is_cached = snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--")
    check_entries(directory, snapshots.parent if is_cached else None)
    check_index(directory)


def check_index(directory: Path) -> None:
    """Check that the index of a model's weights names no file outside of its directory.

    Raises:
        MachineError: it does, or is damaged.
    """
    for index in INDEXES:
        path = directory / index
        if path.is_file():
            for name in _files_in(path):
                if Path(name).name != name:
                    contained_path(directory, name)


def _files_in(index: Path) -> set[str]:
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
        return {name for name in names if isinstance(name, str)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MachineError(f"{index} is no index of weights: {error!r}") from error
