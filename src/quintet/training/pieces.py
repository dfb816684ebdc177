"""Tensors that lie in pieces over several ranks, in files that any other number of ranks can read.

Each rank writes the pieces that it holds, `<stem>_world_size_<n>_rank_<k>.safetensors`, and beside them a table in
JSON that says of which tensor each is and where in it it lies. Which pieces those are, and which parts of them another
arrangement needs, torch.distributed.checkpoint's planners decide; its own files, which hold pickles, aren't used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
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

from quintet.errors import MachineError
from quintet.training.ranks import Ranks
from quintet.training.tensor_files import DTYPES, write_tensors

__all__ = ["Held", "Stored", "held_pieces", "write_pieces"]

TYPES = {name: dtype for dtype, name in DTYPES.items()}
Place = tuple[str, str]
"""A safetensors file, relative to the checkpoint, and a name in it."""


@dataclass(frozen=True, slots=True)
class Held:
    """A piece in this rank's memory: the part of the tensor `name`, of that whole `shape`, that begins at `offsets`."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def key(self) -> str:
        """Under which it lies in a file."""
        whole = tuple(self.tensor.shape) == self.shape
        return self.name if whole else f"{self.name}@{','.join(map(str, self.offsets))}"


@dataclass(frozen=True, slots=True)
class _Piece:
    """A row of a table."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


def held_pieces(tensors: Mapping[str, Tensor], ranks: Ranks) -> list[Held]:
    """The pieces that this rank has to write: of those that several hold, the first of them does. Every rank calls
    it; tensors are plain, DTensors or FSDP's, and none is copied."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=ranks.rank == 0)
    mine: list[Held] = []
    for item in planner.create_local_plan().items:
        found, data = planner.resolve_data(item), item.tensor_data
        if data is not None and isinstance(found, Tensor) and found.numel():
            mine.append(Held(item.index.fqn, tuple(data.size), tuple(data.chunk.offsets), found.detach()))
    owners: dict[str, int] = {}
    for rank, keys in enumerate(ranks.gather([held.key for held in mine])):
        for key in keys:
            owners.setdefault(key, rank)
    return [held for held in mine if owners[held.key] == ranks.rank]


def write_pieces(
    checkpoint: Path, stem: str, pieces: list[Held], ranks: Ranks, there: Mapping[int, Place] | None = None
) -> None:
    """Write pieces, in main memory, and their table: `stem` is `actor/optim`. Tensors whose `id` is in `there` lie in
    another file of the checkpoint already."""
    name = f"{stem}_world_size_{ranks.size}_rank_{ranks.rank}"
    (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
    rows: list[_Piece] = []
    own: dict[str, Tensor] = {}
    for held in pieces:
        place = (there or {}).get(id(held.tensor))
        if place is None:
            place = f"{name}.safetensors", held.key
            own[held.key] = held.tensor
        dtype = DTYPES[held.tensor.dtype]
        rows.append(_Piece(held.name, dtype, held.shape, held.offsets, tuple(held.tensor.shape), *place))
    if own:
        write_tensors(checkpoint / f"{name}.safetensors", own)
    (checkpoint / f"{name}.json").write_text(json.dumps([asdict(row) for row in rows]))


class Stored:
    """What the pieces of all ranks together hold."""

    def __init__(self, checkpoint: Path, pieces: list[_Piece]) -> None:
        self._checkpoint = checkpoint
        self._pieces: dict[str, dict[tuple[int, ...], _Piece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.name, {})[piece.offsets] = piece

    @classmethod
    def at(cls, checkpoint: Path, stem: str) -> Stored | None:
        """What `write_pieces` wrote there; None where it wrote nothing.

        Raises:
            MachineError: the tables of some ranks are missing, or one of them is no such table.
        """
        tables = [path for path in checkpoint.glob(f"{stem}_world_size_*_rank_*.json") if _size(path)]
        if not tables:
            return None
        if len(tables) != _size(tables[0]):
            raise MachineError(f"{checkpoint}: {len(tables)} of {_size(tables[0])} tables {stem}_…json are there")
        return cls(checkpoint, [piece for path in sorted(tables) for piece in _rows(path)])

    @property
    def names(self) -> list[str]:
        """Of the tensors."""
        return list(self._pieces)

    def shape(self, name: str) -> torch.Size:
        """Of the whole tensor."""
        return torch.Size(self._first(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Of its elements."""
        return TYPES[self._first(name).dtype]

    def _first(self, name: str) -> _Piece:
        return next(iter(self._pieces[name].values()))

    @torch.no_grad()
    def load_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill the tensors, each rank its own part of them. Types are converted.

        Raises:
            MachineError: one isn't there, or has another shape.
        """
        for name, tensor in tensors.items():
            if name not in self._pieces:
                raise MachineError(f"{self._checkpoint} has no {name}", "it was made with another model")
            if self.shape(name) != tensor.size():
                told = f"{name} is {list(self.shape(name))} in {self._checkpoint}, not {list(tensor.size())}"
                raise MachineError(told, "it was made with another model")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), self._metadata(tensors), is_coordinator=False)
        with _Files(self._checkpoint) as files:
            for item in planner.create_local_plan().items:
                planner.resolve_tensor(item).copy_(files.read(self._piece(item.storage_index), item))

    def _piece(self, index: MetadataIndex) -> _Piece:
        return self._pieces[index.fqn][tuple(index.offset or ())]

    def _metadata(self, names: Mapping[str, Any]) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(dtype=self.dtype(name)),
                    self.shape(name),
                    [
                        ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                        for piece in self._pieces[name].values()
                    ],
                )
                for name in names
            }
        )


class _Files:
    """Files of a checkpoint, each opened once."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._open: dict[str, Any] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)

    def read(self, piece: _Piece, item: ReadItem) -> Tensor:
        """The part of the piece that is asked for."""
        from safetensors import safe_open

        if piece.file not in self._open:
            opening: Callable[..., Any] = safe_open
            self._open[piece.file] = opening(self._checkpoint / piece.file, framework="pt").__enter__()
        file = self._open[piece.file]
        if not piece.sizes:
            tensor: Tensor = file.get_tensor(piece.key)
            return tensor
        begin, lengths = item.storage_offsets, item.lengths
        part: Tensor = file.get_slice(piece.key)[
            tuple(slice(at, at + length) for at, length in zip(begin, lengths, strict=True))
        ]
        return part


def _size(table: Path) -> int:
    """How many ranks wrote such tables; 0 where it is none."""
    found = re.search(r"_world_size_(\d+)_rank_\d+\.json$", table.name)
    return int(found[1]) if found else 0


def _rows(table: Path) -> Iterator[_Piece]:
    try:
        for row in json.loads(table.read_text()):
            lists = {name: tuple(row.pop(name)) for name in ("shape", "offsets", "sizes")}
            yield _Piece(**{**row, **lists})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MachineError(f"{table} isn't a table of pieces: {error}") from error
