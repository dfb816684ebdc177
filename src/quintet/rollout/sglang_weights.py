"""Weights on their way into SGLang: looked over, cast, and handed on piece by piece."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quintet.errors import MachineError, nearest
from quintet.rollout.engine import EngineFault

if TYPE_CHECKING:
    from quintet.rollout.engine import EngineSetup

__all__ = ["SHARED_MEMORY", "Names", "bundles", "on_disk"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of our own is made in it
BUNDLE_BYTES = 1 << 30
"""Weights that are in memory twice at a time."""


@dataclass(frozen=True, slots=True)
class Names:
    """The weights that an engine must be given, and those that it may be given besides: tied ones, buffers."""

    required: frozenset[str]
    allowed: frozenset[str]

    @classmethod
    def of(cls, setup: EngineSetup) -> Names:
        """Those of the model's directory, less what is tied to another one."""
        held = frozenset(setup.model.state_dict())
        own = frozenset(name for name, _ in setup.model.named_parameters())
        stored = frozenset(_stored(setup.directory)) or own
        return cls(stored - (held - own), stored | held)

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The stream as it comes; SGLang passes over names that it doesn't know, and keeps what it isn't given.

        Raises:
            EngineFault: a weight has no place in the engine, or the stream lacks one.
        """
        seen: set[str] = set()
        for name, tensor in weights:
            if name not in self.allowed:
                close = nearest(name, self.required)
                raise EngineFault(f"SGLang has no weight {name!r}" + (f"; the nearest is {close!r}" if close else ""))
            seen.add(name)
            yield name, tensor
        if missing := sorted(self.required - seen):
            raise EngineFault(f"the new weights lack {len(missing)} that SGLang needs, {missing[0]!r} first")


def _stored(directory: Path) -> Iterator[str]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from file.keys()


def bundles(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, limit: int = BUNDLE_BYTES
) -> Iterator[dict[str, Tensor]]:
    """The stream in the engine's type, some weights at a time: at most `limit` bytes, or one weight."""
    bundle: dict[str, Tensor] = {}
    held = 0
    for name, tensor in weights:
        cast = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
        if bundle and held + cast.nbytes > limit:
            yield bundle
            bundle, held = {}, 0
        bundle[name] = cast
        held += cast.nbytes
    if bundle:
        yield bundle


@contextmanager
def on_disk(stream: Iterable[Mapping[str, Tensor]], place: Path | None) -> Iterator[Path]:
    """A directory under `place` with the weights as safetensors, gone afterwards. null takes shared memory, which
    costs no disk, or else the directory for temporary files.

    Raises:
        MachineError: there is no room.
    """
    where = place or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
    with TemporaryDirectory(prefix="quintet-weights-", dir=where) as folder:
        for number, bundle in enumerate(stream):
            _room(Path(folder), sum(tensor.nbytes for tensor in bundle.values()))
            save_file(_apart(bundle), Path(folder, f"model-{number:05}.safetensors"), metadata={"format": "pt"})
        yield Path(folder)


def _apart(bundle: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As they can be written: in one piece each, and none in the memory of another, as tied ones are."""
    found, used = dict[str, Tensor](), set[int]()
    for name, tensor in bundle.items():
        piece = tensor.contiguous().cpu()
        place = piece.untyped_storage().data_ptr()
        found[name] = piece.clone() if place in used else piece
        used.add(place)
    return found


def _room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed * 1.02 + (1 << 20):
        raise MachineError(
            f"{folder.parent} has {free / 2**30:.1f} GiB left, and the next weights take {needed / 2**30:.1f}",
            hint="name another directory with rollout.engine_options.server_weights_dir",
        )
