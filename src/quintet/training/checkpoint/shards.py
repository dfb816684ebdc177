"""Sharded tensors in files that any number of ranks can read.

Each rank writes its shards to `<stem>_world_size_<n>_rank_<k>.safetensors` and a JSON table with each shard's tensor
and offsets. The planners of torch.distributed.checkpoint (DCP) decide which shards a rank writes and which slices it
reads under another parallel layout; DCP's own file format is not used because it contains pickles.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from quintet.contained_files import contained_path
from quintet.errors import MachineError
from quintet.training.checkpoint.safetensors_files import DTYPES, write_tensors
from quintet.training.parallel.process_group import RankGroup

DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
HINT_OTHER_MODEL = "it belongs to another model: set policy.path and policy.lora as in the run that saved it"
TensorLocation = tuple[str, str]
"""Safetensors file, relative to the checkpoint, and tensor name in it."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """Shard in this rank's memory: the slice at `offsets` of the tensor `name` with full `shape`."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def key(self) -> str:
        """Name of the shard in a file."""
        is_full = tuple(self.tensor.shape) == self.shape
        return self.name if is_full else f"{self.name}@{','.join(map(str, self.offsets))}"


@dataclass(frozen=True, slots=True)
class _ShardEntry:
    """Row of a table of shards."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


def local_shards(tensors: Mapping[str, Tensor], ranks: RankGroup) -> list[TensorShard]:
    """Return the shards that this rank writes; replicated shards are written by the first rank that has them. All ranks
    call it; tensors may be plain, DTensors or FSDP1's sharded tensors, and are not copied."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=ranks.rank == 0)
    shards: list[TensorShard] = []
    for item in planner.create_local_plan().items:
        tensor, data = planner.resolve_data(item), item.tensor_data
        if data is not None and isinstance(tensor, Tensor) and tensor.numel():
            shards.append(TensorShard(item.index.fqn, tuple(data.size), tuple(data.chunk.offsets), tensor.detach()))
    owners: dict[str, int] = {}
    for rank, keys in enumerate(ranks.all_gather([shard.key for shard in shards])):
        for key in keys:
            owners.setdefault(key, rank)
    return [shard for shard in shards if owners[shard.key] == ranks.rank]


def write_shards(
    checkpoint: Path,
    stem: str,
    shards: list[TensorShard],
    ranks: RankGroup,
    written: Mapping[int, TensorLocation] | None = None,
) -> None:
    """Write CPU shards and their table; `stem` is for example `actor/optim`. Tensors whose `id` is in `written` are
    already in another file of the checkpoint."""
    name = f"{stem}_world_size_{ranks.size}_rank_{ranks.rank}"
    (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
    rows: list[_ShardEntry] = []
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        location = (written or {}).get(id(shard.tensor))
        if location is None:
            location = f"{name}.safetensors", shard.key
            tensors[shard.key] = shard.tensor
        dtype = DTYPES[shard.tensor.dtype]
        rows.append(_ShardEntry(shard.name, dtype, shard.shape, shard.offsets, tuple(shard.tensor.shape), *location))
    if tensors:
        write_tensors(checkpoint / f"{name}.safetensors", tensors)
    (checkpoint / f"{name}.json").write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")


class ShardReader:
    """Reads tensors from the shards that all ranks have written."""

    def __init__(self, checkpoint: Path, shards: list[_ShardEntry]) -> None:
        """
        Raises:
            MachineError: shards of a tensor are missing.
        """
        self._checkpoint = checkpoint
        self._shards: dict[str, dict[tuple[int, ...], _ShardEntry]] = {}
        for shard in shards:
            self._shards.setdefault(shard.name, {})[shard.offsets] = shard
        for name, parts in self._shards.items():
            if self.shape(name).numel() > sum(math.prod(part.sizes) for part in parts.values()):
                raise MachineError(f"{checkpoint} has only a part of {name}")

    @classmethod
    def open(cls, checkpoint: Path, stem: str) -> ShardReader | None:
        """Return a reader of the result of `write_shards`; None if there is none.

        Raises:
            MachineError: the tables of some ranks are missing or invalid.
        """
        tables = [path for path in checkpoint.glob(f"{stem}_world_size_*_rank_*.json") if _world_size(path)]
        if not tables:
            return None
        if len(tables) != _world_size(tables[0]):
            raise MachineError(
                f"{checkpoint} has only {len(tables)} of the {_world_size(tables[0])} shard tables {stem}_*.json"
            )
        return cls(checkpoint, [shard for path in sorted(tables) for shard in _read_table(path)])

    @property
    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._shards)

    def shape(self, name: str) -> torch.Size:
        """Return the shape of the full tensor."""
        return torch.Size(self._first(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return DTYPES_BY_NAME[self._first(name).dtype]

    def _first(self, name: str) -> _ShardEntry:
        return next(iter(self._shards[name].values()))

    @torch.no_grad()
    def load_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Load values into the tensors, each rank its own shards; dtypes are converted.

        Raises:
            MachineError: a tensor is missing or has another shape.
        """
        for name, tensor in tensors.items():
            if name not in self._shards:
                raise MachineError(f"{self._checkpoint} has no tensor {name}", HINT_OTHER_MODEL)
            if self.shape(name) != tensor.size():
                problem = f"{name} has shape {list(self.shape(name))} in {self._checkpoint}, not {list(tensor.size())}"
                raise MachineError(problem, HINT_OTHER_MODEL)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), self._metadata(tensors), is_coordinator=False)
        with _Files(self._checkpoint) as files:
            for item in planner.create_local_plan().items:
                planner.resolve_tensor(item).copy_(files.read(self._shard(item.storage_index), item))

    def _shard(self, index: MetadataIndex) -> _ShardEntry:
        return self._shards[index.fqn][tuple(index.offset or ())]

    def _metadata(self, names: Mapping[str, Any]) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=self.dtype(name)),
                    self.shape(name),
                    [
                        ChunkStorageMetadata(torch.Size(shard.offsets), torch.Size(shard.sizes))
                        for shard in self._shards[name].values()
                    ],
                )
                for name in names
            }
        )


class _Files:
    """Open safetensors files of a checkpoint, which may come from somebody else."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._open: dict[str, Any] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)

    def read(self, shard: _ShardEntry, item: ReadItem) -> Tensor:
        """Return the requested slice of the shard.

        Raises:
            MachineError: the file leaves the checkpoint, or does not have the shard.
        """
        from safetensors import SafetensorError, safe_open

        path = contained_path(self._checkpoint, shard.file)
        try:
            if shard.file not in self._open:
                open_file: Callable[..., Any] = safe_open
                self._open[shard.file] = open_file(path, framework="pt").__enter__()
            file = self._open[shard.file]
            if not shard.sizes:
                tensor: Tensor = file.get_tensor(shard.key)
                return tensor
            offsets, lengths = item.storage_offsets, item.lengths
            tensor_slice: Tensor = file.get_slice(shard.key)[
                tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))
            ]
        except (OSError, SafetensorError, IndexError, ValueError, RuntimeError) as error:
            raise MachineError(f"{path} has no valid {shard.key}: {error}") from error
        return tensor_slice


def _world_size(table: Path) -> int:
    """Return the number of ranks in a table's file name; 0 if it is not the name of a table."""
    match = re.search(r"_world_size_(\d+)_rank_\d+\.json$", table.name)
    return int(match[1]) if match else 0


def _read_table(table: Path) -> list[_ShardEntry]:
    try:
        entries = TypeAdapter(list[_ShardEntry]).validate_json(table.read_bytes())
        for entry in entries:
            _check_entry(table.parent.parent, entry)
    except (ValueError, OSError) as error:
        raise MachineError(f"{table} is not a valid table of shards: {error}") from error
    return entries


def _check_entry(checkpoint: Path, entry: _ShardEntry) -> None:
    """
    Raises:
        ValueError: the dtype is unknown, the slice is not within the tensor, or larger than its file.
        MachineError: the file leaves the checkpoint.
    """
    slices = zip(entry.offsets, entry.sizes, entry.shape, strict=True)
    if entry.dtype not in DTYPES_BY_NAME or not all(at >= 0 and size > 0 and at + size <= n for at, size, n in slices):
        raise ValueError(f"{entry.name} has an invalid slice or dtype")
    needed = math.prod(entry.sizes) * DTYPES_BY_NAME[entry.dtype].itemsize
    if needed > contained_path(checkpoint, entry.file).stat().st_size:
        raise ValueError(f"{entry.name} is larger than {entry.file}")
