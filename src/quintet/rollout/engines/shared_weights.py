"""Weights in shared memory: written once by one process, mapped by others of the same node.

The files are kept between weight syncs, because allocating the memory takes longer than copying the weights.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory is created in it
MIN_FILE_BYTES, MAX_FILE_BYTES = 16 << 20, 1 << 30
"""Sizes of the first file and of the largest ones; each is as large as those before it together."""
DIRECTORY_PREFIX = "quintet-weights-"
ALIGNMENT = 64
"""Offsets are multiples of it."""


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """Place of a tensor in a file of shared memory."""

    name: str
    dtype: str
    """Name without `torch.`"""
    shape: tuple[int, ...]
    file: str
    file_bytes: int
    offset: int
    """Position in the file, bytes."""


StagedTensors = Sequence[SharedTensor] | Mapping[str, Tensor]
"""Full tensors of the policy under Hugging Face names: in shared memory or, from another machine, as they are."""


@dataclass(slots=True)
class _Segment:
    path: Path
    memory: Tensor
    """The file, uint8 [bytes]."""
    used: int = 0


@dataclass(slots=True)
class SharedWeights:
    """Files in shared memory that the weights of every weight sync are copied into."""

    _directories: dict[Path, Path] = field(default_factory=dict)
    """Directory of the files by its parent."""
    _segments: list[_Segment] = field(default_factory=list)
    _allocations: dict[tuple[str, torch.Size, torch.dtype], tuple[SharedTensor, Tensor]] = field(default_factory=dict)
    """Shared tensor of each weight, and a view of it."""

    def write(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> list[SharedTensor]:
        """Copy the weights into shared memory, over those of the last call, with `dtype` (default: their own); return
        where they are."""
        shared_tensors = []
        for name, tensor in weights:
            shared_tensor, view = self._allocated(name, tensor.shape, dtype or tensor.dtype)
            view.copy_(tensor.detach())
            shared_tensors.append(shared_tensor)
        return shared_tensors

    def close(self) -> None:
        """Delete the files."""
        self._segments.clear()
        self._allocations.clear()
        for directory in self._directories.values():
            shutil.rmtree(directory, ignore_errors=True)
        self._directories.clear()

    def _allocated(self, name: str, shape: torch.Size, dtype: torch.dtype) -> tuple[SharedTensor, Tensor]:
        """Return the shared tensor of a weight, the same in every call, and a view of it."""
        key = (name, shape, dtype)
        if key not in self._allocations:
            count = shape.numel() * dtype.itemsize
            segment = self._segment(count)
            offset, segment.used = segment.used, segment.used + -(-count // ALIGNMENT) * ALIGNMENT
            size, dtype_name = segment.memory.numel(), str(dtype).removeprefix("torch.")
            shared_tensor = SharedTensor(name, dtype_name, tuple(shape), str(segment.path), size, offset)
            self._allocations[key] = (shared_tensor, _view(segment.memory, dtype, shape, offset))
        return self._allocations[key]

    def _segment(self, size: int) -> _Segment:
        """Return the first file with enough free space, or a new one."""
        for segment in self._segments:
            if segment.memory.numel() - segment.used >= size:
                return segment
        total = sum(segment.memory.numel() for segment in self._segments)
        file_bytes = max(size, MIN_FILE_BYTES, min(total, MAX_FILE_BYTES))
        path = self._create_file(file_bytes)
        self._segments.append(_Segment(path, _map_file(path, file_bytes)))
        return self._segments[-1]

    def _create_file(self, size: int) -> Path:
        """Create a file that only its user can read, in shared memory or, if that is full, in the directory of
        temporary files.

        Raises:
            OSError: both are full.
        """
        for parent in (SHARED_MEMORY, Path(tempfile.gettempdir())):
            if not parent.is_dir():
                continue
            directory = self._directories.get(parent) or Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=parent))
            self._directories[parent] = directory
            path = directory / str(len(self._segments))
            try:
                _allocate(path, size)
            except OSError:
                path.unlink(missing_ok=True)
                if parent != SHARED_MEMORY:
                    raise
            else:
                return path
        raise OSError("there is no directory for temporary files")


class MappedWeights:
    """Weights in mapped files: yields names and tensors, which are valid until the files are written again."""

    def __init__(self, weights: Iterable[tuple[SharedTensor, Tensor]]) -> None:
        self._weights = tuple(weights)
        self._shared_tensors = {
            tensor.data_ptr(): shared_tensor for shared_tensor, tensor in self._weights if tensor.numel()
        }

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((shared_tensor.name, tensor) for shared_tensor, tensor in self._weights)

    def shared_tensor_of(self, tensor: Tensor) -> SharedTensor | None:
        """Return the shared tensor that holds all of `tensor`; None if there is none."""
        shared_tensor = self._shared_tensors.get(tensor.data_ptr())
        is_whole = shared_tensor is not None and shared_tensor.shape == tuple(tensor.shape) and tensor.is_contiguous()
        return shared_tensor if is_whole else None


@dataclass(slots=True)
class SharedWeightsReader:
    """Maps the files of another process, or has memory of the same layout that `buffers` yields."""

    open_file: Callable[[Path, int], Tensor] = lambda path, size: _map_file_of_another_process(path, size)
    """Return the memory of a file of that size, uint8 [bytes]."""
    _mapped: dict[str, Tensor] = field(default_factory=dict)
    _mapped_weights: dict[str, tuple[Sequence[SharedTensor], MappedWeights]] = field(default_factory=dict)
    """Shared tensors and weights of earlier calls by their first file: the controller writes two buffers in turns."""

    def read(self, weights: StagedTensors) -> Iterable[tuple[str, Tensor]]:
        """Return names and tensors, which are valid until the controller writes the next ones."""
        return weights.items() if isinstance(weights, Mapping) else self.map(weights)

    def map(self, shared_tensors: Sequence[SharedTensor]) -> MappedWeights:
        """Return the weights of these shared tensors."""
        buffer = shared_tensors[0].file if shared_tensors else ""
        previous, weights = self._mapped_weights.get(buffer, (None, None))
        if weights is None or previous != shared_tensors:
            weights = MappedWeights((shared_tensor, self._tensor(shared_tensor)) for shared_tensor in shared_tensors)
            self._mapped_weights[buffer] = (shared_tensors, weights)
        return weights

    def buffers(self, shared_tensors: Sequence[SharedTensor]) -> Iterator[Tensor]:
        """Yield the memory of each file up to the last of its weights, in the order of `shared_tensors`."""
        ends: dict[str, tuple[SharedTensor, int]] = {}
        for shared_tensor in shared_tensors:
            count = torch.Size(shared_tensor.shape).numel() * _dtype(shared_tensor.dtype).itemsize
            ends[shared_tensor.file] = (
                shared_tensor,
                max(shared_tensor.offset + count, ends.get(shared_tensor.file, (shared_tensor, 0))[1]),
            )
        return (self._memory(shared_tensor)[:end] for shared_tensor, end in ends.values())

    def _tensor(self, shared_tensor: SharedTensor) -> Tensor:
        return _view(
            self._memory(shared_tensor), _dtype(shared_tensor.dtype), shared_tensor.shape, shared_tensor.offset
        )

    def _memory(self, shared_tensor: SharedTensor) -> Tensor:
        if shared_tensor.file not in self._mapped:
            self._mapped[shared_tensor.file] = self.open_file(Path(shared_tensor.file), shared_tensor.file_bytes)
        return self._mapped[shared_tensor.file]


def _allocate(path: Path, size: int) -> None:
    """Create a file with memory of its own: writing into a mapped file without memory would end the process.

    Raises:
        OSError: there is not enough.
    """
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.truncate(descriptor, size)
    finally:
        os.close(descriptor)


def _map_file(path: Path, size: int) -> Tensor:
    """Return a file as uint8 [size]; changes reach all processes that have mapped it."""
    mapped: Tensor = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    return mapped


def _map_file_of_another_process(path: Path, size: int) -> Tensor:
    """See `_map_file`, which would create or enlarge any file.

    Raises:
        OSError: there is no such file.
        ValueError: it is not one of `SharedWeights` of this user.
    """
    status = path.lstat()
    is_private = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    if not is_private or status.st_size != size or not path.parent.name.startswith(DIRECTORY_PREFIX):
        raise ValueError(f"{path} is no file of {size} bytes with shared weights")
    return _map_file(path, size)


def _dtype(name: str) -> torch.dtype:
    """
    Raises:
        ValueError: torch has no such type.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r:.100} is no type of tensors")
    return dtype


def _view(memory: Tensor, dtype: torch.dtype, shape: Iterable[int], offset: int) -> Tensor:
    sizes = list(shape)
    count = torch.Size(sizes).numel() * dtype.itemsize
    return memory[offset : offset + count].view(dtype).view(sizes)
