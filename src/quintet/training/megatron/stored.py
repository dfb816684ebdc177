"""The tensors of a Hugging Face directory, read one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from quintet.errors import MachineError

__all__ = ["StoredWeights"]


class StoredWeights(Mapping[str, Tensor]):
    """The tensors of a Hugging Face directory's safetensors, each read when it is asked for."""

    def __init__(self, directory: Path) -> None:
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            self._file = {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
            return
        path = directory / "model.safetensors"
        if not path.is_file():
            raise MachineError(f"no safetensors at {directory}", "store the model with save_pretrained")
        with safe_open(path, "pt") as file:
            self._file = dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._file[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)
