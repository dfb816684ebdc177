"""Weight sync to SGLang: check names, cast to the engine's dtype, transfer in buckets."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quintet.errors import MachineError, nearest
from quintet.policies.vision.image_encoder import is_vision_language
from quintet.rollout.engines.engine import EngineError, EngineSetup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory is created in it
BUCKET_BYTES = 1 << 30
"""Size of the weights that are in memory twice."""


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names of the weights that SGLang requires, and of those that it accepts besides: tied weights, buffers."""

    required: frozenset[str]
    allowed: frozenset[str]
    file_names: Mapping[str, str] = field(default_factory=dict)
    """Names in files of weights that have others in memory."""

    @classmethod
    def from_setup(cls, setup: EngineSetup) -> WeightNames:
        """Read the names from the model's directory; weights tied to another one are not required."""
        state = frozenset(setup.model.state_dict())
        parameters = frozenset(name for name, _ in setup.model.named_parameters())
        stored = frozenset(_stored_names(setup.directory)) or parameters
        file_names = _file_names(setup.model) if is_vision_language(setup.model.config) else {}
        return cls(stored - (state - parameters), stored | state, file_names)

    def check(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under their names in files and check these, because SGLang ignores unknown names and keeps
        old values of missing ones.

        Raises:
            EngineError: a weight is unknown to SGLang, or one is missing.
        """
        loaded: set[str] = set()
        for known_name, tensor in weights:
            name = self.file_names.get(known_name, known_name)
            if name not in self.allowed:
                close = nearest(name, self.required)
                raise EngineError(f"SGLang has no weight {name!r}" + (f"; the nearest is {close!r}" if close else ""))
            loaded.add(name)
            yield name, tensor
        if missing := sorted(self.required - loaded):
            raise EngineError(f"the weight sync lacks {len(missing)} weights of SGLang, the first is {missing[0]!r}")


def _file_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the names in files of a vision-language model's weights."""
    from transformers.core_model_loading import revert_weight_conversion

    return {
        name: next(iter(revert_weight_conversion(model, {name: parameter})))
        for name, parameter in model.named_parameters()
    }


def _stored_names(directory: Path) -> Iterator[str]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from file.keys()


def buckets(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, max_bytes: int = BUCKET_BYTES
) -> Iterator[dict[str, Tensor]]:
    """Yield weights in `dtype` in buckets of at most `max_bytes`, or a single weight."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        cast = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
        if bucket and size + cast.nbytes > max_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = cast
        size += cast.nbytes
    if bucket:
        yield bucket


@contextmanager
def weights_on_disk(stream: Iterable[Mapping[str, Tensor]], directory: Path | None) -> Iterator[Path]:
    """Provide a temporary directory with the weights as safetensors, in `directory` (default: shared memory if it
    exists, else the directory for temporary files).

    Raises:
        MachineError: there is not enough space.
    """
    parent = directory or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
    with TemporaryDirectory(prefix="quintet-weights-", dir=parent) as folder:
        for number, bucket in enumerate(stream):
            _check_space(Path(folder), sum(tensor.nbytes for tensor in bucket.values()))
            save_file(_savable(bucket), Path(folder, f"model-{number:05}.safetensors"), metadata={"format": "pt"})
        yield Path(folder)


def _savable(bucket: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors that share no memory, as safetensors requires."""
    tensors, addresses = dict[str, Tensor](), set[int]()
    for name, tensor in bucket.items():
        contiguous = tensor.contiguous().cpu()
        address = contiguous.untyped_storage().data_ptr()
        tensors[name] = contiguous.clone() if address in addresses else contiguous
        addresses.add(address)
    return tensors


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed * 1.02 + (1 << 20):
        raise MachineError(
            f"{folder.parent} has {free / 2**30:.1f} GiB of free space, "
            f"but the next weights need {needed / 2**30:.1f} GiB",
            hint="set rollout.engine_options.server_weights_dir to a directory with more space",
        )
