"""Weights in shared memory: written once by the controller, mapped by the engines of the same node.

The files are kept between weight syncs, because allocating the memory takes longer than copying the weights.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quintet.runtime.remote_interface import SharedTensor, StagedTensors

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a private directory is created in it
MIN_FILE_BYTES, MAX_FILE_BYTES = 16 << 20, 1 << 30
"""Sizes of the first file and of the largest ones; each is as large as those before it together."""
ALIGNMENT = 64
"""Offsets are multiples of it."""


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

    def write(self, weights: Iterable[tuple[str, Tensor]]) -> list[SharedTensor]:
        """Copy the weights into shared memory, over those of the last call; return where they are."""
        for segment in self._segments:
            segment.used = 0
        return [self._copy(name, tensor.detach()) for name, tensor in weights]

    def close(self) -> None:
        """Delete the files."""
        self._segments.clear()
        for directory in self._directories.values():
            shutil.rmtree(directory, ignore_errors=True)
        self._directories.clear()

    def _copy(self, name: str, tensor: Tensor) -> SharedTensor:
        segment = self._segment(tensor.nbytes)
        offset, segment.used = segment.used, segment.used + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        view = _view(segment.memory, tensor.dtype, tensor.shape, offset)
        view.copy_(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        size = segment.memory.numel()
        return SharedTensor(name, dtype, tuple(tensor.shape), str(segment.path), size, offset)

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
            directory = self._directories.get(parent) or Path(tempfile.mkdtemp(prefix="quintet-weights-", dir=parent))
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


@dataclass(slots=True)
class SharedWeightsReader:
    """Mapped files of another process."""

    _mapped: dict[str, Tensor] = field(default_factory=dict)

    def read(self, tensors: StagedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights, which are valid until the controller writes the next ones."""
        if isinstance(tensors, Mapping):
            yield from tensors.items()
            return
        for tensor in tensors:
            memory = self._mapped.get(tensor.file)
            if memory is None:
                memory = self._mapped[tensor.file] = _map_file(Path(tensor.file), tensor.file_bytes)
            yield tensor.name, _view(memory, getattr(torch, tensor.dtype), tensor.shape, tensor.offset)


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


def _view(memory: Tensor, dtype: torch.dtype, shape: Iterable[int], offset: int) -> Tensor:
    sizes = list(shape)
    count = torch.Size(sizes).numel() * dtype.itemsize
    return memory[offset : offset + count].view(dtype).view(sizes)
