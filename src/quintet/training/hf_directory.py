"""A model as a directory that transformers reads with nothing of ours: weights, configuration, tokenizer.

`transformers` writes one in a single call, from the model itself, and nothing else goes on meanwhile. Here the small
files are made once, and weights are written from copies, in whatever thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from torch import Tensor

from quintet.training.pieces import Place
from quintet.training.tensor_files import write_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["HfDirectory", "files_of", "put_files"]

SHARD_BYTES = 8 << 30
"""Larger models are cut into several files, as everywhere."""


@dataclass(frozen=True, slots=True)
class HfDirectory:
    """What of a model's directory stays the same while its weights are trained."""

    model: PreTrainedModel
    files: Mapping[str, bytes]

    @classmethod
    def of(cls, model: PreTrainedModel) -> HfDirectory:
        """Configuration, generation settings, and the code that belongs to them."""
        from transformers.dynamic_module_utils import custom_object_save

        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")

        def save(place: Path) -> None:
            if model.is_remote_code():
                custom_object_save(model, place, config=model.config)
            model.config.save_pretrained(place)
            if model.generation_config is not None:
                # its `save_pretrained` refuses settings that many models are published with
                model.generation_config.to_json_file(place / "generation_config.json")

        return cls(model, files_of(save))

    def write(self, checkpoint: Path, name: str, weights: Mapping[str, Tensor]) -> dict[int, Place]:
        """Write the directory `name` of a checkpoint, from weights in main memory; tied ones are there once. Gives
        where each tensor lies that lies there as it was given, by its `id`."""
        from transformers.core_model_loading import revert_weight_conversion

        directory = checkpoint / name
        put_files(directory, self.files)
        # several layers that are one in memory are several again in files
        stored: dict[str, Tensor] = revert_weight_conversion(self.model, dict(weights))
        shards = _shards(stored)
        for file, tensors in shards.items():
            write_tensors(directory / file, tensors)
        if len(shards) > 1:
            _write_index(directory, shards)
        return {id(tensor): (f"{name}/{file}", key) for file, held in shards.items() for key, tensor in held.items()}


def files_of(save: Callable[[Path], object]) -> dict[str, bytes]:
    """The small files that `save(directory)` writes, by their names."""
    with TemporaryDirectory() as place:
        save(Path(place))
        found = [path for path in Path(place).rglob("*") if path.is_file()]
        return {str(path.relative_to(place)): path.read_bytes() for path in found}


def put_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write what `files_of` gave."""
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)


def _shards(weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        added = tensor.numel() * tensor.element_size()
        if parts[-1] and size + added > SHARD_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += added
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, 1)}


def _write_index(directory: Path, shards: Mapping[str, Mapping[str, Tensor]]) -> None:
    total = sum(tensor.numel() * tensor.element_size() for held in shards.values() for tensor in held.values())
    places = {name: file for file, held in shards.items() for name in held}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))
