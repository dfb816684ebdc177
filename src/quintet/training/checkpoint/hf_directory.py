"""Model directories that transformers can load: weights, configuration, tokenizer.

`save_pretrained` writes the model itself in one blocking call. Here the small files are captured once, and weights are
written from copies in any thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING

from torch import Tensor

from quintet.tracking.atomic_files import TEMPORARY_KEY, translate_os_errors
from quintet.training.checkpoint.safetensors_files import write_tensors
from quintet.training.checkpoint.shards import TensorLocation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_FILE_BYTES = 8 << 30
"""Larger models are split into several files."""


@dataclass(frozen=True, slots=True)
class HfDirectory:
    """Files of a model directory that do not change while its weights are trained."""

    model: PreTrainedModel
    files: Mapping[str, bytes]

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> HfDirectory:
        """Capture configuration, generation settings, and custom code."""
        from transformers.dynamic_module_utils import custom_object_save

        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")

        def save(directory: Path) -> None:
            if model.is_remote_code():
                custom_object_save(model, directory, config=model.config)
            model.config.save_pretrained(directory)
            if (processor := getattr(model.base_model, "image_processor", None)) is not None:
                processor.save(directory)
            if hasattr(model, "save_files"):
                model.save_files(directory)
            if getattr(model, "generation_config", None) is not None:
                # its `save_pretrained` rejects settings of many published models
                model.generation_config.to_json_file(directory / "generation_config.json")

        return cls(model, capture_files(save))

    def write(self, checkpoint: Path, name: str, weights: Mapping[str, Tensor]) -> dict[int, TensorLocation]:
        """Write the directory `name` of a checkpoint from CPU weights, tied ones once. Return the location, by `id`, of
        each tensor that is stored unchanged."""
        from transformers.core_model_loading import revert_weight_conversion

        directory = checkpoint / name
        write_files(directory, self.files)
        # weights that transformers fuses in memory are separate in files
        converted: dict[str, Tensor] = revert_weight_conversion(self.model, dict(weights))
        shards = _split_files(converted)
        for file, tensors in shards.items():
            write_tensors(directory / file, tensors)
        if len(shards) > 1:
            _write_index(directory, shards)
        return {
            id(tensor): (f"{name}/{file}", key) for file, tensors in shards.items() for key, tensor in tensors.items()
        }


def capture_files(save: Callable[[Path], object]) -> dict[str, bytes]:
    """Return the contents of the files that `save(directory)` writes, by relative path."""
    with translate_os_errors(gettempdir(), TEMPORARY_KEY), TemporaryDirectory() as directory:
        save(Path(directory))
        paths = [path for path in Path(directory).rglob("*") if path.is_file()]
        return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write the result of `capture_files`."""
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)


def _split_files(weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in weights.items():
        added = tensor.numel() * tensor.element_size()
        if parts[-1] and size + added > MAX_FILE_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += added
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, 1)}


def _write_index(directory: Path, shards: Mapping[str, Mapping[str, Tensor]]) -> None:
    total = sum(tensor.numel() * tensor.element_size() for tensors in shards.values() for tensor in tensors.values())
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=1, sort_keys=True), encoding="utf-8"
    )
