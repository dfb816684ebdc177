"""Lazy reader of the weights in a Hugging Face model directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from quintet.errors import MachineError


class HfWeights(Mapping[str, Tensor]):
    """Mapping of the tensors in a Hugging Face directory's safetensors, each loaded on access."""

    def __init__(self, directory: Path) -> None:
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            self._files = {
                name: directory / file
                for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
            }
            return
        path = directory / "model.safetensors"
        if not path.is_file():
            raise MachineError(f"no safetensors in {directory}", "save the model with save_pretrained")
        with safe_open(path, "pt") as file:
            self._files = dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
