"""New weights for a running vLLM: whether they are whole, and how they get into its processes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from quintet.policies.file_names import in_files
from quintet.rollout.engine import EngineFault

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["WeightPlan", "weight_file"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a file in memory, in a directory of its own


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The names and shapes that a stream of weights must have."""

    shapes: Mapping[str, tuple[int, ...]]
    aliases: tuple[tuple[str, str], ...]
    """`(alias, name)` of tied weights. vLLM keeps a packed copy of a tied head: it must be sent under both names, or
    the head silently stays what it was."""
    model: PreTrainedModel | None = None
    """Whose files have the names that the engine reads."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> WeightPlan:
        """Those of the learner's model; adapters count as merged into the layers that they are on."""
        first: dict[int, str] = {}
        aliases = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if ".lora_" in name:
                continue
            plain = name.replace(".base_layer.", ".")
            known = first.setdefault(id(parameter), plain)
            if known != plain:
                aliases.append((plain, known))
        shapes = {
            name.replace(".base_layer.", "."): tuple(parameter.shape)
            for name, parameter in model.named_parameters()
            if ".lora_" not in name
        }
        return cls(shapes, tuple(aliases), model)

    def take(self, stream: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """All weights of the stream but the aliases, under the names of the model's files. Read to its end before the
        engine is touched, so that a stream that isn't whole leaves the engine as it was.

        Raises:
            EngineFault: a weight is missing, unknown, or of another shape.
        """
        known = self.shapes.keys() | {alias for alias, _ in self.aliases}
        weights = {}
        for name, tensor in stream:
            if name not in known:
                raise EngineFault(f"the engine has no weight {name!r}")
            if name in self.shapes:
                self._fits(name, tensor)
                weights[name] = tensor.detach()
        if missing := [name for name in self.shapes if name not in weights]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise EngineFault(f"the weights lack {missing[0]!r}{more}")
        return weights if self.model is None else dict(in_files(self.model, weights.items()))

    def _fits(self, name: str, tensor: Tensor) -> None:
        if tuple(tensor.shape) != self.shapes[name]:
            raise EngineFault(f"weight {name!r} is {list(tensor.shape)}, the engine's is {list(self.shapes[name])}")

    def whole(self, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The weights and their aliases."""
        yield from weights.items()
        for alias, name in self.aliases:
            yield alias, weights[name]


@contextmanager
def weight_file(weights: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[Path]:
    """A file with the weights that other processes of this machine can read, in memory where they fit there."""
    stored = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in weights.items()}
    size = sum(tensor.nbytes for tensor in stored.values())
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * size
    with tempfile.TemporaryDirectory(prefix="quintet-weights-", dir=SHARED_MEMORY if roomy else None) as directory:
        path = Path(directory) / "model.safetensors"
        save_file(stored, path)
        yield path
